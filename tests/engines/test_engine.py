"""How requests enter and leave the engine, by every door."""

from __future__ import annotations

import pytest

from engines.config import SCHEDULERS, ConfigError
from engines.request import Output, Refused, Request, SamplingParams
from tests.support.engine_driver import Driver, config
from tests.support.mock_runner import answer

# -- in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "reason", "status", "message"),
    [
        (0, 4, "empty_prompt", 400, "the prompt has no tokens"),
        (4, 0, "max_tokens", 400, "max_tokens=0: needs at least 1"),
        (16, 1, "prompt_too_long", 400, "16 tokens: engine.max_model_len=16 takes at most 15"),
        (
            9,
            4,
            "never_fits",
            400,
            r"\(9 \+ 4\) need 4 KV blocks of 4 tokens: engine.num_kv_blocks=4 leaves 3",
        ),
    ],
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_can_never_run_is_refused_and_the_next_one_runs(
    scheduler: str, prompt_len: int, max_tokens: int, reason: str, status: int, message: str
) -> None:
    driver = Driver(config(scheduler, reservation="on_demand"), num_kv_blocks=4)
    with pytest.raises(Refused, match=message) as refused:
        driver.add(prompt_len, max_tokens)
    assert (refused.value.reason, refused.value.status) == (reason, status)
    later = driver.add(8, 4)
    driver.run()
    assert driver.reasons() == {later: "length"}
    assert driver.engine.stats().refusals == {reason: 1}
    record = driver.log.requests[0]
    assert (record.finish_reason, record.refusal, record.admitted_ns) == ("refused", reason, None)
    assert driver.log.steps[0].refusals == 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("reservation", ["on_demand", "prompt", "prompt_plus_max_tokens"])
@pytest.mark.parametrize("total", [3, 4, 5, 8, 9, 12, 13])
def test_a_pool_of_exactly_what_a_request_needs_is_enough(
    scheduler: str, reservation: str, total: int
) -> None:
    """Block borders; 5 requests that each need the whole pool, one after the other. A block less is
    refused."""
    needed = -(-total // 4)
    driver = Driver(config(scheduler, reservation=reservation), num_kv_blocks=needed + 1)
    ids = [driver.add(total - 2, 2) for _ in range(5)]
    driver.run()
    assert driver.reasons() == dict.fromkeys(ids, "length")
    if reservation == "prompt_plus_max_tokens":
        assert driver.engine.stats().preemptions == 0
    alone = Driver(config(scheduler, reservation=reservation), num_kv_blocks=needed + 1)
    alone.add(total - 2, 2)
    alone.run()
    assert alone.engine.stats().preemptions == 0
    if needed > 1:
        with pytest.raises(Refused, match="KV blocks"):
            Driver(config(scheduler, reservation=reservation), num_kv_blocks=needed).add(total - 2, 2)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_max_tokens_is_cut_to_what_the_model_takes(scheduler: str) -> None:
    driver = Driver(config(scheduler))
    seq_id = driver.add(15, 100)
    other = driver.add(10, 100)
    driver.run()
    assert {i: len(tokens) for i, tokens in driver.answers().items()} == {seq_id: 1, other: 6}
    assert driver.log.requests[seq_id].max_tokens == 100  # as declared


def test_the_queue_has_a_bound() -> None:
    driver = Driver(config("continuous", max_num_seqs=1, max_waiting_requests=2))
    driver.add(4, 4)
    driver.step()
    driver.add(4, 4)
    driver.add(4, 4)
    with pytest.raises(Refused, match="2 requests are waiting") as refused:
        driver.add(4, 4)
    assert (refused.value.reason, refused.value.status) == ("queue_full", 503)
    driver.run()
    assert driver.engine.stats().finished == {"length": 3}


def test_waiting_too_long_is_refused_late() -> None:
    driver = Driver(config("continuous", max_num_seqs=1, queue_timeout_ms=5))
    first, second = driver.add(4, 10), driver.add(4, 4)
    driver.run()
    assert driver.reasons() == {first: "length", second: "queue_timeout"}
    record = driver.log.requests[second]
    assert record.admitted_ns is None
    assert record.finish_ns is not None
    assert 5e6 <= record.finish_ns - record.arrival_ns < 8e6


def test_a_preempted_sequence_does_not_time_out() -> None:
    driver = Driver(config("continuous", queue_timeout_ms=1, preempt_every=1))
    seq_id = driver.add(4, 8)
    driver.run()
    assert driver.reasons() == {seq_id: "length"}
    assert driver.log.requests[seq_id].preemptions > 0


def test_arrival_may_lie_before_the_call() -> None:
    driver = Driver(config("continuous"))
    seq_id = driver.engine.add(Request([1, 2], 1), arrival=99.5)
    driver.run()
    assert driver.log.requests[seq_id].arrival_ns == 99_500_000_000


def test_a_pool_too_small_for_its_reservation_is_a_configuration_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"num_kv_blocks=4: reservation=max_model_len needs 5 for engine.max_model_len=16",
    ):
        Driver(config("static"), num_kv_blocks=4)


# -- out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("max_tokens", "more", "length", "reason"),
    [
        (5, {}, 5, "length"),
        (5, {"stop_after": 3}, 3, "stop"),
        (5, {"stop_after": 5}, 5, "length"),
        (5, {"stop_after": 9}, 5, "length"),
        (5, {"stop_after": 1}, 1, "stop"),
        (9, {"eos": 2}, 3, "stop"),
        (3, {"eos": 2}, 3, "stop"),  # the last token that max_tokens allows is EOS
        (5, {"eos": 2, "ignore_eos": True}, 5, "length"),
        (5, {"eos": 0, "stop_after": 4}, 4, "stop"),  # stop_after decides alone
    ],
)
def test_where_answers_end(
    scheduler: str, max_tokens: int, more: dict[str, int], length: int, reason: str
) -> None:
    """`eos` is the index of the token in the answer that is made an EOS."""
    more = dict(more)
    tokens = answer(list(range(10_000, 10_004)), max_tokens)
    eos = [tokens[more.pop("eos")]] if "eos" in more else []
    driver = Driver(config(scheduler), eos_token_ids=eos)
    seq_id = driver.add(4, max_tokens, **more)
    driver.run()
    assert driver.answers()[seq_id] == tokens[:length]
    assert driver.reasons() == {seq_id: reason}
    assert driver.log.requests[seq_id].output_tokens == length


def test_no_scheduler_can_see_where_an_answer_ends() -> None:
    driver = Driver(config("continuous"))
    driver.add(4, 8, stop_after=2)
    (seq,) = driver.engine.scheduler.waiting
    assert not [name for name in dir(seq) if "stop" in name or "eos" in name]
    assert seq.max_tokens == 8


def test_each_token_leaves_in_its_own_iteration() -> None:
    driver = Driver(config("continuous"))
    seq_id = driver.add(4, 3)
    tokens = answer(list(range(10_000, 10_004)), 3)
    assert driver.step() == [Output(seq_id, (tokens[0],))]
    assert driver.step() == [Output(seq_id, (tokens[1],))]
    assert driver.step() == [Output(seq_id, (tokens[2],), "length")]
    assert not driver.engine.has_work
    assert driver.engine.next_wakeup(driver.clock.now) is None
    assert driver.step() == []


# -- hanging up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "steps", "state"),
    [
        ("continuous", 0, "queued"),  # and never in the middle of a prompt: it is whole
        ("continuous", 1, "decode"),
        ("continuous", 2, "decode"),
        ("chunked", 0, "queued"),
        ("chunked", 1, "prefill"),
        ("chunked", 2, "prefill"),
        ("chunked", 3, "decode"),
        ("chunked", 4, "decode"),
    ],
)
def test_an_abort_frees_seat_and_blocks_at_once(scheduler: str, steps: int, state: str) -> None:
    driver = Driver(config(scheduler, prefill_chunk_size=4, block_size=2, max_model_len=20))
    other, seq_id = driver.add(2, 12), driver.add(12, 7)
    for _ in range(steps):
        driver.step()
    live = driver.engine.stats().kv_live
    driver.engine.abort(seq_id)
    driver.engine.check_integrity()
    stats = driver.engine.stats()
    assert stats.running == (1 if steps else 0)
    assert (stats.kv_live < live) == (state != "queued")
    assert stats.finished == {"abort": 1}
    record = driver.log.requests[seq_id]
    assert record.abort_state == state
    assert record.abort_seen_ns == record.finish_ns
    computed = {
        "queued": 0,
        "prefill": 4 * steps,
        "decode": 12 + steps - (3 if scheduler == "chunked" else 1),
    }
    assert record.wasted_tokens == computed[state]
    driver.run()
    assert driver.reasons() == {seq_id: "abort", other: "length"}


def test_an_answer_that_a_stop_string_ended_is_no_abort() -> None:
    driver = Driver(config("continuous"))
    seq_id, other = driver.add(4, 6), driver.add(4, 6)
    driver.step()
    driver.engine.abort(seq_id, "stop")
    driver.engine.check_integrity()
    record = driver.log.requests[seq_id]
    assert (record.finish_reason, record.output_tokens) == ("stop", 1)
    assert (record.abort_state, record.abort_seen_ns, record.wasted_tokens) == (None, None, 0)
    driver.run()
    assert driver.reasons() == {seq_id: "stop", other: "length"}


def test_an_abort_of_a_preempted_sequence() -> None:
    driver = Driver(config("continuous", preempt_every=1))
    driver.add(4, 6)
    seq_id = driver.add(4, 6)
    driver.step()
    assert [s.seq_id for s in driver.engine.scheduler.waiting] == [seq_id]
    driver.engine.abort(seq_id)
    driver.run()
    assert driver.reasons()[seq_id] == "abort"
    assert driver.log.requests[seq_id].abort_state == "queued"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_abort_of_the_unknown_and_of_the_finished_does_nothing(scheduler: str) -> None:
    driver = Driver(config(scheduler))
    seq_id = driver.add(4, 2)
    driver.run()
    before = driver.engine.stats()
    driver.engine.abort(seq_id)
    driver.engine.abort(12345)
    assert driver.engine.stats() == before
    assert not driver.engine.has_work


def test_an_abort_is_answered_without_a_pass() -> None:
    driver = Driver(config("continuous"))
    seq_id = driver.add(4, 2)
    driver.engine.abort(seq_id)
    assert driver.engine.has_work
    assert driver.step() == [Output(seq_id, (), "abort")]
    assert driver.log.steps == []


def test_the_row_of_a_client_that_left_a_static_batch_is_computed_on() -> None:
    driver = Driver(config("static"))
    short, gone, long = driver.add(2, 2), driver.add(3, 8), driver.add(4, 5)
    driver.step()
    driver.engine.abort(gone)
    assert driver.engine.stats().kv_live == 12
    assert driver.step() == [Output(gone, (), "abort")]
    driver.run()
    assert driver.trace() == ["p0:2 p1:3 p2:4", "d0 d2 e1", "d2 e1 e0", "d2 e1 e0", "d2 e1 e0"]
    assert driver.reasons() == {gone: "abort", short: "length", long: "length"}
    record = driver.log.requests[gone]
    assert record.abort_state == "held"
    assert record.wasted_tokens == 3 + 4  # its prompt, and 4 rows for nobody
    assert record.finish_ns == driver.log.requests[long].finish_ns


def test_an_answer_that_is_held_can_still_be_aborted() -> None:
    driver = Driver(config("static"))
    ended, other = driver.add(2, 1), driver.add(3, 3)
    driver.step()
    driver.engine.abort(ended)
    driver.run()
    assert driver.reasons() == {ended: "abort", other: "length"}
    assert driver.answers()[ended] == []
    assert driver.log.requests[ended].abort_state == "held"


def test_a_static_batch_that_everybody_left_is_over() -> None:
    driver = Driver(config("static"))
    ids = [driver.add(2, 8), driver.add(3, 8)]
    driver.step()
    for seq_id in ids:
        driver.engine.abort(seq_id)
    assert driver.engine.stats().kv_live == 0
    later = driver.add(3, 1)
    driver.step()
    assert driver.reasons() == {ids[0]: "abort", ids[1]: "abort", later: "length"}


def test_without_pad_finished_a_static_row_goes_at_once() -> None:
    driver = Driver(config("static", pad_finished=False))
    gone, other = driver.add(3, 8), driver.add(4, 5)
    driver.step()
    driver.engine.abort(gone)
    assert driver.engine.stats().kv_live == 4
    assert driver.log.requests[gone].abort_state == "decode"
    driver.run()
    assert driver.reasons() == {gone: "abort", other: "length"}


# -- static: forming a batch ---------------------------------------------------------------------------------


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


# -- the pass ------------------------------------------------------------------------------------------------


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
    assert reasons[0] == "error"
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
