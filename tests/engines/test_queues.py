from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.deadlines import DropSettings, LeastTime
from engines.queues.base import WaitingQueue
from engines.queues.deadline import DeadlineQueue, DeadlineSettings
from engines.queues.deadline_then_fair import DeadlineThenFairQueue, DeadlineThenFairSettings
from engines.queues.fair import FairQueue, FairSettings
from engines.queues.fcfs import FcfsQueue
from engines.queues.priority import PriorityQueue, PrioritySettings
from engines.sequence import Sequence, Status

QUEUES = [FcfsQueue, PriorityQueue, DeadlineQueue, FairQueue, DeadlineThenFairQueue]


def seq(seq_id: int, arrival: float = 0.0, prompt: int = 4, **more: object) -> Sequence:
    return Sequence(seq_id, prompt_len=prompt, max_tokens=4, arrival=arrival, **more)  # type: ignore[arg-type]


def ids(queue: WaitingQueue) -> list[int]:
    return [s.seq_id for s in queue]


def enter(queue: WaitingQueue, sequence: Sequence) -> None:
    queue.entered(sequence)
    sequence.status = Status.RUNNING


def lose_seat(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.status = Status.PREEMPTED
    queue.push(sequence)


@pytest.mark.parametrize("queue_class", QUEUES)
def test_equals_are_served_as_they_came_and_preempted_ones_in_front(queue_class: type[WaitingQueue]) -> None:
    queue = queue_class()
    sequences = [seq(i, deadline=50.0) for i in range(6)]
    for s in sequences:
        queue.push(s)
    assert ids(queue) == [0, 1, 2, 3, 4, 5]
    for s in sequences[:3]:
        enter(queue, s)
    assert ids(queue) == [3, 4, 5]
    lose_seat(queue, sequences[2])
    lose_seat(queue, sequences[1])
    assert ids(queue) == [1, 2, 3, 4, 5]
    assert queue.head.seq_id == 1
    assert len(queue) == 5
    assert queue.disorder() is None
    assert max(sequences[:3], key=queue.key).seq_id == 2  # whose seat `least_urgent` takes


@pytest.mark.parametrize("queue_class", QUEUES)
def test_removal_from_the_middle_and_of_a_stranger(queue_class: type[WaitingQueue]) -> None:
    queue, sequences = queue_class(), [seq(i) for i in range(3)]
    for s in sequences:
        queue.push(s)
    queue.gone(sequences[1])
    queue.gone(sequences[1])
    queue.remove(seq(9))
    assert ids(queue) == [0, 2]
    assert [s.seq_id for s in queue.overdue(9.0, 1.0)] == [0, 2]


@pytest.mark.parametrize("queue_class", QUEUES)
def test_the_one_that_was_yielded_may_leave_meanwhile(queue_class: type[WaitingQueue]) -> None:
    queue = queue_class()
    for i in range(6):
        queue.push(seq(i, tenant="ab"[i % 2]))
    seen = []
    for s in queue:
        seen.append(s.seq_id)
        if s.seq_id % 3 == 0:
            enter(queue, s)
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    assert sorted(ids(queue)) == [1, 2, 4, 5]


def test_only_those_who_never_had_a_seat_are_overdue() -> None:
    queue = FcfsQueue()
    early, late, preempted = seq(1, arrival=1.0), seq(2, arrival=2.5), seq(0, arrival=0.0)
    queue.push(early)
    queue.push(late)
    preempted.status = Status.PREEMPTED
    queue.push(preempted)
    assert queue.overdue(now=2.9, timeout=2.0) == []
    assert queue.overdue(now=3.0, timeout=2.0) == [early]
    assert queue.overdue(now=9.0, timeout=2.0) == [early, late]
    assert queue.next_overdue(2.0) == 3.0
    queue.remove(early)
    queue.remove(late)
    assert queue.next_overdue(2.0) is None


# -- priority ------------------------------------------------------------------------------------------------


def test_priority_is_lower_first_then_arrival() -> None:
    queue = PriorityQueue()
    for i, priority in enumerate([5, 0, 5, -1, 0]):
        queue.push(seq(i, priority=priority))
    assert ids(queue) == [3, 1, 4, 0, 2]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50)), min_size=2, max_size=20),
    st.floats(0.5, 20),
)
def test_ageing_bounds_who_may_overtake(arrivals: list[tuple[int, float]], aging_s: float) -> None:
    """By one level in aging_s seconds: a more urgent one that comes later than that is behind."""
    queue = PriorityQueue(PrioritySettings(aging_s))
    sequences = [
        seq(i, arrival, priority=priority)
        for i, (priority, arrival) in enumerate(sorted(arrivals, key=lambda pair: pair[1]))
    ]
    for s in sequences:
        queue.push(s)
    place = {seq_id: i for i, seq_id in enumerate(ids(queue))}
    for first in sequences:
        for later in sequences[first.seq_id + 1 :]:
            if place[later.seq_id] < place[first.seq_id]:
                levels = first.priority - later.priority
                assert levels > 0
                assert later.arrival - first.arrival <= levels * aging_s + 1e-9


# -- deadlines -----------------------------------------------------------------------------------------------


def test_the_earliest_deadline_is_first_and_those_without_are_last() -> None:
    queue = DeadlineQueue()
    for i, deadline in enumerate([9.0, None, 3.0, None, 3.0]):
        queue.push(seq(i, deadline=deadline))
    assert ids(queue) == [2, 4, 0, 1, 3]


def test_a_default_deadline_orders_and_does_not_drop() -> None:
    queue = DeadlineQueue(DeadlineSettings(default_deadline_ms=4000.0))
    for i, (arrival, deadline) in enumerate([(0.0, 9.0), (1.0, None), (2.0, 5.5)]):
        queue.push(seq(i, arrival, deadline=deadline))
    assert ids(queue) == [1, 2, 0]
    assert [s.seq_id for s in queue.hopeless(100.0)] == [2, 0]


def test_the_least_time_is_that_of_the_fastest_pass() -> None:
    least = LeastTime(DropSettings(least_answer=3))
    assert least.of(seq(0)) == 0.0
    least.passed(100, 0.5)  # 5 ms a token
    least.passed(1, 0.02)  # a decode: 20 ms
    least.passed(0, 9.0)
    assert least.of(seq(0, prompt=100)) == pytest.approx(100 * 0.005 + 2 * 0.02, rel=0.05)
    assert least.of(seq(0, prompt=1)) == pytest.approx(3 * 0.02)
    begun = seq(0, prompt=4)
    begun.num_tokens += 2  # two tokens of the answer are there: one is left
    assert least.of(begun) == pytest.approx(6 * 0.005, rel=0.05)


def test_the_fastest_pass_is_forgotten_when_the_engine_has_become_slower() -> None:
    fastest, usual = LeastTime(DropSettings()), LeastTime(DropSettings(pace="usual"))
    for seconds in [0.01] + [0.04] * 200:
        fastest.passed(1, seconds)
        usual.passed(1, seconds)
    assert [fastest.step_s, usual.step_s] == pytest.approx([0.04, 0.04], rel=1e-3)
    fastest.passed(1, 0.01)
    usual.passed(1, 0.01)
    assert fastest.step_s == 0.01 < usual.step_s


@pytest.mark.parametrize("queue_class", [DeadlineQueue, DeadlineThenFairQueue])
def test_who_cannot_make_it_is_dropped_and_nobody_else(queue_class: type[WaitingQueue]) -> None:
    queue = queue_class()
    long, short, begun, free = (
        seq(0, prompt=1000, deadline=5.0),
        seq(1, prompt=10, deadline=5.0),
        seq(2, prompt=1000, deadline=5.0),
        seq(3, prompt=1000),
    )
    for s in (long, short, begun, free):
        queue.push(s)
    assert queue.next_hopeless() == pytest.approx(5.0)
    queue.passed(100, 0.1)  # 1 ms a token
    enter(queue, begun)
    lose_seat(queue, begun)  # it has begun: it may end late
    assert queue.hopeless(3.9) == []
    assert queue.hopeless(4.1) == [long]
    assert queue.hopeless(4.85) == []  # a pass takes 0.1 s
    assert queue.hopeless(4.95) == [short]
    assert queue.hopeless(99.0) == []


def test_nobody_is_dropped_twice_or_after_it_has_left() -> None:
    queue = DeadlineQueue()
    sequences = [seq(i, deadline=1.0) for i in range(300)]
    for s in sequences:
        queue.push(s)
    for s in sequences[:290]:
        enter(queue, s)
        s.status = Status.FINISHED
        queue.gone(s)
    dropped = queue.hopeless(2.0)
    assert dropped == sequences[290:]
    assert queue.hopeless(3.0) == []


# -- fair shares ---------------------------------------------------------------------------------------------


def tenants(queue: WaitingQueue) -> str:
    return "".join(s.tenant for s in queue)


def test_tenants_alternate_by_the_cost_of_their_prompts() -> None:
    queue = FairQueue()
    for i in range(4):
        queue.push(seq(i, tenant="a", prompt=20))
    for i in range(4, 8):
        queue.push(seq(i, tenant="b", prompt=10))
    assert tenants(queue) == "abbabbaa"


def test_a_weight_is_a_larger_share() -> None:
    queue = FairQueue(FairSettings(weights={"a": 3.0}))
    for i in range(8):
        queue.push(seq(i, tenant="ab"[i % 2], prompt=30 + i % 2))
    assert tenants(queue) == "abaaabbb"


def test_output_is_charged_once_and_recomputation_never() -> None:
    queue = FairQueue(FairSettings(prompt_cost=1.0, output_cost=2.0))
    a, b = seq(0, tenant="a", prompt=10), seq(1, tenant="b", prompt=10)
    for s in (a, b, seq(2, tenant="a"), seq(3, tenant="b")):
        queue.push(s)
    enter(queue, a)
    enter(queue, b)
    assert queue.key(a)[:2] == queue.key(b)[:2] == (0, 0.0)
    a.num_tokens += 3
    queue.served(a, 1)
    queue.served(a, 1)
    lose_seat(queue, a)
    enter(queue, a)
    queue.served(a, 13)  # its prompt and answer again
    assert queue.key(seq(8, tenant="a"))[1] == 10 + 2 * 3
    assert queue.key(seq(9, tenant="b"))[1] == 10
    a.num_tokens += 1
    queue.gone(a)
    queue.served(a, 1)  # the pass that ended it reports last
    assert queue.key(seq(8, tenant="a"))[1] == 10 + 2 * 4


def test_a_hit_in_the_prefix_cache_costs_nothing() -> None:
    queue = FairQueue()
    cached = seq(0, tenant="a", prompt=100)
    queue.push(cached)
    queue.push(seq(1, tenant="a"))
    cached.num_computed = 96
    enter(queue, cached)
    assert queue.key(seq(8, tenant="a"))[1] == 4


def test_an_idle_tenant_saves_no_credit() -> None:
    queue = FairQueue()
    for i in range(10):
        queue.push(seq(i, tenant="a", prompt=100))
    for s in list(queue)[:9]:
        enter(queue, s)
    for i in range(20, 26):
        queue.push(seq(i, tenant="late", prompt=100))
    assert queue.key(seq(99, tenant="late"))[1] == 900
    assert [s.tenant for s in queue][:3] in (["a", "late", "late"], ["late", "a", "late"])


def test_names_that_clients_make_up_do_not_pile_up() -> None:
    queue = FairQueue()
    for i in range(5000):
        s = seq(i, tenant=f"tenant {i}")
        queue.push(s)
        enter(queue, s)
        queue.gone(s)
    assert len(queue._shares._count) < 3000
    assert not queue._started


def urgent_queue(margin_ms: float) -> DeadlineThenFairQueue:
    """Numbers 4 to 11 are due at 96, 95, .. 89."""
    queue = DeadlineThenFairQueue(DeadlineThenFairSettings(margin_ms=margin_ms, ahead_tokens=50.0))
    for i in range(4):
        queue.push(seq(i, tenant="a", prompt=10))
    for i in range(4, 12):
        queue.push(seq(i, tenant="b", prompt=20, deadline=100.0 - i))
    return queue


def test_who_would_miss_its_deadline_comes_first() -> None:
    queue = urgent_queue(margin_ms=1000.0)
    assert queue.hopeless(80.0) == []
    assert ids(queue) == [0, 4, 1, 2, 5, 3, 6, 7, 8, 9, 10, 11]  # fair
    assert queue.hopeless(88.5) == []
    assert ids(queue) == [11, 0, 1, 2, 4, 3, 5, 6, 7, 8, 9, 10]
    assert [s.seq_id for s in queue.hopeless(91.5)] == [11, 10, 9]
    assert ids(queue)[:3] == [11, 10, 9]


def test_deadlines_do_not_carry_a_tenant_further_than_agreed() -> None:
    queue = urgent_queue(margin_ms=10_000.0)
    assert queue.hopeless(88.0) == []
    assert ids(queue) == [11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8]  # 60 tokens more than the other tenant
