"""Limits that change between two iterations of a running engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.config import ConfigError
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import answer


def test_a_change_says_old_and_new_and_holds_from_the_next_iteration() -> None:
    driver = Driver(config("continuous", max_num_seqs=1))
    for _ in range(4):
        driver.add(2, 5)
    driver.step()
    assert driver.engine.stats().running == 1
    changed = driver.engine.set_limits({"max_num_seqs": 3, "tenant_rate": 5})
    assert (changed["max_num_seqs"].old, changed["max_num_seqs"].new) == (1, 3)
    assert (changed["tenant_rate"].old, changed["tenant_rate"].new) == (None, 5.0)
    driver.step()
    assert driver.engine.stats().running == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_num_seqs": 0}, "engine.max_num_seqs=0: needs a whole number above 0"),
        ({"max_num_seqs": "4"}, "engine.max_num_seqs='4': needs a whole number"),
        ({"max_num_seqs": None}, "engine.max_num_seqs=null: needs a value"),
        ({"max_num_batched_tokens": 8}, "is below engine.max_model_len=16"),
        ({"max_num_seqs": 100}, "is below engine.max_num_seqs=100"),
        ({"kv_high_watermark": 1.5}, "engine.kv_high_watermark=1.5"),
        ({"kv_high_watermark": 0.9, "kv_reject_watermark": 0.5}, "is below engine.kv_high_watermark=0.9"),
        ({"tenant_burst": 3}, "needs engine.tenant_rate"),
        ({"scheduler": "static"}, "engine.scheduler cannot be changed while it runs"),
        ({"num_kv_blocks": 5}, "engine.num_kv_blocks cannot be changed while it runs"),
        ({"tenant_rate": 5.0, "max_num_seqs": 0}, "engine.max_num_seqs=0"),
    ],
)
def test_what_cannot_work_changes_nothing(changes: dict[str, Any], words: str) -> None:
    driver = Driver(config("continuous"))
    before = driver.engine.gate.limits
    with pytest.raises(ConfigError) as error:
        driver.engine.set_limits(changes)
    assert words in str(error.value)
    assert driver.engine.gate.limits == before


def test_fewer_seats_take_nobodys_seat_away() -> None:
    driver = Driver(config("continuous", max_num_seqs=3))
    long = [driver.add(2, 12), driver.add(2, 8), driver.add(2, 4)]
    driver.step()
    driver.engine.set_limits({"max_num_seqs": 1})
    late = driver.add(2, 2)
    seen = []
    while driver.engine.has_work:
        driver.step()
        seen.append(len(driver.log.steps[-1].ids))
    assert driver.engine.stats().preemptions == 0
    assert seen == sorted(seen, reverse=True)
    assert driver.answers()[late]
    ended = max(driver.log.requests[seq_id].finish_ns or 0 for seq_id in long)
    assert (driver.log.requests[late].admitted_ns or 0) >= ended


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(16, 40),
        "prefill_chunk_size": st.none() | st.integers(1, 5),
        "max_queue_delay_ms": st.sampled_from([0.0, 2.0]),
        "kv_watermark": st.sampled_from([0.0, 0.2]),
        "kv_high_watermark": st.sampled_from([None, 0.1, 0.5]),
    },
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SCHEDULERS),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 15)), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 20), LIMITS, max_size=6),
    st.integers(5, 30),
)
def test_answers_stay_the_same_whatever_changes_meanwhile(
    scheduler: str, arrivals: list[tuple[int, int, int]], changes: dict[int, dict[str, Any]], blocks: int
) -> None:
    """The driver checks the engine's integrity after every iteration, seats included."""
    driver = Driver(config(scheduler, reservation="on_demand", left_pad=False), num_kv_blocks=blocks)
    prompts: dict[int, tuple[list[int], int]] = {}
    for tick in range(400):
        for prompt_len, max_tokens, _ in [a for a in arrivals if a[2] == tick]:
            start = 10_000 * (driver.engine.counters.received + 1)
            seq_id = driver.add(prompt_len, max_tokens)
            prompts[seq_id] = list(range(start, start + prompt_len)), min(max_tokens, 16 - prompt_len)
        if tick in changes:
            driver.engine.set_limits(changes[tick])
        if not driver.engine.has_work and tick > 20:
            break
        driver.step()
        seats = driver.engine.stats().running
        assert seats <= driver.engine.config.max_num_seqs
    assert not driver.engine.has_work
    assert driver.answers() == {i: answer(prompt, limit) for i, (prompt, limit) in prompts.items()}
