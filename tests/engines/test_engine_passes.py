"""How a static batch is formed, and what a pass is given and gives back."""

from __future__ import annotations

import pytest

from engines.request import SamplingParams
from tests.support.engine_driver import SCHEDULERS, Driver, config


def test_an_incomplete_batch_waits_for_company() -> None:
    driver = Driver(config("static", max_queue_delay_ms=50))
    driver.add(2, 1)
    arrived = driver.clock.now
    assert driver.engine.next_wakeup(driver.clock.now) == pytest.approx(arrived + 0.05)
    assert driver.step() == []
    driver.add(3, 1)
    driver.run()
    assert driver.trace() == ["p0:2 p1:3"]
    assert driver.log.steps[0].start_ns == round((arrived + 0.05) * 1e9)
    assert driver.log.steps[0].host_gap_ns is None


def test_a_preempted_sequence_waits_for_company_without_timing_out() -> None:
    """Number 1 loses its seat, and number 0 ends, before the delay is over."""
    cfg = config(
        "static",
        reservation="on_demand",
        max_num_seqs=2,
        max_queue_delay_ms=9,
        queue_timeout_ms=1,
        block_size=2,
    )
    driver = Driver(cfg, num_kv_blocks=9)
    driver.add(1, 2)
    driver.add(14, 2)
    driver.run()
    assert driver.trace() == ["p0:1 p1:14", "d0", "r1:15"]
    assert driver.engine.stats().finished == {"length": 2}


def test_a_full_batch_does_not_wait() -> None:
    driver = Driver(config("static", max_queue_delay_ms=50))
    for _ in range(4):
        driver.add(2, 1)
    assert driver.engine.next_wakeup(driver.clock.now) == driver.clock.now
    driver.step()
    assert driver.trace() == ["p0:2 p1:2 p2:2"]


@pytest.mark.parametrize(
    ("changes", "blocks"), [({"max_num_batched_tokens": 24}, 100), ({}, 9)], ids=["budget", "kv"]
)
def test_a_batch_is_full_too_when_budget_or_kv_is(changes: dict[str, int], blocks: int) -> None:
    """Padded to 12, two prompts are 24 tokens; and two times max_model_len are 8 blocks."""
    driver = Driver(config("static", max_queue_delay_ms=50, **changes), num_kv_blocks=blocks)
    for prompt_len in (2, 12, 1):
        driver.add(prompt_len, 1)
    driver.step()
    assert driver.trace() == ["p0:2 p1:12"]
    assert driver.log.steps[0].left_pad_tokens == 10


def test_ended_rows_stay_within_their_reservation() -> None:
    """Number 0 ends at once and is computed 10 times more; it has room for 3 + 1 tokens, one block."""
    driver = Driver(config("static", reservation="prompt_plus_max_tokens", drain=False))
    driver.add(3, 1)
    driver.add(3, 11)
    driver.run()
    rows = [int(b.kv_len[-1]) for b in driver.runner.batches[1:]]
    assert rows == [4] * 10
    assert driver.engine.stats().ended_rows == 10


def test_ended_rows_move_on_as_generate_would() -> None:
    driver = Driver(config("static"))
    driver.add(3, 1)
    driver.add(3, 9)
    driver.run()
    assert [int(b.kv_len[-1]) for b in driver.runner.batches[1:]] == [4, 5, 6, 7, 8, 9, 10, 11]


def test_ended_rows_give_way_before_anyone_is_preempted() -> None:
    """4 usable blocks, three rows: number 0 has ended when number 2 needs a second block."""
    driver = Driver(config("static", reservation="on_demand"), num_kv_blocks=5)
    for prompt_len, max_tokens in [(4, 1), (2, 3), (4, 6)]:
        driver.add(prompt_len, max_tokens)
    driver.run()
    assert driver.engine.stats().preemptions == 0
    assert driver.engine.stats().finished == {"length": 3}


def test_pads_are_rows_of_their_own_over_the_null_block() -> None:
    driver = Driver(config("static"))
    driver.add(2, 1)
    driver.add(5, 1)
    driver.run()
    (batch,) = driver.runner.batches
    assert batch.cu_q.tolist() == [0, 3, 5, 10]
    assert batch.kv_len.tolist() == [3, 2, 5]
    assert batch.slot_mapping[:3].tolist() == [-1, -1, -1]
    assert batch.block_table[0].tolist() == [0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert batch.sample_rows.tolist() == [4, 9]


def test_a_batch_that_mixes_chunks_and_decodes() -> None:
    driver = Driver(config("chunked", max_num_batched_tokens=8, prefill_chunk_size=6))
    for prompt_len, max_tokens in [(3, 3), (14, 2)]:
        driver.add(prompt_len, max_tokens)
    driver.step()
    driver.step()
    batch = driver.runner.batches[1]
    assert batch.cu_q.tolist() == [0, 1, 7]
    assert batch.kv_len.tolist() == [4, 11]
    assert batch.positions.tolist() == [3, 5, 6, 7, 8, 9, 10]
    assert batch.sample_rows.tolist() == [0]  # the middle of a prompt yields nothing
    tables = [seq.block_table.tolist() for seq in driver.engine.scheduler.running]
    assert batch.block_table.tolist() == [[*tables[0], 0, 0], tables[1]]
    slots = [4 * tables[1][p // 4] + p % 4 for p in range(5, 11)]
    assert batch.slot_mapping.tolist() == [4 * tables[0][0] + 3, *slots]


def test_sampling_arrays_name_seed_and_step() -> None:
    driver = Driver(config("continuous"), seed=3)
    driver.add(2, 3)
    driver.add(2, 3, sampling=SamplingParams(temperature=0.5, top_p=0.9, seed=11))
    driver.add(2, 3, sampling=SamplingParams(temperature=1.0))
    driver.step()
    driver.step()
    sampling = driver.runner.batches[1].sampling
    assert sampling is not None
    assert sampling.temperature.tolist() == [0.0, 0.5, 1.0]
    assert sampling.top_p.tolist() == pytest.approx([1.0, 0.9, 1.0])
    assert sampling.seed[1] == 11
    assert len(set(sampling.seed.tolist())) == 3
    assert sampling.step.tolist() == [1, 1, 1]


def test_an_all_greedy_batch_has_no_sampling() -> None:
    driver = Driver(config("continuous"))
    driver.add(2, 1)
    driver.run()
    assert driver.runner.batches[0].sampling is None


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_pass_that_fails_costs_its_sequences_and_not_the_engine(scheduler: str, fail_at: int) -> None:
    driver = Driver(config(scheduler, max_num_seqs=2), fail_at=(fail_at,))
    ids = [driver.add(3, 6), driver.add(5, 2), driver.add(4, 3)]
    driver.run()
    reasons = driver.reasons()
    hit = set(driver.log.steps[fail_at].ids)
    assert {i for i in ids if reasons[i] == "error"} <= hit
    assert hit, "the pass that failed was somebody's"
    assert reasons[0] == ("length" if 0 not in hit else "error")
    assert reasons[2] == ("length" if 2 not in hit else "error")
    errors = [o.error for o in driver.outputs if o.finish_reason == "error"]
    assert errors == ["RuntimeError: the device is on fire"] * len(errors)
    assert driver.engine.stats().kv_live == 0
    later = driver.add(3, 2)
    driver.run()
    assert driver.reasons()[later] == "length"


def test_times_of_a_request() -> None:
    driver = Driver(config("continuous", max_num_seqs=1))
    driver.add(4, 2)
    seq_id = driver.add(4, 2)
    driver.run()
    record = driver.log.requests[seq_id]
    start = 100_000_000_000
    assert record.arrival_ns == start
    assert record.admitted_ns == start + 2_000_000  # the seat is free after two iterations of 1 ms
    assert record.first_token_ns == start + 2_000_000  # the mock's pass takes no time
    assert record.finish_ns == start + 3_000_000
