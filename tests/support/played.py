"""Drives a dispatcher on a clock of the test's own, as a backend does, and checks what came of it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from harness.loadgen.answer import Verdict
from harness.loadgen.dispatch import NS, Dispatcher, Due
from harness.loadgen.settings import LoadSettings
from workloads.schedule import ScheduledRequest

MS = 1_000_000
T0 = 77 * NS
OK = Verdict("completed")
RESET = Verdict("failed", "reset")
BUSY = Verdict("rejected", "queue_full", status=429)
VERDICTS = {
    "ok": (OK, 4),
    "reset": (RESET, 0),
    "reset_late": (RESET, 2),
    "busy": (BUSY, 0),
    "http_500": (Verdict("failed", "internal", status=500), 0),
    "http_400": (Verdict("failed", "http_400", status=400), 0),
    "cancelled": (Verdict("cancelled", "after_s"), 0),
    "timed_out": (Verdict("timed_out", "client_timeout"), 0),
}
RETRIED = {"reset", "busy", "http_500"}


@dataclass(frozen=True)
class Taken:
    due: Due
    at_ns: int
    ended_ns: int
    how: str
    retried: bool


@dataclass
class Played:
    """What came of a schedule. final: id -> (outcome, reason), of the one last record of each request."""

    dispatcher: Dispatcher
    taken: list[Taken] = field(default_factory=list)
    final: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    never: list[tuple[Due, str, int]] = field(default_factory=list)  # not sent: reason, when we were told
    most: int = 0  # under way at once

    def of(self, name: str) -> list[Taken]:
        return [taken for taken in self.taken if taken.due.request.id == name]


def play(
    requests: Sequence[ScheduledRequest],
    *,
    service_ms: Sequence[float] = (10,),
    ends: Sequence[str] = ("ok",),
    late_ms: Sequence[float] = (0,),
    stop_ms: float | None = None,
    **settings: Any,
) -> Played:
    """Drive a dispatcher as a backend does. The k-th attempt takes service_ms[k], ends as ends[k] and is
    taken late_ms[k] after it could be (all lists go round); the load is stopped at stop_ms."""
    load = LoadSettings(run_id="x", **settings)
    dispatcher = Dispatcher(requests, load, t0_ns=T0)
    played = Played(dispatcher)
    under_way: list[tuple[int, int, Due, int, str]] = []  # end, number, due, taken at, how
    now, number, through = T0 - 5 * MS, 0, False
    stop_ns = None if stop_ms is None else T0 + round(stop_ms * MS)

    waiting: list[int] = []  # due times
    if load.kind == "open":
        waiting = [T0 + round(r.arrival_s * NS) for r in requests if r.think_s is None]

    def never(due: Due, reason: str) -> None:
        if reason == "shed":
            waiting.remove(due.due_ns)
        assert due.request.id not in played.final, due
        played.final[due.request.id] = ("cut_off", reason)
        played.never.append((due, reason, now))

    def end(due: Due, at_ns: int, verdict: Verdict, tokens: int, taken_ns: int, how: str) -> None:
        again = dispatcher.ended(due, verdict, at_ns, tokens=tokens)
        played.taken.append(Taken(due, taken_ns, at_ns, how, again))
        if not again:
            assert due.request.id not in played.final, due
            played.final[due.request.id] = (verdict.outcome, verdict.reason)
        while (expected := dispatcher.expected()) is not None:
            waiting.append(expected.due_ns)

    while True:
        while (dropped := dispatcher.drop()) is not None:
            never(*dropped)
        next_ns = dispatcher.next_ns()
        through = through or dispatcher.exhausted
        assert not (through and next_ns is not None)  # what is through stays through
        if not under_way:
            # Nothing but the dispatcher can make something happen: it either names a time or is through.
            assert dispatcher.exhausted == (next_ns is None)
            if next_ns is None:
                break
        moments = [m for m in (next_ns, under_way[0][0] if under_way else None) if m is not None]
        if stop_ns is not None and min(moments) >= stop_ns:
            now = max(now, stop_ns)
            break
        if under_way and (next_ns is None or under_way[0][0] <= next_ns):
            ended_ns, _, due, taken_ns, how = heapq.heappop(under_way)
            now = max(now, ended_ns)
            end(due, ended_ns, *VERDICTS[how], taken_ns, how)
            continue
        assert next_ns is not None
        assert dispatcher.take(next_ns - 1) is None  # never early
        now = max(now, next_ns) + round(late_ms[number % len(late_ms)] * MS)
        due = dispatcher.take(now)
        while (dropped := dispatcher.drop()) is not None:
            never(*dropped)
        if due is None:  # it shed those who had waited too long
            assert load.max_wait_s is not None
            assert dispatcher.next_ns() != next_ns
            continue
        # Who has been due for longest goes first; in a closed loop only turns and retries wait for a time.
        assert due.due_ns <= min(waiting, default=due.due_ns)
        if load.kind == "open" or due.attempt > 1 or (_follows(due) and due.due_ns in waiting):
            waiting.remove(due.due_ns)
        how, took = ends[number % len(ends)], service_ms[number % len(service_ms)]
        heapq.heappush(under_way, (now + round(took * MS), number, due, now, how))
        number += 1
        played.most = max(played.most, len(under_way))
    for _, _, due, taken_ns, how in under_way:
        end(due, now, Verdict("cut_off", "in_flight"), 0, taken_ns, how)
    for due, reason in dispatcher.leftovers(now):
        never(due, reason)
    assert dispatcher.next_ns() is None
    assert dispatcher.take(now + 10**18) is None
    return played


def check_played(
    played: Played, requests: Sequence[ScheduledRequest], *, stopped: bool, **settings: Any
) -> None:
    """What holds for every load, whatever happened in it."""
    load = LoadSettings(run_id="x", **settings)
    supply = load.kind == "closed" and load.duration_s is not None
    launched = {taken.due.request.id for taken in played.taken}
    assert set(played.final) == (launched if supply else {r.id for r in requests})
    assert played.dispatcher.scheduled == len(played.final)
    assert played.dispatcher.launched == len(launched)
    assert played.dispatcher.retried == sum(taken.retried for taken in played.taken)
    reasons = Counter(reason for outcome, reason in played.final.values() if outcome == "cut_off")
    assert stopped or not reasons["not_sent"] + reasons["in_flight"]
    assert played.most <= (load.concurrency or len(requests))
    for name in launched:
        attempts = played.of(name)
        assert [taken.due.attempt for taken in attempts] == list(range(1, len(attempts) + 1))
        assert len({taken.due.intended_ns for taken in attempts}) == 1
        assert attempts[0].due.due_ns == attempts[0].due.intended_ns
        assert all(taken.at_ns >= taken.due.due_ns for taken in attempts)
        for before, after in pairwise(attempts):
            wait_ns = round(load.retry_backoff_s * 2 ** (before.due.attempt - 1) * NS)
            assert before.retried
            assert before.how in RETRIED
            assert after.due.due_ns == before.ended_ns + wait_ns
        assert len(attempts) <= load.retries + 1
        last = attempts[-1]
        may_follow = last.how in RETRIED and played.final[name][0] in ("failed", "rejected")
        if may_follow and not supply:
            assert len(attempts) == load.retries + 1
    _check_sessions(played, requests, supply)
    if load.kind == "open":
        _check_open(played, requests, load)
    else:
        _check_closed(played, load)


def _check_sessions(played: Played, requests: Sequence[ScheduledRequest], supply: bool) -> None:
    before: dict[str, ScheduledRequest] = {}
    for turn in requests:
        last = before.get(turn.session) if turn.session else None
        if turn.session:
            before[turn.session] = turn
        if last is None or turn.think_s is None:
            continue
        outcome, reason = played.final.get(last.id, (None, None))
        if played.of(turn.id):
            assert outcome == "completed"
            first = played.of(turn.id)[0]
            assert first.due.intended_ns == played.of(last.id)[-1].ended_ns + round(turn.think_s * NS)
        elif not supply:
            was_cut = reason in ("not_sent", "in_flight")
            wanted = {"not_sent"} if was_cut else {"session_ended"}
            if outcome == "completed":
                wanted = {"not_sent", "shed"}
            assert played.final[turn.id][1] in wanted


def _check_open(played: Played, requests: Sequence[ScheduledRequest], load: LoadSettings) -> None:
    follows = {r.id for r in requests if r.think_s is not None}
    for due, at_ns in [(t.due, t.at_ns) for t in played.taken] + [(d, at) for d, _, at in played.never]:
        if due.request.id not in follows:
            assert due.intended_ns == T0 + round(due.request.arrival_s * NS)
        assert at_ns >= due.due_ns or due in [d for d, reason, _ in played.never if reason != "shed"]
    if load.max_wait_s is not None:
        assert all(t.at_ns - t.due.due_ns <= load.max_wait_s * NS for t in played.taken)
        for due, reason, at_ns in played.never:
            assert (reason == "shed") <= (at_ns - due.due_ns > load.max_wait_s * NS)


def _check_closed(played: Played, load: LoadSettings) -> None:
    """Every request takes the place that came free longest ago, at the moment when it came free."""
    assert load.concurrency is not None
    n, ramp_ns = load.concurrency, (load.ramp_s or 0) * NS
    free = Counter(T0 + round(ramp_ns * i / n) for i in range(n))
    final = {name: played.of(name)[-1] for name in played.final if played.of(name)}
    free.update(taken.ended_ns for taken in final.values())
    used = Counter(t.due.intended_ns for t in played.taken if t.due.attempt == 1 and not _follows(t.due))
    assert not used - free, used - free
    if load.duration_s is not None:
        assert all(t.due.due_ns < T0 + load.duration_s * NS for t in played.taken)


def _follows(due: Due) -> bool:
    return due.request.think_s is not None
