"""Batches worked out by hand, iteration by iteration. p prefill, d decode, r recompute, e ended row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.queues.fcfs import FcfsQueue
from engines.schedulers.dynamic import DynamicScheduler
from engines.sequence import Sequence
from tests.support.engine_driver import Driver, config

# prompt and answer length; the static batch of the first three ends with number 1
FIVE = [(3, 2), (5, 4), (2, 1), (4, 2), (1, 3)]


def run(driver: Driver, requests: list[tuple[int, int]]) -> Driver:
    for prompt_len, max_tokens in requests:
        driver.add(prompt_len, max_tokens)
    driver.run()
    return driver


def test_static_runs_a_batch_to_its_longest_answer() -> None:
    driver = run(Driver(config("static")), FIVE)
    assert driver.trace() == [
        "p0:3 p1:5 p2:2",
        "d0 d1 e2",
        "d1 e2 e0",
        "d1 e2 e0",
        "p3:4 p4:1",
        "d3 d4",
        "d4 e3",
    ]
    assert [s.left_pad_tokens for s in driver.log.steps] == [2 + 0 + 3, 0, 0, 0, 0 + 3, 0, 0]
    assert [s.ended_rows for s in driver.log.steps] == [0, 1, 2, 2, 0, 0, 1]
    assert [s.num_seqs for s in driver.log.steps] == [3, 2, 1, 1, 2, 2, 1]
    # every request of the batch holds max_model_len, ended or not: 16 tokens are 4 blocks
    assert [s.kv_live for s in driver.log.steps] == [12, 12, 12, 12, 8, 8, 8]
    assert [(o.seq_id, len(o.token_ids)) for o in driver.outputs] == [(2, 1), (0, 2), (1, 4), (3, 2), (4, 3)]


def test_static_answers_leave_together() -> None:
    driver = Driver(config("static"))
    for prompt_len, max_tokens in FIVE:
        driver.add(prompt_len, max_tokens)
    assert [len(driver.step()) for _ in range(7)] == [0, 0, 0, 3, 0, 0, 2]


def test_static_without_its_switches_drops_what_has_ended() -> None:
    driver = run(Driver(config("static", left_pad=False, pad_finished=False, drain=False)), FIVE)
    assert driver.trace() == ["p0:3 p1:5 p2:2", "d0 d1", "d1", "d1", "p3:4 p4:1", "d3 d4", "d4"]
    assert all(s.left_pad_tokens == s.ended_rows == 0 for s in driver.log.steps)
    assert [s.kv_live for s in driver.log.steps] == [12, 8, 4, 4, 8, 8, 4]


def test_continuous_fills_a_seat_as_soon_as_it_is_free() -> None:
    driver = run(Driver(config("continuous")), FIVE)
    assert driver.trace() == ["p0:3 p1:5 p2:2", "d0 d1 p3:4", "d1 d3 p4:1", "d1 d4", "d4"]
    assert [s.waiting for s in driver.log.steps] == [2, 1, 0, 0, 0]


def test_continuous_lets_nobody_overtake_the_head_of_the_queue() -> None:
    """Number 1 does not fit the budget of 16 beside number 0; number 2 would, and waits behind it."""
    driver = run(Driver(config("continuous", max_num_batched_tokens=16)), [(10, 3), (8, 2), (1, 2)])
    assert driver.trace() == ["p0:10", "d0 p1:8 p2:1", "d0 d1 d2"]


def test_continuous_preempts_the_newest_and_recomputes_it() -> None:
    """5 usable blocks of 4 tokens. At iteration 5 both 0 and 1 go beyond 8 tokens: one block is left for
    two."""
    driver = run(Driver(config("continuous"), num_kv_blocks=6), [(4, 6), (4, 6), (3, 2)])
    assert driver.trace() == [
        "p0:4 p1:4 p2:3",
        "d0 d1 d2",
        "d0 d1",
        "d0 d1",
        "d0 d1",
        "d0",
        "r1:9",  # its prompt of 4 and its 5 tokens so far
    ]
    assert [s.kv_live for s in driver.log.steps] == [3, 5, 4, 4, 4, 3, 3]
    assert [s.preemptions for s in driver.log.steps] == [0, 0, 0, 0, 0, 1, 0]
    last = driver.log.steps[-1]
    assert (last.recomputed_tokens, last.decode_tokens, last.prefill_tokens) == (8, 1, 0)
    assert driver.log.requests[1].recomputed_tokens == 8
    assert driver.log.requests[1].preemptions == 1


def test_a_preempted_sequence_goes_before_a_later_arrival() -> None:
    """Iteration 5 has preempted number 1, so it admits nobody, though number 3 is small enough for what is
    left."""
    driver = Driver(config("continuous"), num_kv_blocks=6)
    for prompt_len, max_tokens in [(4, 6), (4, 6), (3, 2)]:
        driver.add(prompt_len, max_tokens)
    for _ in range(5):
        driver.step()
    driver.add(1, 2)
    driver.run()
    assert driver.trace()[5:] == ["d0", "r1:9 p3:1", "d3"]


def test_chunked_serves_decodes_then_partial_prompts_then_new_ones() -> None:
    """A budget of 8 tokens, pieces of at most 6."""
    driver = run(
        Driver(config("chunked", max_num_batched_tokens=8, prefill_chunk_size=6)), [(3, 3), (14, 2), (2, 2)]
    )
    assert driver.trace() == ["p0:3 p1:5", "d0 p1:6 p2:1", "d0 p1:3 p2:1", "d1 d2"]
    assert [sum(s.tokens) for s in driver.log.steps] == [8, 8, 5, 2]


def test_chunked_admits_no_prompt_that_would_fight_another_for_its_blocks() -> None:
    """5 usable blocks; each prompt needs 3. Number 1 fits the 4 free blocks of iteration 0, but number 0
    still has to take 2 of them."""
    cfg = config("chunked", max_num_batched_tokens=8, prefill_chunk_size=4)
    driver = run(Driver(cfg, num_kv_blocks=6), [(12, 2), (12, 2)])
    assert driver.trace() == ["p0:4", "p0:4", "p0:4", "d0", "p1:4", "p1:4", "p1:4", "d1"]
    assert driver.engine.stats().preemptions == 0


def test_chunked_recomputes_in_chunks() -> None:
    """6 usable blocks of 2. Number 1 loses its seat at iteration 3, when both need a fourth block; it has its
    prompt of 4 and 3 tokens by then, of which 6 were computed."""
    cfg = config("chunked", block_size=2, max_num_batched_tokens=8, prefill_chunk_size=4)
    driver = run(Driver(cfg, num_kv_blocks=7), [(4, 5), (4, 5)])
    assert driver.trace() == ["p0:4 p1:4", "d0 d1", "d0 d1", "d0", "d0", "r1:4", "r1:3", "d1"]
    assert [s.recomputed_tokens for s in driver.log.steps] == [0, 0, 0, 0, 0, 4, 2, 0]
    assert [s.decode_tokens for s in driver.log.steps] == [0, 2, 2, 1, 1, 0, 1, 1]


def test_chunked_takes_back_the_token_of_a_victim_it_had_planned() -> None:
    """5 usable blocks of 2. Number 0 takes its prompt in pieces while number 1, which came later, decodes. At
    iteration 3 number 0 needs its fourth block, none is free, and number 1 has its token of this
    iteration."""
    cfg = config("chunked", block_size=2, max_num_batched_tokens=8, prefill_chunk_size=2)
    driver = run(Driver(cfg, num_kv_blocks=6), [(8, 1), (1, 5)])
    assert driver.trace() == ["p0:2 p1:1", "d1 p0:2", "d1 p0:2", "p0:2", "r1:2", "r1:2", "d1"]
    assert [s.preemptions for s in driver.log.steps] == [0, 0, 0, 1, 0, 0, 0]


class SmallestFirst(FcfsQueue):
    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(super().__iter__(), key=lambda seq: seq.remaining))

    def disorder(self) -> None:
        pass


@pytest.mark.parametrize("name", ["continuous", "chunked"])
def test_an_iteration_that_preempted_admits_nobody(name: str) -> None:
    """In order of arrival the victim is the head and does not fit; in another order, somebody else might.
    Here 5 blocks are usable. At iteration 5 number 1 gives up 3 of them, number 0 takes one, and number 2,
    which is small enough for the rest, still waits for the next iteration."""
    driver = Driver(config(name), num_kv_blocks=6)
    driver.engine.scheduler.waiting = SmallestFirst()
    driver.add(4, 9)
    driver.add(8, 8)
    driver.engine.step()
    driver.add(1, 2)
    for _ in range(6):
        driver.engine.step()
    assert driver.trace() == ["p0:4 p1:8", "d0 d1", "d0 d1", "d0 d1", "d0 d1", "d0", "d0 p2:1"]


@pytest.mark.parametrize(
    ("reservation", "live"),
    [
        ("on_demand", [1, 2, 2, 3]),  # the piece of 4, then of 3, then an answer that needs a third block
        ("prompt", [2, 2, 2, 3]),
        ("prompt_plus_max_tokens", [3, 3, 3, 3]),
        ("max_model_len", [4, 4, 4, 4]),
    ],
)
def test_what_each_reservation_holds(reservation: str, live: list[int]) -> None:
    cfg = config("chunked", reservation=reservation, prefill_chunk_size=4)
    driver = run(Driver(cfg), [(7, 3)])
    assert driver.trace() == ["p0:4", "p0:3", "d0", "d0"]
    assert [s.kv_live for s in driver.log.steps] == live


@pytest.mark.parametrize(("seats", "sizes"), [(16, (4, 8)), (8, (2, 4)), (5, (2,)), (3, ()), (1, ())])
def test_dynamic_prefers_a_quarter_and_a_half_of_its_seats(seats: int, sizes: tuple[int, ...]) -> None:
    policy = {"preferred_batch_sizes": None}
    scheduler = Driver(config("dynamic", max_num_seqs=seats, policy=policy)).engine.scheduler
    assert isinstance(scheduler, DynamicScheduler)
    assert scheduler.preferred == sizes
