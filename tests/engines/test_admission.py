"""Accept, wait or reject: the decision as a function, and what the engine makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines.admission import Asked, State, decide
from engines.config import EngineConfig
from engines.pace import LEAST, LONGEST_RETRY_S, Pace, retry_after
from engines.request import Refused
from engines.tenants import OTHER, Labels, TenantRates
from tests.support.engine_driver import Driver, config

seconds = st.none() | st.floats(0, 1e4)


@st.composite
def limits_of(draw: st.DrawFn) -> EngineConfig:
    high, reject = sorted((draw(st.floats(0.01, 1)), draw(st.floats(0.01, 1))))
    return config(
        "continuous",
        max_waiting_requests=draw(st.none() | st.integers(1, 20)),
        max_waiting_tokens=draw(st.none() | st.integers(1, 500)),
        tenant_rate=draw(st.sampled_from([None, 2.0])),
        kv_high_watermark=draw(st.sampled_from([None, high])),
        kv_reject_watermark=draw(st.sampled_from([None, reject])),
        deadline_admission=draw(st.booleans()),
    )


@st.composite
def states(draw: st.DrawFn) -> State:
    usable = draw(st.integers(1, 100))
    live = draw(st.integers(0, usable))
    waiting, tokens = draw(st.integers(0, 25)), draw(st.integers(0, 600))
    return State(
        waiting=waiting,
        waiting_tokens=tokens,
        entering=draw(st.integers(0, min(3, waiting))),
        entering_tokens=draw(st.integers(0, tokens)),
        joinable=draw(st.booleans()),
        running=draw(st.integers(0, 3)),
        free_seats=draw(st.integers(0, 3)),
        kv_live=live,
        kv_available=usable - live,
        kv_usable=usable,
        tenant_wait_s=draw(st.sampled_from([0.0, 0.0, 0.4, 7.2])),
        wait_s=draw(seconds),
        serve_s=draw(seconds),
        release_per_s=draw(seconds),
    )


asks = st.builds(
    Asked,
    prompt_tokens=st.integers(0, 17),
    max_tokens=st.integers(0, 16),
    entry_blocks=st.integers(1, 4),
    most_blocks=st.integers(1, 60),
    deadline_s=st.none() | st.floats(-5, 1e4),
)


@given(asks, states(), limits_of())
def test_a_decision_says_what_is_true(asked: Asked, state: State, limits: EngineConfig) -> None:
    decision = decide(asked, state, limits)
    assert decision == decide(asked, state, limits)
    if decision.verdict == "accept":
        assert decision.reason is None
        assert state.joinable
        assert state.waiting == 0 < state.free_seats
        assert asked.entry_blocks <= state.kv_available
        if limits.kv_high_watermark is not None and state.running:
            assert state.kv_live <= limits.kv_high_watermark * state.kv_usable
    else:
        assert decision.reason
    if decision.verdict == "reject":
        assert decision.status in (400, 429, 503)
        assert (decision.retry_after_s is None) == (decision.status == 400)
        assert decision.retry_after_s is None or 1 <= decision.retry_after_s <= LONGEST_RETRY_S
        assert decision.message
        assert "\n" not in decision.message
    else:
        assert asked.most_blocks <= state.kv_usable
        assert 1 <= asked.prompt_tokens < limits.max_model_len
        assert state.tenant_wait_s == 0 or limits.tenant_rate is None
        if limits.max_waiting_requests is not None:
            assert state.waiting - state.entering < limits.max_waiting_requests
        if limits.max_waiting_tokens is not None and state.waiting > state.entering:
            tokens = state.waiting_tokens - state.entering_tokens
            assert tokens + asked.prompt_tokens <= limits.max_waiting_tokens
        if limits.kv_reject_watermark is not None:
            assert state.kv_live <= limits.kv_reject_watermark * state.kv_usable


@given(
    asks, states(), limits_of(), st.integers(0, 5), st.integers(0, 50), st.integers(0, 20), st.floats(0, 9)
)
def test_what_is_rejected_would_be_at_a_worse_moment_too(
    asked: Asked, state: State, limits: EngineConfig, waiting: int, tokens: int, blocks: int, wait_s: float
) -> None:
    assume(decide(asked, state, limits).verdict == "reject")
    live = min(state.kv_usable, state.kv_live + blocks)
    worse = replace(
        state,
        waiting=state.waiting + waiting,
        waiting_tokens=state.waiting_tokens + tokens,
        kv_live=live,
        kv_available=state.kv_usable - live,
        wait_s=None if state.wait_s is None else state.wait_s + wait_s,
    )
    assert decide(asked, worse, limits).verdict == "reject"


@given(asks, states())
def test_without_limits_only_what_could_never_run_is_rejected(asked: Asked, state: State) -> None:
    decision = decide(asked, replace(state, tenant_wait_s=0.0), config("continuous"))
    assert decision.verdict != "reject" or decision.status == 400


@pytest.mark.parametrize(
    ("wait_s", "told"), [(None, 1), (0.0, 1), (0.2, 1), (1.0, 1), (1.1, 2), (59.5, 60), (1e9, 60)]
)
def test_retry_after_is_whole_seconds_of_the_estimate(wait_s: float | None, told: int) -> None:
    assert retry_after(wait_s) == told


# -- in the engine


def refusal_of(driver: Driver, *args: Any, **more: Any) -> Refused:
    with pytest.raises(Refused) as error:
        driver.add(*args, **more)
    return error.value


def test_a_tenant_has_its_rate_and_nobody_elses() -> None:
    driver = Driver(config("continuous", tenant_rate=2.0, tenant_burst=3))
    for _ in range(3):
        driver.add(2, 2, tenant="a")
    refused = refusal_of(driver, 2, 2, tenant="a")
    assert (refused.reason, refused.status, refused.retry_after_s) == ("rate_limit", 429, 1)
    driver.add(2, 2, tenant="b")
    driver.clock.now += 0.49
    assert refusal_of(driver, 2, 2, tenant="a").reason == "rate_limit"
    driver.clock.now += 0.01
    driver.add(2, 2, tenant="a")
    refusal_of(driver, 2, 2, tenant="a")
    driver.run()
    assert driver.engine.stats().refusals == {"rate_limit": 3}
    assert driver.engine.stats().finished == {"length": 5}


def test_who_is_rejected_for_another_reason_does_not_pay() -> None:
    driver = Driver(config("continuous", tenant_rate=1.0, tenant_burst=1))
    assert refusal_of(driver, 20, 2, tenant="a").reason == "prompt_too_long"
    driver.add(2, 2, tenant="a")


def test_the_queue_is_bounded_by_tokens_and_an_empty_one_takes_any_prompt() -> None:
    driver = Driver(config("continuous", max_waiting_tokens=10, max_num_seqs=1))
    driver.add(9, 2)
    driver.add(12, 2)  # the first one to wait
    refused = refusal_of(driver, 1, 2)
    assert (refused.reason, refused.status) == ("queue_tokens_full", 503)
    assert "12 tokens are waiting" in refused.message
    while driver.engine.stats().waiting:
        driver.step()
    driver.add(6, 2)
    driver.add(4, 2)
    assert refusal_of(driver, 1, 2).reason == "queue_tokens_full"
    driver.run()


LANES = {"chat": {"max_num_seqs": 1}, "default": {"weight": 2}}


@pytest.mark.parametrize("scheduler", ["continuous", "chunked", "static", "prefill_first"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_bound_is_on_those_that_have_to_wait(scheduler: str, data: st.DataObject) -> None:
    """Bursts between iterations. Who is refused would have found, after the next iteration, as many left
    behind as the bound allows; and of who was taken, no more were left behind than that."""
    bound = data.draw(st.integers(1, 4), "bound")
    changes: dict[str, Any] = {"max_num_seqs": data.draw(st.integers(1, 4)), "max_model_len": 16}
    if scheduler != "static":
        changes["lanes"] = data.draw(st.sampled_from([{}, LANES]))
    driver = Driver(config(scheduler, max_waiting_requests=bound, **changes))
    for burst in data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=8), "bursts"):
        refused = 0
        for _ in range(burst):
            kind = data.draw(st.sampled_from(["chat", ""]))
            try:
                driver.add(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), request_class=kind)
            except Refused:
                refused += 1
        driver.step()
        left = driver.engine.stats().waiting
        assert left <= bound
        assert left == bound or not refused
    driver.run()
    assert set(driver.engine.stats().refusals) <= {"queue_full"}


def test_a_burst_into_an_idle_engine_fills_its_seats_and_its_queue() -> None:
    driver = Driver(config("continuous", max_num_seqs=3, max_waiting_requests=2))
    for _ in range(5):
        driver.add(2, 2)
    refused = refusal_of(driver, 2, 2)
    assert (refused.reason, refused.status) == ("queue_full", 503)
    assert "2 requests are waiting (engine.max_waiting_requests=2)" in refused.message
    driver.run()
    assert driver.engine.stats().finished == {"length": 5}


def test_a_free_seat_without_kv_is_no_seat() -> None:
    """Ten usable blocks of four tokens, three seats; the first two take eight blocks."""
    driver = Driver(config("continuous", max_waiting_requests=1), num_kv_blocks=11)
    for _ in range(2):
        driver.add(15, 1)
    driver.add(12, 2)  # has a seat and no KV: it has to wait
    assert refusal_of(driver, 2, 2).reason == "queue_full"
    driver.run()


def test_above_the_high_watermark_new_ones_wait_and_above_the_other_they_are_refused() -> None:
    """Ten usable blocks of four tokens: high from 5 on, reject from 7 on."""
    driver = Driver(config("continuous", kv_high_watermark=0.4, kv_reject_watermark=0.6), num_kv_blocks=11)
    first = driver.add(12, 4)
    second = driver.add(8, 4)
    driver.step()
    assert driver.engine.stats().kv_live == 5
    third = driver.add(2, 1)
    assert driver.engine.stats().waits == {"kv_high_watermark": 1, "queue": 1}
    driver.step()
    assert driver.engine.stats().waiting == 1  # a seat and KV for it are free, the watermark holds it
    assert driver.log.steps[-1].blocked == "kv_high_watermark"
    driver.step()
    assert driver.engine.stats().kv_live == 7
    assert refusal_of(driver, 2, 1).reason == "kv_reject_watermark"
    driver.run()
    assert driver.reasons() == {first: "length", second: "length", third: "length"}


def test_the_watermark_never_holds_the_only_one() -> None:
    driver = Driver(config("continuous", kv_high_watermark=0.01), num_kv_blocks=11)
    for _ in range(3):
        driver.add(8, 4)
    driver.run()
    assert driver.engine.stats().finished == {"length": 3}


def test_a_deadline_that_recent_throughput_cannot_make_is_refused() -> None:
    """One seat; each request takes 10 steps of 1 ms. With five in front a new one needs about 60 ms."""
    driver = Driver(config("continuous", max_num_seqs=1, deadline_admission=True))
    driver.add(4, 10, deadline_ms=0.001)  # nothing is known yet: nobody is refused on a guess
    for _ in range(11):
        driver.add(4, 10)
    while driver.engine.stats().waiting > 5:
        driver.step()
    refused = refusal_of(driver, 4, 10, deadline_ms=20.0)
    assert (refused.reason, refused.status, refused.retry_after_s) == ("deadline", 503, 1)
    driver.add(4, 10, deadline_ms=200.0)
    driver.add(4, 10)
    driver.run()


def test_deadlines_are_only_looked_at_when_asked_to() -> None:
    driver = Driver(config("continuous"))
    driver.add(4, 10, deadline_ms=0.001)
    driver.run()


def test_why_requests_had_to_queue_is_counted() -> None:
    driver = Driver(config("continuous", max_num_seqs=1))
    driver.add(2, 3)
    driver.step()
    driver.add(2, 3)
    driver.add(2, 3)
    assert driver.engine.stats().waits == {"seats": 1, "queue": 1}
    driver.step()
    assert driver.log.steps[-1].blocked == "seats"
    static = Driver(config("static"))
    static.add(2, 3)
    static.step()
    static.add(2, 3)
    static.step()
    assert static.engine.stats().waits == {"batch": 1}
    assert static.log.steps[-1].blocked == "batch"


@pytest.mark.parametrize(("bound", "why"), [("max_num_seqs", "seats"), ("max_num_batched_tokens", "budget")])
def test_a_lanes_own_bound_is_named(bound: str, why: str) -> None:
    driver = Driver(config("chunked", lanes={"chat": {bound: 1}}))
    for _ in range(2):
        driver.add(3, 3, request_class="chat")
    driver.step()
    assert driver.log.steps[-1].blocked == why


def test_the_head_waits_for_the_budget() -> None:
    driver = Driver(config("continuous", max_num_batched_tokens=16))
    driver.add(10, 3)
    driver.add(10, 3)
    driver.step()
    assert driver.log.steps[-1].blocked == "budget"


def test_the_head_waits_for_kv() -> None:
    driver = Driver(config("continuous"), num_kv_blocks=5)
    driver.add(12, 3)
    driver.add(8, 3)
    driver.step()
    assert driver.log.steps[-1].blocked == "kv"
    driver.run()


# -- what estimates rest on


def test_a_pace_knows_nothing_until_it_has_seen_enough() -> None:
    pace = Pace()
    assert pace.wait_s(0) == 0.0
    assert pace.wait_s(100) is None
    pace.passed(1.0, [], 0, 0, left_behind=True)
    for _ in range(int(LEAST) + 1):
        pace.passed(1.0, [50], 4, 0, left_behind=True)
    assert pace.wait_s(100) == pytest.approx(2.0, rel=0.02)  # 50 tokens a second
    assert pace.entry_blocks == pytest.approx(4.0)
    assert pace.serve_s(10, 10, 100) is None  # how long answers are is not known
    for _ in range(10):
        pace.ended(8)
    assert pace.serve_s(250, 100, 100) == pytest.approx((3 + 8 - 1) * 1.0)


def test_an_empty_queue_says_nothing_about_speed() -> None:
    pace = Pace()
    for _ in range(50):
        pace.passed(1.0, [1], 1, 0, left_behind=False)  # as slow as arrivals, not as the engine
    assert pace.wait_s(100) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2)), max_size=80), st.integers(1, 4))
def test_no_tenant_ever_exceeds_its_bucket(arrivals: list[tuple[str, float]], burst: int) -> None:
    rate, now, rates = 2.0, 0.0, TenantRates()
    taken: dict[str, list[float]] = {}
    for tenant, gap in arrivals:
        now += gap
        wait_s = rates.wait_s(tenant, rate, burst, now)
        if wait_s == 0.0:
            rates.take(tenant, rate, burst, now)
            taken.setdefault(tenant, []).append(now)
        else:
            assert rates.wait_s(tenant, rate, burst, now + wait_s + 1e-6) == 0.0
    for times in taken.values():
        for i, start in enumerate(times):
            for j, end in enumerate(times[i:], start=1):
                assert j <= burst + rate * (end - start) + 1e-3


def test_buckets_of_tenants_that_are_made_up_are_dropped() -> None:
    rates = TenantRates()
    for i in range(10 * TenantRates.SWEEP):
        rates.take(f"t{i}", 10.0, 1, i * 0.01)
    assert len(rates._buckets) <= TenantRates.SWEEP + 20


def test_labels_are_bounded() -> None:
    labels = Labels(2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
