"""Which request leaves when, on a clock of the test's own: nothing is lost, nothing drifts, nobody is
hidden."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from harness.loadgen.dispatch import NS, Dispatcher
from harness.loadgen.settings import LoadSettings
from tests.support.load import every, request
from tests.support.played import MS, OK, T0, VERDICTS, check_played, play
from workloads.schedule import ScheduledRequest

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
    check_played(played, requests, stopped=stop_ms is not None, **settings)


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
