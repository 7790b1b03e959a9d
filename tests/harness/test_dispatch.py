"""Which request leaves when, on a clock of the test's own: nothing is lost, nothing drifts, nobody is
hidden."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from harness.loadgen.answer import Verdict
from harness.loadgen.dispatch import NS, Dispatcher, Due
from harness.loadgen.settings import LoadSettings
from tests.support.load import every, request
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


def check(played: Played, requests: Sequence[ScheduledRequest], *, stopped: bool, **settings: Any) -> None:
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


plans = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 3, 10, 40]),  # ms after the one before
        st.sampled_from([None, None, "a", "b", "c"]),  # session
        st.sampled_from([0, 2, 25]),  # ms of thought
    ),
    max_size=14,
)


def requests_of(plan: list[tuple[float, str | None, float]]) -> list[ScheduledRequest]:
    at, turns, requests = 0.0, Counter[str](), []
    for index, (gap, session, think) in enumerate(plan):
        at += gap / 1000
        turn = turns[session] if session else 0
        changes = {"session": session, "turn": turn, "think_s": think / 1000 if turn else None}
        requests.append(request(index, round(at, 6), **(changes if session else {})))
        if session:
            turns[session] += 1
    return requests


@examples(max_examples=400, deadline=None)
@given(
    plan=plans,
    mode=st.sampled_from(
        [
            {"kind": "open"},
            {"kind": "open", "concurrency": 1},
            {"kind": "open", "concurrency": 3},
            {"kind": "open", "concurrency": 1, "max_wait_s": 0.03},
            {"kind": "open", "concurrency": 2, "max_wait_s": 0.012},
            {"kind": "closed", "concurrency": 1},
            {"kind": "closed", "concurrency": 3, "ramp_s": 0.05},
            {"kind": "closed", "concurrency": 2, "duration_s": 0.06},
        ]
    ),
    retries=st.sampled_from([0, 0, 1, 3]),
    service_ms=st.lists(st.sampled_from([0.0, 1.0, 7.5, 33.0]), min_size=1, max_size=5),
    ends=st.lists(st.sampled_from(["ok", "ok", "ok", *VERDICTS]), min_size=1, max_size=7),
    late_ms=st.lists(st.sampled_from([0.0, 0.0, 0.3, 20.0]), min_size=1, max_size=4),
    stop_ms=st.sampled_from([None, None, -1.0, 0.0, 5.0, 31.0, 80.0]),
)
def test_whatever_happens_every_request_is_accounted_for(
    plan: list[Any],
    mode: dict[str, Any],
    retries: int,
    service_ms: list[float],
    ends: list[str],
    late_ms: list[float],
    stop_ms: float | None,
) -> None:
    requests = requests_of(plan)
    settings = {**mode, "retries": retries, "retry_backoff_s": 0.004}
    played = play(requests, service_ms=service_ms, ends=ends, late_ms=late_ms, stop_ms=stop_ms, **settings)
    check(played, requests, stopped=stop_ms is not None, **settings)


def test_no_drift() -> None:
    """vllm-project/vllm#21104: a hold-up of 200 ms in the middle of 400 arrivals at 500/s. The backlog leaves
    at once, every intended time is the schedule's, and the later ones are on time again."""
    requests = every(0.002, 400)
    late = [0.0] * 200 + [200.0] + [0.0] * 199
    played = play(requests, late_ms=late, service_ms=(1,))
    taken = sorted(played.taken, key=lambda t: t.due.intended_ns)
    assert [t.due.intended_ns - T0 for t in taken] == [k * 2 * MS for k in range(400)]
    lateness = [t.at_ns - t.due.intended_ns for t in taken]
    assert lateness[:200] == [0] * 200
    assert lateness[200:301] == [200 * MS - k * 2 * MS for k in range(101)]
    assert lateness[301:] == [0] * 99


def test_a_cap_never_hides_waiting() -> None:
    """The set-up of vllm-project/vllm#54101: service 500 ms, 10 requests/s, 8 requests, a cap of 1. From the
    schedule the k-th takes 500 + 400 k ms, from the take every one takes 500."""
    played = play(every(0.1, 8), service_ms=(500,), concurrency=1)
    assert [(t.ended_ns - t.due.intended_ns) / MS for t in played.taken] == [500 + 400 * k for k in range(8)]
    assert {(t.ended_ns - t.at_ns) / MS for t in played.taken} == {500}
    assert played.most == 1


def test_a_stall_sheds_what_has_waited_too_long_and_all_adds_up() -> None:
    """vllm-project/vllm#45502: the server stalls for 5 s. Sent at once, sent late and shed add up."""
    requests = every(0.1, 100)
    took = [50.0] * 20 + [5000.0] + [50.0] * 79
    played = play(requests, service_ms=took, concurrency=1, max_wait_s=1.0)
    shed = [due for due, reason, _ in played.never if reason == "shed"]
    late = [t for t in played.taken if t.at_ns > t.due.intended_ns]
    on_time = [t for t in played.taken if t.at_ns == t.due.intended_ns]
    assert len(shed) + len(late) + len(on_time) == 100
    # The stall ends at 7.0 s: who was due before 6.0 s is gone, request 20 itself was served.
    assert [due.request.id for due in shed] == [f"r{k:06d}" for k in range(21, 60)]
    assert len(late) == 20
    # Nothing is sent in a burst: one at a time, each 50 ms, until the backlog is gone.
    starts = sorted(t.at_ns for t in played.taken)
    assert min(b - a for a, b in pairwise(starts)) == 50 * MS


def test_a_closed_loop_keeps_turning_around_a_slow_one() -> None:
    """ray-project/llmperf#43: 8 places, one answer of 10 s, all others of 100 ms."""
    took = [100.0] * 3 + [10_000.0] + [100.0] * 60
    played = play(every(0, 64), kind="closed", concurrency=8, service_ms=took)
    slow = next(t for t in played.taken if t.ended_ns - t.at_ns == 10_000 * MS)
    others = [t for t in played.taken if t is not slow]
    assert len(others) == 63
    assert max(t.ended_ns for t in others) == T0 + 9 * 100 * MS  # 7 places, 63 requests
    assert all(t.at_ns == t.due.intended_ns for t in played.taken)


def test_a_ramp_lets_the_clients_in_one_after_the_other() -> None:
    played = play(every(0, 8), kind="closed", concurrency=4, ramp_s=2.0, service_ms=(10_000,))
    assert [t.at_ns - T0 for t in played.taken][:4] == [k * NS // 2 for k in range(4)]


def test_intended_is_when_the_place_came_free_however_late_the_client_is() -> None:
    played = play(every(0, 6), kind="closed", concurrency=2, service_ms=(10,), late_ms=(3,))
    taken = sorted(played.taken, key=lambda t: t.at_ns)
    ends = sorted(t.ended_ns for t in taken)
    assert [t.due.intended_ns for t in taken] == [T0, T0, *ends[:4]]
    assert min(t.at_ns - t.due.intended_ns for t in taken) >= 3 * MS


def session(*think_s: float | None, name: str = "s", start: int = 0) -> list[ScheduledRequest]:
    return [
        request(start + k, k * 0.001, session=name, turn=k, think_s=think) for k, think in enumerate(think_s)
    ]


def test_a_turn_follows_the_end_of_the_turn_before_it() -> None:
    played = play(session(None, 0.5, 0.25), service_ms=(100, 200, 300))
    assert [(t.due.request.turn, (t.at_ns - T0) / MS) for t in played.taken] == [(0, 0), (1, 600), (2, 1050)]


def test_a_client_of_a_closed_loop_stays_with_its_session() -> None:
    """One client: it thinks instead of taking up the next session."""
    requests = [*session(None, 0.5), *session(None, 0.5, name="t", start=2)]
    played = play(requests, service_ms=(100,), kind="closed", concurrency=1)
    assert [(t.due.request.id[-1], (t.at_ns - T0) / MS) for t in played.taken] == [
        ("0", 0),
        ("1", 600),
        ("2", 700),
        ("3", 1300),
    ]


def test_a_turn_with_its_own_arrival_waits_for_nobody() -> None:
    requests = [request(0, 0.0, session="s"), request(1, 0.02, session="s", turn=1)]
    played = play(requests, service_ms=(100,))
    assert [(t.at_ns - T0) / MS for t in sorted(played.taken, key=lambda t: t.at_ns)] == [0, 20]


@pytest.mark.parametrize("how", ["busy", "cancelled", "timed_out", "http_400"])
def test_a_turn_that_is_not_completed_ends_its_session(how: str) -> None:
    played = play(session(None, 0.1, 0.1, 0.1), ends=("ok", how))
    assert [played.final[f"r00000{k}"][1] for k in (2, 3)] == ["session_ended"] * 2
    assert [(t.due.request.turn) for t in played.taken] == [0, 1]


def test_a_shed_turn_ends_its_session_too() -> None:
    requests = sorted([request(9, 0.0), *session(None, 0.1, start=1)], key=lambda r: r.arrival_s)
    played = play(requests, service_ms=(500,), concurrency=1, max_wait_s=0.2)
    assert played.final["r000001"] == ("cut_off", "shed")
    assert played.final["r000002"] == ("cut_off", "session_ended")


def test_stop_during_a_thought_leaves_the_turn_unsent() -> None:
    played = play(session(None, 5.0, 5.0), stop_ms=50)
    assert played.final["r000000"] == ("completed", None)
    assert [played.final[f"r00000{k}"] for k in (1, 2)] == [("cut_off", "not_sent")] * 2


def test_a_retry_is_another_attempt_of_one_request() -> None:
    played = play(every(0, 1), ends=("reset", "busy", "ok"), retries=3, retry_backoff_s=0.5)
    assert [(t.due.attempt, (t.at_ns - T0) / MS, t.retried) for t in played.taken] == [
        (1, 0, True),
        (2, 510, True),
        (3, 1520, False),
    ]
    assert {t.due.intended_ns for t in played.taken} == {T0}
    assert played.final == {"r000000": ("completed", None)}
    assert played.dispatcher.retried == 2


@pytest.mark.parametrize("how", ["reset_late", "http_400", "cancelled", "timed_out"])
def test_what_is_not_retried(how: str) -> None:
    played = play(every(0, 1), ends=(how,), retries=3)
    assert len(played.taken) == 1


def test_retries_are_off_unless_asked_for() -> None:
    assert len(play(every(0, 1), ends=("reset",)).taken) == 1


def test_stop_during_a_backoff_leaves_the_last_attempt_unsent() -> None:
    played = play(every(0, 1), ends=("reset",), retries=1, stop_ms=100)
    ((due, reason, _),) = played.never
    assert (due.attempt, due.intended_ns, reason) == (2, T0, "not_sent")
    assert played.final == {"r000000": ("cut_off", "not_sent")}


def test_a_retry_gives_up_its_place_under_a_cap_and_keeps_it_in_a_closed_loop() -> None:
    took = {"service_ms": (10,), "ends": ("reset", "ok"), "retries": 1, "concurrency": 1}
    capped = play(every(0, 2), **took)
    assert [t.due.request.id[-1] for t in capped.taken] == ["0", "1", "0"]
    closed = play(every(0, 2), kind="closed", **took)
    assert [t.due.request.id[-1] for t in closed.taken][:2] == ["0", "0"]


def test_a_supply_ends_with_its_time() -> None:
    requests = [*session(None, 0.2), *every(0, 8)[2:]]
    played = play(requests, kind="closed", concurrency=1, duration_s=0.1, service_ms=(30,))
    # The second turn would come after the end: it was not due, and neither was anybody after it.
    assert set(played.final) == {"r000000", "r000002", "r000003", "r000004"}
    assert played.dispatcher.scheduled == 4


def test_a_supply_does_not_retry_past_its_end() -> None:
    took = {"service_ms": (10,), "ends": ("busy",), "retries": 5, "retry_backoff_s": 0.02}
    played = play(every(0, 1), kind="closed", concurrency=1, duration_s=0.05, **took)
    # Attempts at 0 and 30 ms; the third would come at 80.
    assert [(t.at_ns - T0) // MS for t in played.taken] == [0, 30]
    assert played.final == {"r000000": ("rejected", "queue_full")}


def test_requests_leave_in_order_of_their_times_however_they_are_listed() -> None:
    requests = [request(k, at) for k, at in enumerate((0.3, 0.1, 0.2, 0.1))]
    played = play(requests)
    order = [
        (t.due.request.id[-1], (t.at_ns - T0) // MS) for t in sorted(played.taken, key=lambda t: t.at_ns)
    ]
    assert order == [("1", 100), ("3", 100), ("2", 200), ("0", 300)]


def test_what_can_be_built_ahead_is_told_once() -> None:
    dispatcher = Dispatcher(session(None, 0.1), LoadSettings(run_id="x"), t0_ns=T0)
    due = dispatcher.take(T0)
    assert due is not None
    assert dispatcher.expected() is None
    dispatcher.ended(due, OK, T0 + MS, tokens=1)
    following = dispatcher.expected()
    assert following is not None
    assert (following.request.turn, following.due_ns) == (1, T0 + MS + NS // 10)
    assert dispatcher.expected() is None
