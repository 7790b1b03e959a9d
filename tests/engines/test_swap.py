"""KV of preempted sequences in host memory: what is copied when, what is not computed again, and what happens
where the host is full. Block size 4, the mock model, which executes the copies."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from engines.batch import Copies
from engines.config import ConfigError
from engines.host_pool import HostPool
from engines.kv_pool import IntegrityError
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import answer

REQUESTS = [(3, 9), (7, 5), (1, 12), (8, 8), (5, 1), (4, 11)]


def driver(scheduler: str = "continuous", num_host_blocks: int = 50, **changes: Any) -> Driver:
    blocks = changes.pop("num_kv_blocks", 100)
    cfg = config(scheduler, preemption="swap", **changes)
    return Driver(cfg, blocks, num_host_blocks=num_host_blocks)


def check_answers(d: Driver, requests: list[tuple[int, int]]) -> None:
    for seq_id, (prompt_len, max_tokens) in enumerate(requests):
        start = 10_000 * (seq_id + 1)
        assert d.answers()[seq_id] == answer(list(range(start, start + prompt_len)), max_tokens)


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    """7 usable blocks. When the first has 12 tokens and the second 13 all are in use, and the first needs one
    more: the second is put away, 4 blocks, and comes back when the first has ended."""
    d = driver(num_kv_blocks=8, max_model_len=24)
    d.add(8, 12)
    d.add(9, 8)
    d.run()
    assert d.trace() == ["p0:8 p1:9", *["d0 d1"] * 4, *["d0"] * 7, *["d1"] * 3]
    assert [i for i, step in enumerate(d.log.steps) if step.swapped_out] == [5]
    assert [i for i, step in enumerate(d.log.steps) if step.swapped_in] == [12]
    check_answers(d, [(8, 12), (9, 8)])
    stats = d.engine.stats()
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 0)
    assert (stats.swapped_out, stats.swapped_in) == (4, 4)
    assert (d.log.requests[0].swaps, d.log.requests[1].swaps) == (0, 1)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_forced_preemption_computes_nothing_twice(scheduler: str, prefix_cache: bool, every: int) -> None:
    d = driver(scheduler, preempt_every=every, prefix_cache=prefix_cache)
    for request in REQUESTS:
        d.add(*request)
    d.run()
    check_answers(d, REQUESTS)
    stats = d.engine.stats()
    assert stats.preemptions > 0
    assert sum(r.swaps for r in d.log.requests.values()) == stats.preemptions
    if scheduler != "sliced":  # at the border of a slice KV is given up, whatever becomes of the preempted
        assert stats.recomputed_tokens == 0
    assert sum(s.swapped_out for s in d.log.steps) == stats.swapped_out > 0
    assert d.engine.scheduler.preemption.host.num_free == 50


def test_where_the_host_is_full_it_is_computed_again() -> None:
    """vLLM v0 died of this: no room on the host was a RuntimeError."""
    swaps = []
    for num_host_blocks in (0, 1, 2, 3, 50):
        d = driver(num_host_blocks=num_host_blocks, num_kv_blocks=6)
        requests = [(4, 9), (4, 6), (3, 2), (8, 8), (1, 12)]
        for request in requests:
            d.add(*request)
        d.run()
        check_answers(d, requests)
        stats = d.engine.stats()
        assert stats.preemptions > 0
        swaps.append((stats.swapped_out > 0, stats.recomputed_tokens > 0))
    assert swaps[0] == (False, True)
    assert swaps[-1] == (True, False)


def test_an_abort_while_it_is_away_frees_the_host() -> None:
    d = driver(preempt_every=1)
    d.add(4, 6)
    seq_id = d.add(4, 6)
    d.step()
    host = d.engine.scheduler.preemption.host
    assert host.num_free == 49
    d.engine.abort(seq_id)
    d.engine.check_integrity()
    assert host.num_free == 50
    assert host.take() is None, "nothing of it is copied any more"
    d.run()
    assert d.engine.end().integrity == "ok"


def test_the_end_of_the_engine_frees_the_host() -> None:
    d = driver(preempt_every=1)
    d.add(4, 6)
    d.add(4, 6)
    d.step()
    assert d.engine.end().integrity == "ok"
    assert d.engine.scheduler.preemption.host.num_free == 50


def test_only_what_the_cache_has_lost_is_copied_back() -> None:
    d = driver(preempt_every=4, prefix_cache=True, max_model_len=40)
    d.add(10, 12)
    d.add(14, 12)
    d.run()
    check_answers(d, [(10, 12), (14, 12)])
    stats = d.engine.stats()
    assert stats.recomputed_tokens == 0
    assert 0 < stats.swapped_in < stats.swapped_out, "full blocks were still there"


def test_a_seat_that_is_lost_again_before_the_pass() -> None:
    """Nothing has come back yet, so nothing may be put away: what the host has is still right."""
    d = driver(preempt_every=1)
    d.add(4, 6)
    d.add(6, 6)
    d.step()
    scheduler = d.engine.scheduler
    (away,) = list(scheduler.waiting)
    held = away.host_table.tolist()
    assert scheduler.admit(away, away.remaining)
    assert scheduler.preempt() is away
    assert away.host_table.tolist() == held
    d.engine.check_integrity()
    assert away.num_swaps == 1
    d.run()
    check_answers(d, [(4, 6), (6, 6)])


def test_copies_that_are_called_off() -> None:
    host, table = HostPool(4), array("i")
    assert host.put_away(table, array("i", [7, 8]))
    assert host.take() == Copies(((7, 0), (8, 1)), ())
    host.bring_back(5, table, 0, array("i", [3, 4, 9]))
    assert host.stay(5)
    assert not host.stay(5)
    assert host.take() is None
    assert table.tolist() == [0, 1]
    host.bring_back(5, table, 1, array("i", [3, 4, 9]))
    assert host.num_free == 2
    assert host.take() == Copies((), ((1, 4),))
    assert (table.tolist(), host.num_free) == ([], 4)
    host.check([])


def test_the_host_gives_all_or_nothing() -> None:
    host, one, two = HostPool(3), array("i"), array("i")
    assert host.put_away(one, array("i", [1, 2]))
    assert not host.put_away(two, array("i", [3, 4]))
    assert (two.tolist(), host.num_free) == ([], 1)
    host.release(1, one)
    host.release(1, one)
    assert host.put_away(two, array("i", [3, 4, 5]))
    copies = host.take()
    assert copies is not None
    assert [block for block, _ in copies.out] == [3, 4, 5], "what was given up is not copied any more"
    host.check([two])


def test_a_host_block_that_comes_back_is_not_written_in_the_same_pass() -> None:
    host, one, two = HostPool(1), array("i"), array("i")
    host.put_away(one, array("i", [1]))
    host.take()
    host.bring_back(1, one, 0, array("i", [2]))
    assert not host.put_away(two, array("i", [3])), "its content is still wanted"
    assert host.take() == Copies((), ((0, 2),))
    assert host.put_away(two, array("i", [3]))


def test_the_check_sees_a_host_block_that_is_lost() -> None:
    host, table = HostPool(2), array("i")
    host.put_away(table, array("i", [1]))
    host.check([table])
    with pytest.raises(IntegrityError, match="host blocks"):
        host.check([])
    with pytest.raises(IntegrityError, match="host blocks"):
        host.check([table, table])


def test_a_size_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"engine\.swap_memory_gb=0: needs a size above 0"):
        config("continuous", preemption="swap", swap_memory_gb=0)
    with pytest.raises(ConfigError, match=r"engine\.preemption=drop: choose from recompute, swap"):
        config("continuous", preemption="drop")
