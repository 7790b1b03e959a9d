"""The presets that compute prompts in pieces, and those that interrupt, slice or predict, held to batches
that were worked out by hand from their systems' rules.

p prefill, d decode, r recompute, e ended row; the number of a request, and tokens if not 1. Blocks are of 4
tokens, and an answer of n tokens is one prefill and n - 1 decodes."""

from __future__ import annotations

import pytest

from engines.reservation import PredictedPeak
from tests.support.preset_driver import add, live, small

LONG = [(4, 6), (4, 6), (4, 6), (2, 2), (2, 3)]
"""Prompt and answer length."""


# -- chunks


def test_chunked() -> None:
    """A budget of 8: decodes take theirs, then the prompt that is partly computed, then new ones."""
    driver = small("chunked", budget=8)
    add(driver, (3, 3), (12, 2), (2, 2), (4, 2), (1, 2), (9, 1))
    driver.run()
    assert driver.trace() == [
        "p0:3 p1:5",
        "d0 p1:7",
        "d0 d1 p2:2",
        "d2 p3:4 p4:1",
        "d3 d4 p5:6",
        "p5:3",
    ]
    assert [sum(s.tokens) for s in driver.log.steps] == [8, 8, 4, 6, 8, 3]


def test_chunked_decodes_take_turns_under_their_budget() -> None:
    """decode_seq_budget=2: of three that decode two take a token, and the round goes on where it ended."""
    driver = small("chunked", "engine.policy.decode_seq_budget=2", budget=8)
    add(driver, (2, 4), (2, 4), (2, 4), (3, 1))
    driver.run()
    assert driver.trace() == ["p0:2 p1:2 p2:2", "d0 d1", "d2 d0", "d1 d2", "d0 d1", "d2 p3:3"]


def test_chunked_under_a_decode_budget_somebody_always_gets_on() -> None:
    """5 blocks. At iteration 9 it is 1's turn, which needs a third block and is the newest: it gives up its
    own, and 0, whose turn it is not, takes the token."""
    driver = small("chunked", "engine.policy.decode_seq_budget=1", budget=8, blocks=4)
    add(driver, (4, 6), (4, 6))
    driver.run()
    assert driver.trace()[:9] == ["p0:4 p1:4", *["d0", "d1"] * 4]
    assert all(driver.trace())


def test_no_evict() -> None:
    """6 blocks. 0, 1 and 2 need 10 tokens to their end, 3 blocks: two at a time, and 3 and 4, which would fit
    the seat, do not overtake number 2. Nobody is ever evicted."""
    driver = small("no_evict", budget=8, blocks=6)
    add(driver, *LONG)
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4",
        *["d0 d1"] * 5,
        "p2:4 p3:2 p4:2",
        "d2 d3 d4",
        "d2 d4",
        *["d2"] * 3,
    ]
    assert live(driver) == [6, 6, 6, 6, 6, 6, 6, 6, 5, 3, 3, 3]
    assert driver.engine.stats().preemptions == 0


def test_max_utilization() -> None:
    """The same requests in the same pool. Number 2 enters at once; at iteration 5 all three have two blocks,
    0 and 1 need a third, and 2, which started last, is paused. It prefills its prompt and 4 tokens later. Two
    iterations less than no_evict, for 7 tokens computed twice."""
    driver = small("max_utilization", budget=8, blocks=6)
    add(driver, *LONG)
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4",
        "d0 d1 p2:4",
        *["d0 d1 d2"] * 3,
        "d0 d1",
        "r2:8",
        "d2 p3:2 p4:2",
        "d3 d4",
        "d4",
    ]
    assert live(driver) == [2, 5, 6, 6, 6, 6, 2, 5, 2, 1]
    assert [s.preemptions for s in driver.log.steps] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert driver.engine.stats().recomputed_tokens == 7


@pytest.mark.parametrize("name", ["no_evict", "max_utilization"])
def test_pieces_are_multiples_of_the_block(name: str) -> None:
    """A budget of 10: 7 tokens are left beside 0's prompt and 9 beside its decode, so 4 and 8 are taken."""
    driver = small(name, budget=10)
    add(driver, (3, 3), (14, 1))
    driver.run()
    assert driver.trace() == ["p0:3 p1:4", "d0 p1:8", "d0 p1:2"]


# -- interruptions, slices, predictions


def test_tgi() -> None:
    """waiting_served_ratio=0.5, max_waiting_tokens=3, eight seats.

    0-3 form the batch. 4 comes alone: floor(4 * 0.5) = 2 must wait, so it waits for two decodes, by when
    `waited` is 3, and interrupts. 5 and 6 come meanwhile: after the one decode that an interruption is
    followed by they are two, enough for a batch of five. 7 waits until `waited` is 3 again, one decode after
    it came. Each holds prompt and limit from the start: 3, 2, 2, 1 and 1 blocks."""
    driver = small(
        "tgi",
        "engine.max_num_seqs=8",
        "engine.policy.waiting_served_ratio=0.5",
        "engine.policy.max_waiting_tokens=3",
    )
    everyone = "d0 d1 d2 d3"
    add(driver, *[(2, 8)] * 4)
    driver.step()
    add(driver, (2, 3))
    for _ in range(3):
        driver.step()
    add(driver, (3, 2), (1, 2))
    for _ in range(3):
        driver.step()
    add(driver, (2, 1))
    driver.run()
    assert driver.trace() == [
        "p0:2 p1:2 p2:2 p3:2",
        everyone,
        everyone,
        "p4:2",
        f"{everyone} d4",
        "p5:3 p6:1",
        f"{everyone} d4 d5 d6",
        everyone,
        "p7:2",
        everyone,
        everyone,
    ]
    assert live(driver) == [12, 12, 12, 14, 14, 17, 17, 12, 13, 12, 12]


def test_tgi_prefills_twice_only_to_form_a_batch() -> None:
    """max_batch_prefill_tokens=4. The prefill that forms a batch may be followed by another one; with the
    ratio of 0.3 any number interrupts a batch of up to three. 3 would fit at once, but a decode is due."""
    driver = small("tgi", "engine.max_num_seqs=8", "engine.policy.max_batch_prefill_tokens=4")
    add(driver, (4, 2), (2, 2), (2, 1), (4, 2), (1, 1))
    driver.run()
    assert driver.trace() == ["p0:4", "p1:2 p2:2", "d0 d1", "p3:4", "p4:1", "d3"]


def test_sliced() -> None:
    """Slices of 2 tokens; a batch of n with the longest prompt L costs n * L + 2 * (8 + n).

    By length: 0 and 2 (2), 4 (3), 3 (7), 1 (8). The cut into 0, 2, 4 and 3, 1 costs 31 + 36; 0, 2 and 4, 3, 1
    would cost 24 + 46, and three batches 82 or more. After their slices 0 and 2 go back, with 4 tokens each,
    of which 3 were computed. 5, which came during the first slice, is in the second round, after 3 and 1.
    Each holds KV for its slice only: 1, 1 and 2 blocks, 3 and 2, then 2, 2 and 1, then 2."""
    driver = small("sliced", "engine.policy.slice_tokens=2")
    add(driver, (2, 3), (8, 2), (2, 5), (7, 1), (3, 2))
    driver.step()
    add(driver, (2, 1))
    driver.run()
    assert driver.trace() == [
        "p0:2 p2:2 p4:3",
        "d0 d2 d4",
        "p1:8 p3:7",
        "d1 e3",
        "r0:4 r2:4 p5:2",
        "d2 e0 e5",
        "r2:6",
    ]
    assert live(driver) == [4, 4, 5, 5, 5, 5, 2]
    assert [s.recomputed_tokens for s in driver.log.steps] == [0, 0, 0, 0, 3 + 3, 0, 5]
    assert [s.left_pad_tokens for s in driver.log.steps] == [2, 0, 1, 0, 2, 0, 0]


def test_sliced_on_a_prefix_cache_computes_little_again() -> None:
    """The same in blocks of 2 tokens that stay in the cache. Of 0 and 2 one block was full after their first
    slice, so each of them computes 2 tokens; after its second one 2 has two full blocks of its 6 tokens."""
    driver = small(
        "sliced", "engine.policy.slice_tokens=2", "engine.prefix_cache=true", "engine.block_size=2"
    )
    add(driver, (2, 3), (8, 2), (2, 5), (7, 1), (3, 2))
    driver.step()
    add(driver, (2, 1))
    driver.run()
    assert driver.trace() == [
        "p0:2 p2:2 p4:3",
        "d0 d2 d4",
        "p1:8 p3:7",
        "d1 e3",
        "r0:2 r2:2 p5:2",
        "d2 e0 e5",
        "r2:2",
    ]
    assert [s.recomputed_tokens for s in driver.log.steps] == [0, 0, 0, 0, 1 + 1, 0, 1]


def test_sliced_plans_no_batch_that_outgrows_the_pool() -> None:
    """4 blocks, slices of 4: prompts of 4 and 4 more tokens need 2 blocks each, so batches are of two, though
    there are three seats. At the border of a slice the answers of 8 have had 4 tokens, and they need 3 blocks
    for the next one: one at a time."""
    driver = small("sliced", "engine.policy.slice_tokens=4", blocks=4)
    add(driver, (4, 8), (4, 8), (4, 2))
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4",
        *["d0 d1"] * 3,
        "p2:4",
        "d2",
        "r0:8",
        *["d0"] * 3,
        "r1:8",
        *["d1"] * 3,
    ]
    assert max(live(driver)) == 4


def test_past_future_learns_how_long_answers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 tokens of KV, limits of 8. Nothing is known at first: two that have 4 and have 8 left peak at
    8 * 2 + 8 = 24, a third one is too many. They end after 2 tokens, and so do the next two. With four ended
    answers known, three that have 4 and are expected to have 2 left peak at 2 * 3 + 12 = 18: all three enter.

    But these go on. At iteration 9 each has 8 tokens in two blocks, and the newest gives up its own; by then
    it has answered 5. While 4 and 5 have 12 tokens and 2 left, 6 has 9 (12 in blocks) and 3 left (no known
    answer was as long, so its limit counts): the peak of 2 * 3 + 36 is above 24. It enters when they
    have ended."""
    monkeypatch.setattr(PredictedPeak, "LEAST", 4)
    driver = small("past_future", blocks=6)
    add(driver, *[(4, 8)] * 4, stop_after=2)
    add(driver, *[(4, 8)] * 3)
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4",
        "d0 d1",
        "p2:4 p3:4",
        "d2 d3",
        "p4:4 p5:4 p6:4",
        *["d4 d5 d6"] * 4,
        *["d4 d5"] * 3,
        "r6:9",
        *["d6"] * 2,
    ]
    assert [s.preemptions for s in driver.log.steps] == [0] * 9 + [1] + [0] * 5
