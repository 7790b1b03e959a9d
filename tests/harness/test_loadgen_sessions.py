"""Sessions, retries and shed arrivals over real sockets, against the server's own log."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.loadgen import Stop
from tests.support.load import Driven, drive, every, request
from tests.support.script_server import Script, ScriptServer, Seen, Step, answer, ending, refusal, tokens
from workloads.schedule import ScheduledRequest

NS = 1_000_000_000
Run = Callable[..., tuple[Driven, list[Seen]]]


@pytest.fixture
def run(backend: str) -> Run:
    """A load against a script, by each backend."""

    def run(script: Any, folder: Path, plan: Any, **kwargs: Any) -> tuple[Driven, list[Seen]]:
        async def go() -> tuple[Driven, list[Seen]]:
            async with ScriptServer(script) as server:
                driven = await drive(server.base_url, plan, folder, backend=backend, **kwargs)
                return driven, server.seen

        return asyncio.run(go())

    return run


def session(name: str, start: int, arrival_s: float, *think_s: float) -> list[ScheduledRequest]:
    """A first turn, and one more per think time."""
    first = request(start, arrival_s, session=name)
    later = [
        request(start + k, arrival_s + k * 0.001, session=name, turn=k, think_s=think)
        for k, think in enumerate(think_s, 1)
    ]
    return [first, *later]


def named(seen: list[Seen]) -> list[str]:
    return [s.body["batchmark"]["id"] for s in seen]


def test_a_turn_leaves_after_the_end_of_the_one_before_it_and_the_thought(run: Run, tmp_path: Path) -> None:
    plan = sorted(
        [*session("a", 0, 0.0, 0.05, 0.1), *session("b", 3, 0.01, 0.02, 0.02)], key=lambda r: r.arrival_s
    )
    driven, seen = run(answer(3, 0.01), tmp_path, plan)
    assert driven.result.counts["completed"] == 6
    for name in ("a", "b"):
        turns = [driven.records[r.id] for r in sorted(plan, key=lambda r: r.turn) if r.session == name]
        thoughts = [r.think_s for r in sorted(plan, key=lambda r: r.turn) if r.session == name]
        for before, after, think_s in zip(turns, turns[1:], thoughts[1:], strict=False):
            assert before.end_ns is not None
            assert after.dispatch_ns is not None
            assert think_s is not None
            assert after.intended_ns == before.end_ns + round(think_s * NS)
            assert after.dispatch_ns >= after.intended_ns
    # The server's own log says the same: no turn came before the answer to the one before it was over.
    by_id = {s.body["batchmark"]["id"]: s for s in seen}
    for before_id, after_id in (("r000000", "r000001"), ("r000001", "r000002"), ("r000003", "r000004")):
        ended_ns = by_id[before_id].sends[-1][0]
        think_s = next(r.think_s for r in plan if r.id == after_id)
        assert think_s is not None
        assert by_id[after_id].received_ns >= ended_ns + think_s * NS


def test_many_sessions_end_and_none_hangs(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#42226: multi-turn sessions over a cap, some turns refused, some hung up on."""
    plan = [turn for k in range(20) for turn in session(f"s{k}", 4 * k, 0.002 * k, 0.0, 0.005, 0.001)]
    plan = sorted((replaced(turn) for turn in plan), key=lambda r: r.arrival_s)
    refused = {r.id for r in plan if int(r.id[1:]) % 16 == 6}

    def script(body: dict[str, Any], number: int) -> Script:
        return refusal(503) if body["batchmark"]["id"] in refused else answer(2, 0.002)

    driven, seen = run(script, tmp_path, plan, concurrency=5)
    assert len(driven.records) == 80
    reasons = Counter((r.outcome, r.reason) for r in driven.records.values())
    assert reasons["rejected", "http_503"] == len(refused) == 5
    assert reasons["cut_off", "session_ended"] == 5  # each refused turn was the third of four
    assert reasons["completed", None] == 70
    assert len(seen) == len(set(named(seen))) == 75
    assert driven.result.incomplete_reason is None


def replaced(turn: ScheduledRequest) -> ScheduledRequest:
    """Patience that is never used up: its timers must not disturb."""
    return request(
        int(turn.id[1:]),
        turn.arrival_s,
        session=turn.session,
        turn=turn.turn,
        think_s=turn.think_s,
        cancel_kind="after_s",
        cancel_value=30.0,
    )


def test_clients_of_a_closed_loop_keep_to_their_sessions(run: Run, tmp_path: Path) -> None:
    plan = [turn for k in range(4) for turn in session(f"s{k}", 3 * k, 0.0, 0.01, 0.01)]
    driven, seen = run(answer(2, 0.01), tmp_path, plan, kind="closed", concurrency=2)
    assert driven.result.counts["completed"] == 12
    sessions = {f"r{k:06d}": k // 3 for k in range(12)}
    order = [sessions[name] for name in named(seen)]
    # Two at a time, and nobody new before one of them has gone through its three turns.
    assert set(order[:6]) == {0, 1}
    assert set(order[6:]) == {2, 3}


def test_stop_while_users_think(run: Run, tmp_path: Path) -> None:
    stop = Stop()

    def on_event(what: str, record: object) -> None:
        if what == "ended" and not stop.is_set:
            stop.set("interrupted")

    began = time.monotonic()
    driven, seen = run(answer(1), tmp_path, session("a", 0, 0.0, 30.0, 30.0), stop=stop, on_event=on_event)
    assert time.monotonic() - began < 15
    assert [(r.outcome, r.reason) for _, r in sorted(driven.records.items())] == [
        ("completed", None),
        ("cut_off", "not_sent"),
        ("cut_off", "not_sent"),
    ]
    assert len(seen) == 1
    assert driven.result.incomplete_reason == "interrupted"


BREAKS = Script([Step("reset")], head_after_s=0.01)
RETRIED = [
    (refusal(503), "http_503"),
    (refusal(429), "http_429"),
    (refusal(500), "http_500"),
    (BREAKS, "reset"),
]


@pytest.mark.parametrize(("first", "reason"), RETRIED)
def test_a_retry_is_counted_and_keeps_the_intended_time(
    run: Run, tmp_path: Path, first: Script, reason: str
) -> None:
    scripts = [first, first, answer(3)]
    driven, seen = run(
        lambda body, number: scripts[number], tmp_path, [request()], retries=3, retry_backoff_s=0.05
    )
    record = driven.only
    assert (record.outcome, record.attempt, record.final) == ("completed", 3, True)
    assert [(r.attempt, r.final, r.reason) for r in driven.retries] == [
        (1, False, reason),
        (2, False, reason),
    ]
    assert {r.intended_ns for r in (*driven.retries, record)} == {0}
    # Our servers are told which attempt it is; the waits are at least as long as asked, each twice the last.
    assert [s.body["batchmark"]["attempt"] for s in seen] == [1, 2, 3]
    assert {s.body["batchmark"]["id"] for s in seen} == {"r000000"}
    waits = [b.received_ns - a.received_ns for a, b in pairwise(seen)]
    assert waits[0] >= 0.05 * NS
    assert waits[1] >= 0.1 * NS
    result = driven.result
    assert (result.retried, result.sent_attempts, result.sent, result.scheduled) == (2, 3, 1, 1)


def test_retries_run_out(run: Run, tmp_path: Path) -> None:
    driven, seen = run(refusal(503), tmp_path, every(0.01, 3), retries=1, retry_backoff_s=0.01)
    assert len(seen) == driven.result.sent_attempts == 6
    assert driven.result.counts["rejected"] == 3
    assert {r.attempt for r in driven.records.values()} == {2}


def test_there_is_no_retry_once_a_token_has_come_or_when_none_is_asked_for(run: Run, tmp_path: Path) -> None:
    late = Script([tokens(1), Step("reset", 0.02)])
    driven, seen = run(late, tmp_path, [request()], retries=2, retry_backoff_s=0.01)
    assert (len(seen), driven.only.reason, driven.retries) == (1, "reset", [])
    driven, seen = run(refusal(503), tmp_path, [request()])
    assert (len(seen), driven.only.reason, driven.retries) == (1, "http_503", [])


def test_stop_between_two_attempts(run: Run, tmp_path: Path) -> None:
    stop = Stop()

    def on_event(what: str, record: object) -> None:
        if what == "retried":
            threading.Timer(0.05, stop.set, ["interrupted"]).start()

    driven, seen = run(
        refusal(503), tmp_path, [request()], retries=1, retry_backoff_s=60, stop=stop, on_event=on_event
    )
    assert len(seen) == 1
    assert (driven.only.attempt, driven.only.outcome, driven.only.reason) == (2, "cut_off", "not_sent")
    assert (driven.result.sent, driven.result.retried) == (1, 1)


def test_who_waits_too_long_for_a_place_is_shed_and_all_adds_up(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#45502: a stall under a cap. Sent, and shed with a reason, add up to the schedule; the
    backlog does not leave in one burst over the cap."""
    stall = Script([tokens(1, 0.6), *ending(1)])
    driven, seen = run(
        lambda body, number: stall if number == 5 else answer(1, first_s=0.005),
        tmp_path,
        every(0.02, 40),
        concurrency=1,
        max_wait_s=0.2,
    )
    reasons = Counter((r.outcome, r.reason) for r in driven.records.values())
    assert reasons["completed", None] + reasons["cut_off", "shed"] == 40
    assert reasons["completed", None] == len(seen)
    assert reasons["cut_off", "shed"] >= 15  # 0.6 s of stall are 30 arrivals, the last 0.2 s may still leave
    stalled = driven.records[named(seen)[5]]
    assert stalled.end_ns is not None
    for record in driven.records.values():
        index = int(record.id[1:])
        assert record.intended_ns == round(index * 0.02 * NS)
        if record.reason == "shed":
            assert record.dispatch_ns is record.send_ns is record.end_ns is None
        else:
            assert record.dispatch_ns is not None
            assert record.dispatch_ns >= record.intended_ns
    # Who was due more than max_wait_s before the stall's end is gone.
    early = [r for r in driven.records.values() if r.intended_ns > stalled.intended_ns]
    assert {r.reason for r in early if r.intended_ns < stalled.end_ns - 0.2 * NS - 1} == {"shed"}
    assert driven.result.incomplete_reason is None
