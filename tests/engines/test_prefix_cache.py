"""Shared KV: what is found, what is not, and what may never happen. Block size 4, the mock model."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from engines.kv_pool import BlockPool, IntegrityError
from engines.prefix_cache import PrefixCache
from engines.request import Request
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import answer

WHOLE = {"max_model_len": 40, "max_num_batched_tokens": 120, "prefix_cache": True}


def driver(scheduler: str = "continuous", num_kv_blocks: int = 100, **changes: Any) -> Driver:
    return Driver(config(scheduler, **{**WHOLE, **changes}), num_kv_blocks)


def ask(d: Driver, prompt: list[int], max_tokens: int = 3, **more: Any) -> int:
    return d.engine.add(Request(prompt, max_tokens, **more))


def cached(d: Driver, seq_id: int) -> int:
    return d.log.requests[seq_id].cached_tokens


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_full_blocks_are_found_and_the_last_token_is_always_computed(
    scheduler: str, length: int, hit: int
) -> None:
    d = driver(scheduler)
    prompt = list(range(length))
    for _ in range(2):
        ask(d, prompt)
        d.run()
    assert d.answers() == {0: answer(prompt, 3), 1: answer(prompt, 3)}
    assert (cached(d, 0), cached(d, 1)) == (0, hit)
    stats = d.engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * length, hit)
    assert stats.prefill_tokens == 2 * length - hit
    assert sum(step.cached_tokens for step in d.log.steps) == hit
    assert stats.kv_live == 0


def test_the_answer_of_one_is_the_prompt_of_the_next() -> None:
    """A conversation: the second turn repeats the first, with its answer."""
    d = driver()
    first = list(range(6))
    ask(d, first, 7)
    d.run()
    second = [*first, *answer(first, 7), 77]
    ask(d, second)
    d.run()
    assert d.answers()[1] == answer(second, 3)
    assert cached(d, 1) == 12  # 6 + 6 computed tokens, the seventh was only sampled


def test_two_alike_in_one_step_are_both_right_and_share_afterwards() -> None:
    """What is not written yet must not be found (text-generation-inference PR#2489)."""
    d = driver()
    prompt = list(range(10))
    ids = [ask(d, prompt, 6), ask(d, prompt, 6)]
    d.step()
    assert d.trace() == ["p0:10 p1:10"]
    one, two = (seq.block_table for seq in d.engine.scheduler.running)
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert d.engine.stats().kv_live == 4
    d.run()
    assert [d.answers()[i] for i in ids] == [answer(prompt, 6)] * 2
    assert [cached(d, i) for i in ids] == [0, 0]


def test_a_chunk_is_found_by_the_next_step_only() -> None:
    d = driver("chunked", prefill_chunk_size=6)
    prompt = list(range(20))
    ask(d, prompt)
    d.step()
    ask(d, [*prompt[:8], 99])
    d.step()
    d.step()
    assert d.trace()[:2] == ["p0:6", "p0:6 p1:5"], "one block of four was full"
    d.run()
    assert cached(d, 1) == 4


def test_the_head_of_a_shared_prefix_counts_once_and_lives_until_the_last_has_left() -> None:
    d = driver(num_kv_blocks=100)
    prefix = list(range(8))
    ask(d, [*prefix, 50], 3)
    d.step()
    ask(d, [*prefix, 60], 6)
    d.step()
    assert d.engine.stats().kv_live == 2 + 1 + 1
    shared = d.engine.scheduler.running[1].block_table[0]
    while len(d.engine.scheduler.running) > 1:
        d.step()
    assert d.engine.pool.ref_count[shared] == 1
    d.run()
    assert d.engine.pool.ref_count[shared] == 0
    assert d.answers() == {0: answer([*prefix, 50], 3), 1: answer([*prefix, 60], 6)}


def test_an_ended_row_writes_over_nothing_that_others_may_find() -> None:
    """A static batch computes the row of an answer that has ended. Where its last block is full, there is no
    slot left that would be its own."""
    d = driver("static", reservation="on_demand", left_pad=False)
    short = list(range(5))
    ask(d, short, 4)  # 8 tokens are computed, two blocks: the ninth is only sampled
    ask(d, list(range(500, 505)), 12)
    d.run()
    assert d.engine.stats().ended_rows > 0
    again = [*short, *answer(short, 4), 7]
    ask(d, again)
    d.run()
    assert cached(d, 2) == 8
    assert d.answers()[2] == answer(again, 3)


class Same(bytes):
    """Tokens whose hash is that of all others."""

    def __hash__(self) -> int:
        return 1


def test_hashes_that_collide_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver()

    def name_blocks(live: Any) -> None:
        for start in range(4 * len(live.seq.block_keys), len(live.tokens) - 3, 4):
            live.seq.block_keys.append(Same(live.tokens[start : start + 4].tobytes()))

    monkeypatch.setattr(d.engine, "_name_blocks", name_blocks)
    prompts = [list(range(10)), list(range(100, 110)), [*range(4), *range(200, 206)], list(range(10))]
    for prompt in prompts:
        ask(d, prompt)
        d.run()
    assert d.answers() == {i: answer(prompt, 3) for i, prompt in enumerate(prompts)}
    assert [cached(d, i) for i in range(4)] == [0, 0, 4, 8]


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    cache = PrefixCache()
    assert cache.add(0, b"a", 1) == 1
    assert cache.add(1, b"x", 2) == 2
    assert cache.add(0, b"b", 3) == 3
    assert cache.find([b"a", b"x"], 9) == [1, 2]
    assert cache.find([b"b", b"x"], 9) == [3]
    assert cache.find([b"x"], 9) == []
    assert cache.add(0, b"a", 4) == 1
    assert 4 not in cache


def test_tenants_are_kept_apart_where_it_is_asked_for() -> None:
    prompt = list(range(10))
    hits = {}
    for salt in ("none", "tenant"):
        d = driver(prefix_cache_salt=salt)
        for tenant in ("a", "b", "a"):
            ask(d, prompt, tenant=tenant)
            d.run()
        hits[salt] = [cached(d, i) for i in range(3)]
    assert hits == {"none": [0, 8, 8], "tenant": [0, 0, 8]}


def test_a_run_finds_nothing_of_another_one() -> None:
    d = driver()
    prompt = list(range(10))
    for run in ("warmup", "warmup", "one", "one", None):
        ask(d, prompt, label={} if run is None else {"run": run})
        d.run()
    assert [cached(d, i) for i in range(5)] == [0, 8, 0, 8, 8]


def test_a_new_run_while_the_last_one_still_answers() -> None:
    d = driver()
    prompt = list(range(10))
    ask(d, prompt, 12, label={"run": "one"})
    d.step()
    ask(d, prompt, 12, label={"run": "two"})
    d.run()
    ask(d, prompt, 12, label={"run": "two"})
    d.run()
    assert [cached(d, i) for i in range(3)] == [0, 0, 8]
    assert d.answers() == {i: answer(prompt, 12) for i in range(3)}


def pool_with(*contents: str, num_blocks: int = 6) -> tuple[BlockPool, list[array[int]]]:
    """Tables that hold these contents, a letter a block."""
    pool, tables = BlockPool(num_blocks, 1, prefix_cache=True), []
    for content in contents:
        table = array("i")
        hit = pool.find(list(content), len(content))
        assert pool.grow(table, len(content), hit)
        pool.publish(table, list(content), len(hit), len(content))
        tables.append(table)
    pool.check(tables)
    return pool, tables


def test_the_longest_unused_goes_first_and_a_tail_before_its_head() -> None:
    pool, (one, two) = pool_with("abc", "xy")
    for table in (one, two):
        pool.release(table)
    pool.check([])
    assert (pool.num_free, pool.num_cached, pool.num_live) == (0, 5, 0)
    kept = []
    taken = array("i")
    for tokens in range(1, 6):
        assert pool.grow(taken, tokens)
        pool.check([taken])
        kept.append((len(pool.find("abc", 3)), len(pool.find("xy", 2))))
    assert kept == [(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]


def test_a_hit_makes_it_recently_used() -> None:
    pool, (one, two) = pool_with("abc", "xy")
    for table in (one, two):
        pool.release(table)
    again = array("i")
    assert pool.grow(again, 2, pool.find("ab", 2))
    pool.release(again)
    taken = array("i")
    assert pool.grow(taken, 3)
    assert (pool.find("abc", 3), len(pool.find("xy", 2))) == ([1, 2], 0)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool, (one,) = pool_with("ab")
    pool.release(one)
    assert pool.grow(one, 3)
    assert len(pool.find("ab", 2)) == 2
    assert pool.available == 2


def test_a_hit_that_does_not_fit_leaves_everything_as_it_was() -> None:
    pool, (one, two) = pool_with("abc", "xy")
    pool.release(one)
    before = (pool.num_free, pool.num_cached, pool.num_live, pool.find("abc", 3), pool.ref_count[:])
    other = array("i")
    hit = pool.find("ab", 2)
    assert pool.missing(other, 4, hit) == 4, "nobody holds the hit: its blocks are taken as well"
    assert not pool.grow(other, 4, hit)
    assert (pool.num_free, pool.num_cached, pool.num_live, pool.find("abc", 3), pool.ref_count) == before
    assert pool.grow(other, 3, hit)
    pool.check([one, two, other])


def test_what_others_hold_costs_nothing() -> None:
    pool, (one, two) = pool_with("abcd", "abcde")
    assert one[:4] == two[:4]
    assert (pool.num_live, pool.available) == (5, 0)
    third = array("i")
    assert pool.missing(third, 5, pool.find("abcde", 5)) == 0
    assert pool.grow(third, 5, pool.find("abcde", 5))
    pool.check([one, two, third])


def test_the_same_content_twice_becomes_one_block() -> None:
    pool, (one,) = pool_with("ab")
    two = array("i")
    pool.grow(two, 3)
    pool.publish(two, "abc", 0, 3)
    assert two[:2] == one
    assert (pool.num_live, pool.num_free) == (3, 2)
    pool.release(one)
    pool.check([two])
    assert pool.num_live == 3, "the head stays while a tail is held"


def test_forgetting_leaves_those_alone_that_are_held() -> None:
    pool, (one, two) = pool_with("abc", "xy")
    pool.release(two)
    pool.forget()
    pool.check([one])
    assert (pool.num_free, pool.num_cached, pool.num_live) == (2, 0, 3)
    assert pool.find("abc", 3) == []
    pool.grow(one, 4)
    pool.publish(one, "abcd", 3, 4)
    assert pool.find("abcd", 4) == [], "its head cannot be found, so nothing of it can"
    pool.release(one)
    assert (pool.num_free, pool.num_cached) == (5, 0)
    pool.check([])


def test_the_check_sees_a_child_without_its_parent() -> None:
    pool, (one,) = pool_with("abc")
    pool._tree.drop(one[0])
    with pytest.raises(IntegrityError, match="its parent 1 is free"):
        pool.check([one])


def test_the_check_sees_a_cached_block_that_is_held() -> None:
    pool, (one,) = pool_with("abc")
    pool._cached[one[0]] = None
    with pytest.raises(IntegrityError, match="and cached"):
        pool.check([one])


def test_the_sums_are_looked_at_when_the_engine_falls_idle() -> None:
    d = driver()
    ask(d, [1, 2, 3], 2)
    d.step()
    d.engine.pool._free.popleft()
    with pytest.raises(IntegrityError, match="are not the 99 usable ones"):
        d.engine.step()


def test_a_blocked_head_takes_nothing_from_the_cache() -> None:
    """It is looked at again in every iteration, which must not change what is kept."""
    d = driver(num_kv_blocks=11)  # 10 usable
    ask(d, list(range(100, 108)), 1)
    d.run()
    ask(d, list(range(200, 220)), 17)  # 9 blocks in the end
    d.step()
    ask(d, [*range(100, 108), 5], 20)
    order = list(d.engine.pool._cached)
    for _ in range(3):
        d.step()
        assert list(d.engine.pool._cached) in (order, order[1:], order[2:], [])
    d.run()
    assert d.answers()[2] == answer([*range(100, 108), 5], 20)


def test_it_is_forgotten_that_a_seat_would_have_found_what_was_taken_meanwhile() -> None:
    """Two are looked up for one batch; the first one's seat evicts what the second would have found."""
    d = driver(num_kv_blocks=6)  # 5 usable
    old, new = [*range(100, 108), 1], list(range(200, 216))
    ask(d, old[:8], 1)
    d.run()
    scheduler = d.engine.scheduler
    ask(d, new, 1)
    ask(d, old, 1)
    first, second = map(scheduler.look_up, list(scheduler.waiting))
    assert (first.num_computed, second.num_computed) == (0, 8)
    assert scheduler.admit(first, first.remaining)
    assert not scheduler.admit(second, second.remaining)
    assert second.num_computed < 8
    assert second.block_table.tolist() == []
    scheduler.pool.check(seq.block_table for seq in (first, second))
