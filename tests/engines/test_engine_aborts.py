"""Clients that hang up, in every state of their request."""

from __future__ import annotations

import pytest

from engines.request import Output
from tests.support.engine_driver import SCHEDULERS, Driver, config


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
    assert driver.log.requests[seq_id].abort_state == "preempted"


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
