"""How requests enter the engine and how their answers end."""

from __future__ import annotations

import pytest

from engines.config import ConfigError
from engines.request import Output, Refused, Request
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import answer


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
