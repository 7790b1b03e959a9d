"""The served list: what it finds, what it refuses to serve, how it follows a running run, and the pages in a
real browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from harness.dashboard.__main__ import main
from harness.dashboard.serve import ServeError, make_app, serve
from harness.dashboard.serve.index import Index
from harness.dashboard.serve.progress import Progress
from harness.metrics import write_summary
from tests.harness.test_dashboard import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ODD = "20260103-040405-größe Ж 漢 <b>&'\" #?%2e"


def done(path: Path, engine: str = "continuous", **meta: object) -> Path:
    run = make_run(path, engine, **meta)  # type: ignore[arg-type]
    write_summary(run)
    return run


def running(path: Path) -> Path:
    run = make_run(path, "orca", complete=False, incomplete_reason="running")
    meta = json.loads((run / "meta.json").read_text())
    meta["planned"]["requests"] = 80
    (run / "meta.json").write_text(json.dumps(meta))
    (run / "server_metrics.jsonl").write_text('{"error": null, "running": 7, "waiting": 3}\n')
    return run


def silence(run: Path) -> None:
    for file in run.iterdir():
        os.utime(file, (1, 1))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("serve") / "results"
    a = done(root / "runs" / "20260101-000000-static", "static", gap=0.04)
    done(root / "runs" / ODD, "chunked", started_at="2026-03-01T00:00:00+00:00")
    done(root / "runs" / "bad", complete=False, incomplete_reason="server died <b>now</b>")
    os.mkdir(os.fsencode(root / "runs") + b"/\xff\xfe")
    shutil.copytree(a, Path(os.fsdecode(os.fsencode(root / "runs") + b"/\xff\xfe")), dirs_exist_ok=True)
    torn = root / "runs" / "torn"
    torn.mkdir()
    (torn / "summary.json").write_text('{"valid": tr')
    (torn / "server.log").write_text("the <script>alert(1)</script> end\n")
    silence(running(root / "runs" / "killed"))
    running(root / "runs" / "live")
    sweep = root / "sweeps" / "nightly"
    sweep.mkdir(parents=True)
    runs = [{"run": f"../../runs/{a.name}", "error": None}, {"run": None, "error": "no"}]
    (sweep / "sweep.json").write_text(json.dumps({"points": 3, "runs": runs}))
    (root / "compare").mkdir()
    (root / "compare" / "compare.json").write_text('{"verdict": {"text": "chunked wins"}, "rounds": []}')
    for server in (root / "compare" / "arms" / "1-static", root / "capacity" / "server-static"):
        (server / "warmup").mkdir(parents=True)
        (server / "config.yaml").write_text("")
        (server / "warmup" / "summary.json").write_text("{}")
    (root / "capacity" / "capacity.json").write_text("[]")
    (root / "away").symlink_to("/etc")
    return root


def by_name(items) -> dict:
    return {Path(item["name"] if isinstance(item, dict) else item.name).name: item for item in items}


def test_everything_is_found_and_what_is_broken_says_why(results):
    found = by_name(Index(results).scan())
    states = {name: (item.kind, item.state) for name, item in found.items()}
    assert states == {
        "20260101-000000-static": ("run", "valid"),
        ODD: ("run", "valid"),
        "\ufffd\ufffd": ("run", "valid"),
        "bad": ("run", "invalid"),
        "torn": ("run", "broken"),
        "killed": ("run", "broken"),
        "live": ("run", "running"),
        "nightly": ("sweep", "done"),
        "compare": ("compare", "done"),
        "capacity": ("capacity", "broken"),
    }
    assert found["bad"].note == "incomplete: server died <b>now</b>"
    assert found["torn"].note.startswith("summary.json cannot be read")
    assert found["killed"].note == "no summary.json: it was ended from outside"
    assert found["nightly"].note == "2 runs, 1 failed, 1 to come"
    assert found["nightly"].runs == (found["20260101-000000-static"].id,)
    assert found["compare"].note == "chunked wins"
    assert found["live"].progress["done"] == 41
    assert found[ODD].figures["tpot_p50"] == pytest.approx(20.0)


def test_a_summary_is_read_again_only_when_it_has_changed(tmp_path, monkeypatch):
    run = done(tmp_path / "run")
    index = Index(tmp_path)
    assert index.scan()[0].state == "valid"
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read again"))
    assert index.scan()[0].state == "valid"
    monkeypatch.undo()
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "valid": False, "invalid_reasons": ["changed"]}))
    assert index.scan()[0].note == "changed"


def test_progress_counts_each_request_once_and_waits_for_half_a_line(tmp_path):
    run = running(tmp_path / "run")
    lines = (run / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (run / "requests.jsonl").unlink()
    part = run / "requests.0.jsonl"
    part.write_bytes(b"".join(lines[:11]) + lines[11][:50])
    progress = Progress(run)
    first = progress.poll()
    assert (first["scheduled"], first["done"], first["running"], first["waiting"]) == (80, 10, 7, 3)
    assert first["ttft_p50"] == pytest.approx(200.0)
    assert first["tpot_p50"] == pytest.approx(20.0)
    part.write_bytes(b"".join(lines))
    assert progress.poll()["done"] == 41
    part.rename(run / "requests.jsonl")  # the merged file has all of them again
    last = progress.poll()
    assert last["done"] == 41
    assert last["outcomes"] == {"completed": 40, "cancelled": 1}
    assert last["tokens_per_s"] == pytest.approx(440 / 4.3, rel=0.01)


def call(root: Path, *requests: tuple[str, dict[str, str]]) -> list[tuple[int, str]]:
    async def run() -> list[tuple[int, str]]:
        async with TestClient(TestServer(make_app(root))) as client:
            found = []
            for path, headers in requests:
                async with client.get(path, headers=headers) as answer:
                    found.append((answer.status, await answer.text()))
            return found

    return asyncio.run(run())


def test_nothing_but_what_the_list_names_is_served(results):
    ((_, listed),) = call(results, ("/items", {}))
    ids = {name: item["id"] for name, item in by_name(json.loads(listed)).items()}
    outside = [
        f"/run/{name}" for name in ("..%2f..%2fetc", "....", "0" * 16, ids["bad"] + "/meta.json", "%00")
    ]
    assert [status for status, _ in call(results, *((path, {}) for path in outside))] == [404] * len(outside)
    hostile = ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Host": "[::bad"})
    assert [status for status, _ in call(results, *(("/items", h) for h in hostile))] == [403] * 3
    good = [("/items", {"Host": "localhost:1"}), ("/", {}), (f"/compare?run={ids[ODD]}&run={ids['bad']}", {})]
    assert [status for status, _ in call(results, *good)] == [200] * 3
    pages = call(results, *((f"/run/{ids[name]}", {}) for name in ("torn", "bad", "\ufffd\ufffd", "nightly")))
    assert [status for status, _ in pages] == [200] * 4
    assert "&lt;script&gt;alert(1)" in pages[0][1]
    assert "server died &lt;b&gt;now" in pages[1][1]
    assert all("<script>alert(1)" not in page for _, page in pages)
    assert [s for s, _ in call(results, ("/compare", {}), ("/compare?run=../x", {}))] == [400, 400]


def test_what_is_not_http_is_refused_without_a_traceback(tmp_path):
    server = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    port = int(server.stdout.readline().split(":")[-1].split("/")[0])
    for sent in (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(sent)
            assert client.recv(12) == b"HTTP/1.0 400"
    server.send_signal(signal.SIGINT)
    assert server.communicate(timeout=60)[1] == ""


HOSTILE = {
    "deep": {"summary.json": b"[" * 200_000},
    "deep compare": {"compare.json": b"[" * 200_000},
    "pipe": {"summary.json": None},
    "nan": {"summary.json": b'{"valid": NaN, "invalid_reasons": [], "run": {}}'},
    "capacity": {"capacity.json": b'{"arms": {"a": [1]}}'},
    "live rows": {
        "config.yaml": b"",
        "meta.json": b'{"planned": {"requests": 9}, "engine": "\\ud800"}',
        "requests.jsonl": b'{"type": "request", "id": 1, "end_ns": "x"}\n{"type": "request", "chunk_ns": 3}\n'
        b'{"type": "request", "id": 2, "chunk_ns": [1], "chunk_tokens": [1]}\n' + b"[" * 200_000 + b"\n"
        b'{"type": "request", "id": 3, "end_ns": 5, "outcome": "completed"}\n',
        "server_metrics.jsonl": b'{"running": 1e999, "waiting": [2]}\n',
    },
    "live pipe": {"config.yaml": b"", "requests.jsonl": None},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_lies_in_a_folder_the_list_goes_on(tmp_path, kind):
    done(tmp_path / "good")
    (tmp_path / "hostile").mkdir()
    for name, content in HOSTILE[kind].items():
        if content is None:
            os.mkfifo(tmp_path / "hostile" / name)
        else:
            (tmp_path / "hostile" / name).write_bytes(content)
    ((status, listed),) = call(tmp_path, ("/items", {}))
    assert status == 200
    items = by_name(json.loads(listed, parse_constant=pytest.fail))
    assert items["good"]["state"] == "valid"
    assert items["hostile"]["state"] == ("running" if kind.startswith("live") else "broken")
    if kind == "live rows":
        progress = items["hostile"]["progress"]
        assert (progress["done"], progress["running"], progress["waiting"]) == (1, None, None)
    ((status, _),) = call(tmp_path, (f"/run/{items['hostile']['id']}", {}))
    assert status == 200


def test_a_damaged_folder_is_one_line_for_the_page_too(tmp_path, capsys):
    run = done(tmp_path / "run")
    (run / "engine_end.json").write_bytes(b"[" * 200_000)
    out = tmp_path / "page.html"
    assert main([str(run), "-o", str(out)]) == 0  # without what that file says
    (tmp_path / "compare.json").write_text('{"arms": [null], "rounds": 5}')
    capsys.readouterr()
    assert main([str(tmp_path), "-o", str(out)]) == 2
    assert capsys.readouterr().err.startswith("error: cannot be shown: ")


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none_is_not_another_one(tmp_path, port):
    with pytest.raises(ServeError, match=f"--port {port}: needs 0"):
        serve(tmp_path, "127.0.0.1", port, lambda url: pytest.fail(url))


def test_a_folder_that_is_none_and_a_port_that_is_taken_are_one_line(tmp_path):
    with pytest.raises(ServeError, match="is not a folder"):
        make_app(tmp_path / "none")
    (tmp_path / "runs").mkdir()
    first = subprocess.Popen(command(tmp_path / "runs"), stdout=subprocess.PIPE, text=True)
    port = first.stdout.readline().split(":")[-1].split("/")[0]
    second = subprocess.run(command(tmp_path / "runs", port), capture_output=True, text=True)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 0
    assert second.returncode == 2
    assert len(second.stderr.splitlines()) == 1


def command(root: Path, port: str = "0") -> list[str]:
    return [sys.executable, "-m", "harness.dashboard", "--serve", str(root), "--port", port]


@pytest.mark.e2e
def test_a_browser_filters_compares_and_sees_a_run_end_without_a_reload(results, tmp_path):
    if CHROMIUM is None:
        assert not os.environ.get("BATCHMARK_REQUIRE_CHROMIUM"), "chromium is not installed"
        pytest.skip("chromium is not installed: the list is not opened in a browser")
    from playwright.sync_api import expect, sync_playwright

    root = tmp_path / "results"
    shutil.copytree(results / "runs", root / "runs")
    live = root / "runs" / "live"
    os.utime(live / "meta.json")
    server = subprocess.Popen(command(root), stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().split()[1]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        problems: list[str] = []
        for width, scheme in ((390, "dark"), (1280, "light")):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.set_default_timeout(60_000)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
            page.goto(url)
            rows = page.locator("#list tbody tr")
            expect(rows).to_have_count(7, timeout=60_000)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            page.keyboard.press("/")
            page.keyboard.type("DIED")
            expect(rows).to_have_count(1)
            page.fill("#q", "no such thing")
            expect(page.locator("#empty")).to_have_text(re.compile("Nothing matches"))
            page.fill("#q", "")
            page.select_option("#engine", "chunked")
            expect(rows).to_have_count(1)
            page.select_option("#engine", "")
        page.get_by_role("button", name="TPOT p50").press("Enter")
        expect(rows.first).to_contain_text("static")  # the slowest comes first
        for box in rows.locator("input").all()[:2]:
            box.press("Space")
        page.click("#compare")
        page.wait_for_selector(".plot .main-svg")
        page.goto(url)
        os.utime(live / "meta.json")
        page.get_by_role("link", name="runs/live").click()
        expect(page.locator("[data-key=done]")).to_have_text("41")
        write_summary(live)  # the run ends
        page.frame_locator("iframe").locator(".plot .main-svg").first.wait_for()
        assert problems == []
        browser.close()
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
