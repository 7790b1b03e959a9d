"""The bounds that each order states, on engines over the mock model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.engine import Engine
from engines.lanes import Lanes
from engines.queues import names
from engines.sequence import Sequence, Status
from tests.support.engine_driver import Driver, config

LANES = {"chat": {"weight": 3.0}, "bulk": {"max_num_seqs": 2, "max_num_batched_tokens": 8}}
SCHEDULERS = ("continuous", "chunked", "prefill_first")
slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def find(engine: Engine, seq_id: int) -> Sequence | None:
    scheduler = engine.scheduler
    return next((s for s in (*scheduler.running, *scheduler.waiting) if s.seq_id == seq_id), None)


@pytest.mark.parametrize(("aging_s", "starves"), [(None, True), (0.005, False)])
def test_a_stream_of_urgent_requests_starves_others_unless_they_age(
    aging_s: float | None, starves: bool
) -> None:
    """An urgent one in each iteration of 1 ms, twice what the engine can do."""
    policy = {"aging_s": aging_s}
    driver = Driver(config("continuous", queue="priority", queue_policy=policy, max_num_seqs=1))
    driver.add(4, 2)
    low = driver.add(4, 2, priority=3)
    for _ in range(100):
        driver.add(4, 2, priority=0)
        driver.step()
    seq = find(driver.engine, low)
    assert (seq is not None and seq.status is Status.WAITING) == starves
    if not starves:
        record = driver.log.requests[low]
        # 3 levels of 5 ms: only those that came within 15 ms overtake it, 2 iterations each
        assert record.admitted_ns is not None
        assert (record.admitted_ns - record.arrival_ns) / 1e6 <= 2 * (15 + 2)


def test_a_default_deadline_ends_the_wait_of_those_without_one() -> None:
    for policy, starves in (({}, True), ({"default_deadline_ms": 30.0}, False)):
        driver = Driver(config("continuous", queue="deadline", queue_policy=policy, max_num_seqs=1))
        driver.add(4, 2, deadline_ms=1.0)
        free = driver.add(4, 2)
        for _ in range(200):
            driver.add(4, 2, deadline_ms=20.0)
            driver.step()
        seq = find(driver.engine, free)
        assert (seq is not None and seq.status is Status.WAITING) == starves


@pytest.mark.parametrize("queue", ["deadline", "deadline_then_fair"])
def test_what_is_dropped_is_refused_and_counted_and_holds_nothing(queue: str) -> None:
    driver = Driver(config("continuous", queue=queue, max_num_seqs=1))
    first = driver.add(4, 12, deadline_ms=2.0)  # late as well, but it has begun
    driver.step()
    second, third = driver.add(4, 2, deadline_ms=3.0), driver.add(4, 2, deadline_ms=60.0)
    driver.run()
    assert driver.reasons() == {first: "length", second: "deadline", third: "length"}
    record = driver.log.requests[second]
    assert (record.finish_reason, record.admitted_ns, record.output_tokens) == ("deadline", None, 0)
    assert driver.engine.stats().finished == {"length": 2, "deadline": 1}


def test_a_static_engine_wakes_up_to_drop() -> None:
    driver = Driver(config("static", queue="deadline", max_queue_delay_ms=500.0))
    late = driver.add(4, 2, deadline_ms=100.0)
    start = driver.clock.now
    assert driver.engine.next_wakeup(start) == pytest.approx(start + 0.1)
    driver.run()
    assert driver.reasons() == {late: "deadline"}


@slow
@given(
    scheduler=st.sampled_from(SCHEDULERS),
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=12, max_size=30),
    weight=st.sampled_from([1.0, 2.0, 5.0]),
    seats=st.integers(1, 4),
)
def test_two_tenants_that_wait_have_had_their_shares(
    scheduler: str, sizes: list[tuple[int, int]], weight: float, seats: int
) -> None:
    """Theorem 4.4 of the paper, for any two moments while both have somebody waiting."""
    policy = {"weights": {"a": weight}, "output_cost": 2.0}
    driver = Driver(config(scheduler, queue="fair", queue_policy=policy, max_num_seqs=seats))
    tenant = {}
    for i, (prompt, answer) in enumerate(sizes):
        seq_id = driver.add(prompt, answer, tenant="ab"[i % 2])
        tenant[seq_id] = "ab"[i % 2]
    prompts = dict(enumerate(size[0] for size in sizes))
    weights = {"a": weight, "b": 1.0}
    had = {"a": 0.0, "b": 0.0}
    gaps = []
    while driver.engine.has_work:
        waiting = {s.seq_id for s in driver.engine.scheduler.waiting}
        outputs = driver.step()
        for seq_id in waiting - {s.seq_id for s in driver.engine.scheduler.waiting}:
            had[tenant[seq_id]] += prompts[seq_id] / weights[tenant[seq_id]]
        for output in outputs:
            name = tenant[output.seq_id]
            had[name] += 2.0 * len(output.token_ids) / weights[name]
        if {tenant[s.seq_id] for s in driver.engine.scheduler.waiting} == {"a", "b"}:
            gaps.append(had["a"] - had["b"])
    longest = max(size[0] for size in sizes)
    batch = seats * (longest + 4)
    if gaps:
        assert max(gaps) - min(gaps) <= 2 * max(longest, 2 * batch)


@slow
@given(
    queue=st.sampled_from(sorted(names())),
    in_lanes=st.booleans(),
    scheduler=st.sampled_from(SCHEDULERS),
    usable=st.integers(4, 9),
    requests=st.lists(
        st.tuples(
            st.integers(1, 8),
            st.integers(1, 8),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["chat", "bulk", "x"]),
            st.integers(0, 2),
            st.sampled_from([None, 5.0, 50.0]),
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_whoever_has_had_a_seat_keeps_its_place(
    queue: str, in_lanes: bool, scheduler: str, usable: int, requests: list[tuple[Any, ...]]
) -> None:
    """The order in which `least_urgent` takes seats never changes among those that have had one, so two
    sequences cannot evict each other in turn; and it ends with seq_id, so it is total."""
    lanes = LANES if in_lanes else {}
    cfg = config(scheduler, queue=queue, victim="least_urgent", lanes=lanes, preempt_every=None)
    driver = Driver(cfg, num_kv_blocks=usable + 1)
    for prompt, answer, tenant, request_class, priority, deadline_ms in requests:
        driver.add(
            prompt,
            answer,
            tenant=tenant,
            request_class=request_class,
            priority=priority,
            deadline_ms=deadline_ms,
        )
    places: dict[int, Any] = {}
    evicted: set[tuple[int, int]] = set()
    for _ in range(2000):
        if not driver.engine.has_work:
            break
        driver.step()
        waiting, running = driver.engine.scheduler.waiting, driver.engine.scheduler.running
        started = [*running, *(s for s in waiting if s.status is Status.PREEMPTED)]
        for seq in started:
            assert places.setdefault(seq.seq_id, waiting.key(seq)) == waiting.key(seq)
        victims = driver.log.steps[-1].preempted if driver.log.steps else []
        evicted |= {(seq.seq_id, victim) for seq in running for victim in victims}
    assert not driver.engine.has_work
    assert len(set(places.values())) == len(places)
    assert not {(b, a) for a, b in evicted} & evicted, "two sequences evicted each other"


# -- lanes ---------------------------------------------------------------------------------------------------


def lanes_driver(lanes: dict[str, Any], scheduler: str = "continuous", **more: Any) -> Driver:
    blocks = more.pop("num_kv_blocks", 100)
    return Driver(config(scheduler, lanes=lanes, **more), num_kv_blocks=blocks)


@pytest.mark.parametrize("scheduler", ["continuous", "chunked", "prefill_first", "tgi"])
def test_a_head_without_kv_does_not_block_another_lane(scheduler: str) -> None:
    """9 blocks of 4: number 0 holds up to 4, number 1 needs 4 + at once, number 2 needs one."""
    lanes: dict[str, Any] = {"long": {}, "short": {}}
    driver = lanes_driver(lanes, scheduler, num_kv_blocks=7, max_waiting_tokens=None)
    driver.add(13, 3, request_class="long")
    driver.step()
    driver.add(13, 3, request_class="long")
    short = driver.add(3, 2, request_class="short")
    for _ in range(3):
        driver.step()
    assert short in {o.seq_id for o in driver.outputs}
    assert find(driver.engine, 1) is not None
    driver.run()
    assert set(driver.reasons().values()) == {"length"}


def test_patience_has_an_end() -> None:
    """A prompt that needs most of the pool waits while short ones keep taking what becomes free, but only
    until they have had patience_tokens more than their share."""

    def enters_after(patience: int) -> int:
        lanes = {"long": {"patience_tokens": patience}, "short": {}}
        driver = lanes_driver(lanes, num_kv_blocks=6, max_num_seqs=4)
        for answer in (2, 4, 6, 8):
            driver.add(4, answer, request_class="short")
        driver.step()
        long = driver.add(15, 1, request_class="long")
        for step in range(400):
            if any(o.seq_id == long for o in driver.outputs):
                return step
            driver.add(4, 2 + step % 5, request_class="short")
            driver.step()
        return 400

    assert enters_after(10) < enters_after(100) < 400
    assert enters_after(1_000_000) == 400  # never: the short ones take it all


def test_a_lane_keeps_to_its_seats_and_nobody_waits_for_it() -> None:
    lanes = {"bulk": {"max_num_seqs": 1, "weight": 9.0}}
    driver = lanes_driver(lanes, max_num_seqs=4)
    for _ in range(3):
        driver.add(4, 6, request_class="bulk")
    others = [driver.add(4, 3) for _ in range(3)]
    driver.step()
    assert [s.seq_id for s in driver.engine.scheduler.running] == [0, *others]
    driver.run()
    entered = [driver.log.requests[i].admitted_ns for i in range(3)]
    ended = [driver.log.requests[i].finish_ns for i in range(3)]
    assert entered[1] is not None
    assert ended[0] is not None
    assert entered[1] >= ended[0]
    assert len(driver.engine.scheduler.waiting) == 0


def test_the_budget_of_a_lane_bounds_its_prompts_in_an_iteration() -> None:
    lanes = {"long": {"max_num_batched_tokens": 4}}
    driver = lanes_driver(lanes, "chunked", max_num_batched_tokens=10, max_num_seqs=4)
    driver.add(9, 2, request_class="long")
    driver.add(9, 2, request_class="long")
    driver.add(8, 2)
    driver.run()
    assert driver.trace()[:4] == ["p0:4 p2:6", "p0:4 p2:2", "d2 p0:1 p1:3", "d0 p1:4"]


def test_a_whole_prompt_above_the_budget_of_its_lane_goes_alone() -> None:
    lanes = {"long": {"max_num_batched_tokens": 4}}
    driver = lanes_driver(lanes, "prefill_first", max_num_seqs=4)
    for _ in range(2):
        driver.add(9, 1, request_class="long")
    driver.add(8, 1)
    driver.add(8, 1)
    driver.run()
    assert driver.trace() == ["p0:9 p2:8 p3:8", "p1:9"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_lanes_that_wait_have_tokens_by_weight_and_an_idle_one_leaves_its_share(scheduler: str) -> None:
    lanes = {"heavy": {"weight": 3.0}, "light": {"weight": 1.0}}
    driver = lanes_driver(lanes, scheduler, max_num_seqs=2)
    for i in range(80):
        driver.add(4, 4, request_class=("heavy", "light")[i % 2])
    tokens = {"heavy": 0, "light": 0}
    while {s.request_class for s in driver.engine.scheduler.waiting} == {"heavy", "light"}:
        driver.step()
        record = driver.log.steps[-1]
        for seq_id, count in zip(record.ids, record.tokens, strict=True):
            tokens[("heavy", "light")[seq_id % 2]] += count
    assert tokens["heavy"] / tokens["light"] == pytest.approx(3.0, rel=0.15)
    driver.run()
    alone = [record.num_seqs for record in driver.log.steps[-30:-4]]
    assert set(alone) == {2}  # the light lane has all seats to itself


def test_lanes_have_orders_of_their_own() -> None:
    lanes = {
        "chat": {"classes": ["ask", "talk"], "queue": "priority", "queue_policy": {"aging_s": 5.0}},
        "bulk": {},
    }
    driver = lanes_driver(lanes, max_num_seqs=1, queue="fair")
    driver.add(4, 1)
    driver.step()
    waiting = driver.engine.scheduler.waiting
    assert isinstance(waiting, Lanes)
    low, high = (driver.add(4, 1, request_class=c, priority=p) for c, p in (("ask", 9), ("talk", 1)))
    assert [s.seq_id for s in waiting] == [high, low]
    assert waiting.lane(waiting.head) == "chat"
    assert waiting.key(waiting.head)[0] == 0
