from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.batch import NULL_BLOCK
from engines.kv_pool import BlockPool, IntegrityError


def test_the_null_block_is_never_given() -> None:
    pool, table = BlockPool(5, 4), array("i")
    assert pool.usable == 4
    assert pool.grow(table, 16)
    assert sorted(table) == [1, 2, 3, 4]
    assert NULL_BLOCK not in table
    assert not pool.grow(table, 17)


def test_growing_is_all_or_nothing() -> None:
    pool, one, two = BlockPool(5, 4), array("i"), array("i")
    assert pool.grow(one, 5)
    before = one.tolist(), pool.num_free
    assert not pool.grow(two, 9)  # 3 blocks, 2 are free
    assert (one.tolist(), two.tolist(), pool.num_free) == (before[0], [], before[1])
    assert pool.grow(two, 8)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)], ids=lambda v: str(v)
)
def test_block_borders(tokens: int, blocks: int) -> None:
    pool, table = BlockPool(10, 4), array("i")
    assert pool.blocks_for(tokens) == blocks
    assert pool.missing(table, tokens) == blocks
    assert pool.grow(table, tokens)
    assert len(table) == pool.num_live == blocks
    assert pool.missing(table, tokens) == 0


def test_the_tail_of_a_sequence_is_overwritten_before_its_head() -> None:
    pool, table = BlockPool(4, 4), array("i")
    pool.grow(table, 12)
    held = table.tolist()
    pool.release(table)
    again = array("i")
    pool.grow(again, 12)
    assert again.tolist() == held[::-1]


def test_release_is_harmless_when_repeated() -> None:
    pool, table, other = BlockPool(5, 4), array("i"), array("i")
    pool.grow(table, 8)
    pool.grow(other, 4)
    for _ in range(2):
        pool.release(table)
        assert (pool.num_live, pool.num_cached, pool.num_free) == (1, 0, 3)
        pool.check([table, other])


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_blocks=1: needs at least 2"):
        BlockPool(1, 4)


def grown() -> tuple[BlockPool, array[int]]:
    pool, table = BlockPool(6, 4), array("i")
    pool.grow(table, 8)
    pool.check([table])
    return pool, table


def test_the_check_sees_a_block_in_two_tables() -> None:
    pool, table = grown()
    with pytest.raises(IntegrityError, match=f"block {table[0]} is in 2 tables and counts 1"):
        pool.check([table, table[:1]])


def test_the_check_sees_a_leak() -> None:
    pool, table = grown()
    lost = table.pop()
    with pytest.raises(IntegrityError, match=f"block {lost} is in 0 tables and counts 1"):
        pool.check([table])


def test_the_check_sees_a_double_free() -> None:
    pool, table = grown()
    pool._free.append(pool._free[0])
    with pytest.raises(IntegrityError, match="2 times in the free list"):
        pool.check([table])


def test_the_check_sees_a_live_block_in_the_free_list() -> None:
    pool, table = grown()
    pool._free.append(table[0])
    with pytest.raises(IntegrityError, match="in 1 tables and 1 times in the free list"):
        pool.check([table])


def test_the_check_sees_the_null_block() -> None:
    pool, table = grown()
    table.append(NULL_BLOCK)
    with pytest.raises(IntegrityError, match="null block"):
        pool.check([table])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=40), st.integers(2, 12))
def test_free_and_live_always_make_the_pool(moves: list[tuple[int, int]], num_blocks: int) -> None:
    """Four sequences grow, or give everything back at 0."""
    pool, tables = BlockPool(num_blocks, 3), [array("i") for _ in range(4)]
    for who, tokens in moves:
        free, held = pool.num_free, len(tables[who])
        if tokens == 0:
            pool.release(tables[who])
            assert pool.num_free == free + held
        else:
            need = max(0, -(-tokens // 3) - held)
            assert pool.grow(tables[who], tokens) == (need <= free)
            assert len(tables[who]) == held + (need if need <= free else 0)
        pool.check(tables)
        assert pool.num_live + pool.num_cached + pool.num_free == pool.usable
