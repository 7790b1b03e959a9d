"""What aiohttp's backend is kept for: redirects, proxies and TLS."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.loadgen import LoadSettings, Stop, Target
from harness.loadgen.job import Job
from harness.loadgen.worker import warm_up
from tests.support.load import CountingPrompts, Driven, backends, drive, every, request
from tests.support.script_server import Script, ScriptServer, answer

ROOT = Path(__file__).parents[2]
KEY = "s3cret"


def redirect(status: int, location: str) -> Script:
    head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
    return Script([], head=head.encode(), framing="length")


async def load(server: ScriptServer, folder: Path, plan: Any = None, **settings: Any) -> Driven:
    target = Target(server.base_url, "m", api_key=KEY)
    settings = {"backend": "aiohttp", **settings}
    return await drive(server.base_url, plan or [request()], folder, target=target, **settings)


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_that_keeps_the_method_is_followed(tmp_path: Path, status: int) -> None:
    async def go() -> None:
        async with ScriptServer(lambda body, n: answer(3) if n % 2 else redirect(status, "/v2/x")) as server:
            driven = await load(server, tmp_path, every(0.0, 3), kind="closed", concurrency=1)
            assert driven.result.counts["completed"] == 3
            assert [s.path for s in server.seen] == ["/v1/completions", "/v2/x"] * 3
            assert server.seen[0].body == server.seen[1].body
            assert {s.headers["authorization"] for s in server.seen} == {f"Bearer {KEY}"}
            # The first send counts: what the redirect costs is the server's.
            for record in driven.records.values():
                assert record.send_ns is not None
                first = server.by_id(record.id)
                assert driven.t0_ns + record.send_ns <= first.received_ns
            assert driven.result.connections == server.connections == 1

    asyncio.run(go())


def test_the_key_goes_to_no_other_origin(tmp_path: Path) -> None:
    async def go() -> None:
        async with ScriptServer(answer(3)) as other:
            away = redirect(307, f"{other.base_url}/v1/completions")
            async with ScriptServer(away) as server:
                driven = await load(server, tmp_path)
                assert driven.only.outcome == "completed"
                assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
                (seen,) = other.seen
                assert "authorization" not in seen.headers

    asyncio.run(go())


@pytest.mark.parametrize(
    ("status", "location", "requests"),
    [
        (302, "/v2/x", 1),  # it would become a GET
        (303, "/v2/x", 1),
        (307, "", 1),
        (307, "ftp://127.0.0.1/x", 1),
        (307, "http://[::1/x", 1),
        (307, "/round", 6),
    ],
)
def test_what_is_not_followed_is_a_failure(tmp_path: Path, status: int, location: str, requests: int) -> None:
    async def go() -> None:
        async with ScriptServer(redirect(status, location)) as server:
            driven = await load(server, tmp_path)
            assert (driven.only.outcome, driven.only.reason) == ("failed", f"http_{status}")
            assert len(server.seen) == requests

    asyncio.run(go())


@pytest.mark.skipif("lean" not in backends(), reason="needs the lean backend")
def test_the_lean_backend_says_that_it_met_a_redirect(tmp_path: Path) -> None:
    async def go() -> str | None:
        async with ScriptServer(redirect(307, "/v2/x")) as server:
            target = Target(server.base_url, "m")
            settings = LoadSettings(run_id="test", backend="lean")
            job = Job(target, settings, [], seed=0, log=tmp_path / "requests.jsonl", warm_up=[request()])
            return await asyncio.to_thread(warm_up, job, CountingPrompts(), Stop())

    assert asyncio.run(go()) == (
        "HTTP 307, a redirect; give the address that it leads to (load.backend=aiohttp follows 307 and 308)"
    )


def test_the_environments_proxy_is_used_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async def go() -> None:
        async with ScriptServer(answer(3)) as proxy:
            monkeypatch.setenv("http_proxy", proxy.base_url)
            nowhere = "http://nobody.invalid:8000"
            driven = await drive(nowhere, [request()], tmp_path, trust_env=True)
            assert driven.only.outcome == "completed"
            assert driven.result.backend == "aiohttp"  # auto knows that the lean one speaks to no proxy
            assert "load.trust_env=true" in driven.result.notes[0]
            assert [s.path for s in proxy.seen] == [f"{nowhere}/v1/completions"]
            async with ScriptServer(answer(3)) as server:
                driven = await load(server, tmp_path, trust_env=False)
                assert driven.only.outcome == "completed"
                assert (len(server.seen), len(proxy.seen)) == (1, 1)

    asyncio.run(go())


PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from harness.loadgen import Target
from tests.support.load import drive, every
url, folder = sys.argv[1:]
driven = asyncio.run(drive(url, every(0.02, 3), Path(folder), target=Target(url, "m")))
print(json.dumps([driven.result.backend, driven.result.notes, driven.result.counts["completed"],
                  sorted({r.reason or "" for r in driven.records.values()})]))
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls_is_spoken_and_certificates_are_checked(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def go() -> list[Any]:
        server = ScriptServer(answer(3))
        listening = await asyncio.start_server(server._accept, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        said = []
        for trusted in ({"SSL_CERT_FILE": str(certificate)}, {}):
            # aiohttp reads the trusted certificates when it is imported: a process of its own for each.
            env = {k: v for k, v in os.environ.items() if k != "SSL_CERT_FILE"} | trusted
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, url, str(tmp_path)),
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
                env=env | {"PYTHONPATH": str(ROOT)},
            )
            said.append(json.loads((await process.communicate())[0]))
        listening.close()
        return said

    (trusted, unknown) = asyncio.run(go())
    assert trusted == ["aiohttp", ["load.backend=auto: aiohttp, since https needs TLS"], 3, [""]]
    assert unknown[2:] == [0, ["connect"]]
