"""How requests end, over real sockets: every end has one outcome, and every hang-up is seen by the server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.loadgen import LoadResult, LoadSettings, Stop, Target, run_load
from harness.loadgen.transport import AiohttpTransport
from harness.records import RequestLog, RequestRecord, read_request_file
from tests.support.load import CountingPrompts, Driven, drive, every, request
from tests.support.script_server import (
    DONE,
    Script,
    ScriptServer,
    Seen,
    Step,
    answer,
    completion,
    ending,
    plain,
    refusal,
    sse,
    tokens,
)

LONG_S = 30.0
"""Longer than any test: whatever waits for it has to be hung up on."""


Run = Callable[..., tuple[Driven, list[Seen]]]


TRANSPORTS = pytest.mark.parametrize("transport", ["http", "websocket"])


@pytest.fixture
def transport() -> str:
    return "http"


@pytest.fixture
def run(backend: str, transport: str) -> Run:
    """A load against a script, by each backend."""

    def run(script: Any, folder: Path, requests: Any = None, **kwargs: Any) -> tuple[Driven, list[Seen]]:
        async def go() -> tuple[Driven, list[Seen]]:
            async with ScriptServer(script) as server:
                plan = [replace(r, transport=transport) for r in requests or [request()]]
                driven = await drive(server.base_url, plan, folder, backend=backend, **kwargs)
                await settled(server)
                return driven, server.seen

        return asyncio.run(go())

    return run


async def settled(server: ScriptServer) -> None:
    """Until the server has noticed every hang-up; the connections of a closed session are gone too."""
    async with asyncio.timeout(5):
        while server.open_connections:
            await asyncio.sleep(0.005)


SLOW = Script([Step("hang", LONG_S)])
STALLS = Script([tokens(1), tokens(1), Step("hang")])
ENDS = [
    (answer(4), ("completed", None, 200)),
    (refusal(400, "prompt too long"), ("failed", "http_400", 400)),
    (refusal(404), ("failed", "http_404", 404)),
    (refusal(500), ("failed", "http_500", 500)),
    (refusal(429, code="queue_full"), ("rejected", "queue_full", 429)),
    (refusal(503), ("rejected", "http_503", 503)),
    (Script([plain(completion(finish="queue_timeout")), plain(DONE)]), ("rejected", "queue_timeout", 200)),
    (Script([tokens(1), plain(sse({"error": {"message": "boom"}}))]), ("failed", "error_event", 200)),
    (Script([tokens(1), plain(b"data: {oops\n\n")]), ("failed", "malformed", 200)),
    (Script([tokens(1)]), ("failed", "ended_early", 200)),
    (Script([tokens(1), Step("close")]), ("failed", "reset", 200)),
    (Script([tokens(1), Step("reset", 0.05)]), ("failed", "reset", 200)),
    (Script([Step("reset")], head_after_s=0.02), ("failed", "reset", None)),
    (Script([tokens(1), plain(completion(finish="length")), Step("close")]), ("completed", None, 200)),
]


@TRANSPORTS
@pytest.mark.parametrize(("script", "wanted"), ENDS)
def test_outcome(
    run: Run, tmp_path: Path, script: Script, wanted: tuple[str, str | None, int | None]
) -> None:
    record = run(script, tmp_path)[0].only
    if wanted[2] is None:  # whether the head was still read before the reset is the kernel's choice
        assert (record.outcome, record.reason) == wanted[:2]
    else:
        assert (record.outcome, record.reason, record.status) == wanted
    assert (record.error is None) == (record.outcome == "completed" or record.reason == "queue_timeout")


def test_a_refusal_shows_what_the_server_said(run: Run, tmp_path: Path) -> None:
    record = run(refusal(400, "max_tokens=7 is too much"), tmp_path)[0].only
    assert record.error is not None
    assert "max_tokens=7 is too much" in record.error
    assert record.output_tokens is None
    assert record.chunk_ns == ()


def test_nobody_answers(backend: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driven = asyncio.run(drive(f"http://127.0.0.1:{port}", every(0.01, 3), tmp_path, backend=backend))
    assert {(r.outcome, r.reason) for r in driven.records.values()} == {("failed", "connect")}
    assert driven.result.sent == 0


NO_HEAD = Script([], head_after_s=LONG_S)
HANG_UPS = [
    (SLOW, "before_first_token", 0.1, 0),
    (NO_HEAD, "before_first_token", 0.1, 0),
    (NO_HEAD, "after_s", 0.1, 0),
    (STALLS, "after_s", 0.4, 2),
    (STALLS, "after_tokens", 2, 2),
    (Script([tokens(5), Step("hang")]), "after_tokens", 2, 1),
]


@pytest.mark.parametrize(
    ("script", "kind", "value", "chunks", "transport"),
    [(*case, "http") for case in HANG_UPS] + [(*HANG_UPS[i], "websocket") for i in (0, 4)],
)
def test_a_user_hangs_up(
    run: Run, tmp_path: Path, script: Script, kind: str, value: float, chunks: int
) -> None:
    # A second answer keeps the load and its connections alive long after the hang-up.
    other = answer(1, first_s=0.6 + (0 if kind == "after_tokens" else 2 * value))
    driven, all_seen = run(
        lambda body, n: other if body["batchmark"]["id"] == "r000001" else script,
        tmp_path,
        [request(cancel_kind=kind, cancel_value=value), request(1, 0.01)],
    )
    seen, witness = sorted(all_seen, key=lambda s: s.body["batchmark"]["id"])
    record = driven.records["r000000"]
    assert (record.outcome, record.reason) == ("cancelled", kind)
    assert len(record.chunk_ns) == chunks
    assert seen.ended_ns is None
    assert record.end_ns is not None
    assert record.send_ns is not None
    assert seen.closed_ns is not None
    assert driven.t0_ns + record.send_ns < seen.closed_ns < witness.sends[0][0]
    if kind != "after_tokens":
        assert record.dispatch_ns is not None  # from here on the patience runs
        assert record.end_ns - record.dispatch_ns >= value * 1e9
    assert record.output_tokens == (sum(record.chunk_tokens) or None)


def test_a_token_in_time_keeps_the_user(run: Run, tmp_path: Path) -> None:
    script = Script([tokens(1), tokens(1, 0.3), *ending(2)])
    driven, _ = run(script, tmp_path, [request(cancel_kind="before_first_token", cancel_value=0.15)])
    assert driven.only.outcome == "completed"


@TRANSPORTS
@pytest.mark.parametrize("last", [plain(completion(finish="length")), plain(DONE)])
def test_a_whole_answer_is_completed_though_its_formalities_never_come(
    run: Run, tmp_path: Path, last: Step
) -> None:
    driven, (seen,) = run(Script([tokens(2), last, Step("hang")]), tmp_path, [request(timeout_s=0.2)])
    assert (driven.only.outcome, driven.only.chunk_tokens) == ("completed", (2,))
    assert seen.closed_ns is not None


def test_an_answer_that_ends_first_is_completed(run: Run, tmp_path: Path) -> None:
    requests = [
        request(0, cancel_kind="after_tokens", cancel_value=4),
        request(1, cancel_kind="after_s", cancel_value=LONG_S),
    ]
    # The last tokens, finish_reason and [DONE] are one write: there is nobody left to hang up on.
    whole = b"".join(step.data for step in answer(4).steps)
    driven, _ = run(Script([Step("tokens", 0.0, whole, 4)]), tmp_path, requests)
    assert {r.outcome for r in driven.records.values()} == {"completed"}


@TRANSPORTS
@pytest.mark.parametrize("script", [SLOW, STALLS, Script([], head_after_s=LONG_S)])
def test_patience_ends(run: Run, tmp_path: Path, script: Script) -> None:
    """The request's own patience stands before load.timeout_s."""
    requests = [request(0, timeout_s=0.1), request(1)]
    driven, seen = run(script, tmp_path, requests, timeout_s=0.4)
    first, second = (driven.records[f"r00000{i}"] for i in range(2))
    assert {(r.outcome, r.reason) for r in (first, second)} == {("timed_out", "client_timeout")}
    assert all(s.closed_ns is not None for s in seen)
    assert first.end_ns is not None
    assert second.end_ns is not None
    assert first.end_ns < second.end_ns


def test_stop_cuts_off_what_is_open_and_what_has_not_left(backend: str, tmp_path: Path) -> None:
    async def go() -> tuple[Driven, list[Seen], float]:
        stop, at = Stop(), 0.0

        def stopped() -> None:
            nonlocal at
            at = time.monotonic()
            stop.set("interrupted")

        def on_event(what: str, record: RequestRecord | None) -> None:
            if what == "ended" and record is not None and record.outcome == "completed":
                threading.Timer(0.05, stopped).start()

        scripts = [answer(2), STALLS, SLOW]
        async with ScriptServer(lambda body, number: scripts[number]) as server:
            requests = [*every(0.0, 3), request(3, LONG_S)]
            driven = await drive(
                server.base_url, requests, tmp_path, stop=stop, on_event=on_event, backend=backend
            )
            took = time.monotonic() - at
            await settled(server)
            return driven, server.seen, took

    driven, seen, took = asyncio.run(go())
    ends = {i: (r.outcome, r.reason) for i, r in driven.records.items()}
    assert sorted(ends.values(), key=str) == [
        ("completed", None),
        ("cut_off", "in_flight"),
        ("cut_off", "in_flight"),
        ("cut_off", "not_sent"),
    ]
    unsent = driven.records["r000003"]
    assert (unsent.dispatch_ns, unsent.send_ns, unsent.end_ns) == (None, None, None)
    assert unsent.intended_ns == round(LONG_S * 1e9)
    assert driven.closed
    assert driven.result.incomplete_reason == "interrupted"
    assert sum(s.closed_ns is not None for s in seen) == 2
    assert took < 2


def test_a_dead_server_ends_the_load(backend: str, tmp_path: Path) -> None:
    """the hang of vllm-project/guidellm#431: the server dies mid-run with answers open and most of the
    schedule ahead."""

    async def go() -> tuple[Driven, float]:
        async with ScriptServer(STALLS) as server:
            died = 0.0

            async def kill() -> None:
                nonlocal died
                while sum(bool(seen.sends) for seen in server.seen) < 3:  # answers are open
                    await asyncio.sleep(0.05)
                await server.stop()
                died = time.monotonic()

            killer = asyncio.create_task(asyncio.wait_for(kill(), LONG_S))
            requests = [*every(0.05, 100), request(100, LONG_S)]
            driven = await drive(server.base_url, requests, tmp_path, backend=backend)
            took = time.monotonic() - died
            await killer
            return driven, took

    driven, took = asyncio.run(go())
    assert took < 10
    assert driven.result.incomplete_reason is not None
    assert driven.result.incomplete_reason.startswith("server unreachable")
    reasons = {(r.outcome, r.reason) for r in driven.records.values()}
    assert {("failed", "reset"), ("failed", "connect"), ("cut_off", "not_sent")} <= reasons
    assert driven.closed
    assert driven.result.scheduled == 101


def test_a_server_that_refuses_for_a_moment_does_not_end_the_load(run: Run, tmp_path: Path) -> None:
    scripts = {0: Script([tokens(1), Step("reset", 0.01)])}
    driven, _ = run(lambda body, n: scripts.get(n, answer(2)), tmp_path, every(0.05, 10))
    assert driven.result.incomplete_reason is None
    assert driven.result.counts["completed"] == 9


def test_a_full_disk_ends_the_load_and_keeps_what_is_written(backend: str, tmp_path: Path) -> None:
    class Full(RequestLog):
        def append(self, record: RequestRecord) -> None:
            if self.records == 3:
                self._file.close()
                self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
            super().append(record)

    async def go() -> LoadResult:
        async with ScriptServer(answer(2)) as server:
            t0_ns = time.monotonic_ns()
            return await asyncio.to_thread(
                run_load,
                [*every(0.02, 6), request(6, LONG_S)],
                CountingPrompts(),
                Target(server.base_url, "m"),
                LoadSettings(run_id="test", backend=backend),
                Full(tmp_path / "requests.jsonl", run="test", t0_ns=t0_ns),
                t0_ns=t0_ns,
                stop=Stop(),
            )

    result = asyncio.run(go())
    assert result.incomplete_reason is not None
    assert result.incomplete_reason.startswith(f"cannot write {tmp_path}/requests.jsonl: No space left")
    assert result.scheduled == sum(result.counts.values()) == 7
    assert result.counts["cut_off"] > 0
    file = read_request_file(tmp_path / "requests.jsonl")
    assert len(file.records) == 3
    assert not file.closed


def test_a_request_that_this_client_cannot_send_is_a_record_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def broken(self: AiohttpTransport, path: str, body: bytes, sink: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(AiohttpTransport, "post", broken)
    driven = asyncio.run(drive("http://127.0.0.1:1", [request()], tmp_path, backend="aiohttp"))
    assert (driven.only.outcome, driven.only.reason) == ("failed", "client_error")
    assert driven.only.error == "ZeroDivisionError: a bug"


steps = st.sampled_from(
    [
        tokens(1),
        tokens(3),
        tokens(2, with_ids=False),
        plain(completion()),
        plain(completion(finish="stop")),
        plain(DONE),
        plain(b"data: {bad\n\n"),
        plain(b": ping\n\n"),
        plain(sse({"error": "x"})),
        Step("reset"),
        Step("close"),
        Step("hang"),
        tokens(1, 0.02),
    ]
)
scripts = st.builds(
    Script,
    st.lists(steps, max_size=6),
    status=st.sampled_from([200, 200, 200, 200, 400, 429, 503]),
    split=st.sampled_from([None, 1, 5]),
    head_after_s=st.sampled_from([0.0, 0.0, 0.02]),
)
patience = st.sampled_from(
    [
        {},
        {"cancel_kind": "before_first_token", "cancel_value": 0.01},
        {"cancel_kind": "after_tokens", "cancel_value": 2},
        {"cancel_kind": "after_s", "cancel_value": 0.015},
        {"timeout_s": 0.02},
        {"stream": False},
        {"transport": "websocket"},
        {"transport": "websocket", "cancel_kind": "after_tokens", "cancel_value": 2},
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(scripts, patience, st.sampled_from([0.0, 0.005, 0.03]), st.sampled_from([None, None, "a"])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(
        [
            {"kind": "open"},
            {"kind": "open", "concurrency": 1},
            {"kind": "open", "concurrency": 1, "max_wait_s": 0.02},
            {"kind": "closed", "concurrency": 2, "ramp_s": 0.01},
        ]
    ),
    st.sampled_from([None, 0.0, 0.02]),
    st.sampled_from([0, 0, 2]),
)
def test_every_request_is_accounted_for(
    backend: str,
    tmp_path: Path,
    plan: list[Any],
    mode: dict[str, Any],
    stop_after_s: float | None,
    retries: int,
) -> None:
    """Whatever a server does and a user wants: one record each, outcomes that add up (checked by drive)."""
    requests, turn = [], 0
    for index, (_, wishes, _, session) in enumerate(plan):
        follows = {"session": session, "turn": turn, "think_s": 0.003 if turn else None} if session else {}
        turn += session is not None
        at = round(sum(p[2] for p in plan[: index + 1]), 4)
        requests.append(request(index, at, **wishes, **follows))

    async def go() -> Driven:
        stop = Stop()
        if stop_after_s is not None:
            threading.Timer(stop_after_s, stop.set, ["interrupted"]).start()

        def script(body: dict[str, Any], number: int) -> Script:
            return plan[int(body["batchmark"]["id"][1:])][0]

        async with ScriptServer(script) as server:
            return await drive(
                server.base_url,
                requests,
                tmp_path,
                stop=stop,
                timeout_s=0.1,
                backend=backend,
                retries=retries,
                retry_backoff_s=0.01,
                **mode,
            )

    driven = asyncio.run(go())
    assert driven.closed
    assert set(driven.records) == {r.id for r in requests}
    assert (driven.result.incomplete_reason is not None) == (driven.result.incomplete_reason == "interrupted")
    if driven.result.incomplete_reason is None:
        cut_off = {r.reason for r in driven.records.values() if r.outcome == "cut_off"}
        assert cut_off <= {"shed", "session_ended"}
    assert bool(retries) or not driven.retries
