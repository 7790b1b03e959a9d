"""Edges of the KV manager: pools of exactly what is needed, ends at block borders, aborts at every step."""

from __future__ import annotations

from typing import Any

import pytest

from engines.kv_pool import IntegrityError
from engines.request import Refused, Request
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import answer

ON: dict[str, Any] = {"prefix_cache": True, "preemption": "swap", "reservation": "on_demand"}
BLOCK = 4
BORDERS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("prompt_len", BORDERS)
@pytest.mark.parametrize("max_tokens", BORDERS)
def test_a_pool_of_exactly_what_one_needs_serves_one_after_the_other(
    scheduler: str, prompt_len: int, max_tokens: int
) -> None:
    """The cache is full of others' blocks, and never in the way. (One null block forgotten in `usable`, and
    the last one is preempted for ever: vllm PR#52530.)"""
    blocks = -(-(prompt_len + max_tokens) // BLOCK)
    d = Driver(config(scheduler, max_model_len=40, **ON), blocks + 1, num_host_blocks=2)
    for _ in range(3):
        d.add(prompt_len, max_tokens)
    again = list(range(20_000, 20_000 + prompt_len))  # the second one's prompt
    d.engine.add(Request(again, max_tokens))
    d.run()
    for seq_id in range(3):
        start = 10_000 * (seq_id + 1)
        assert d.answers()[seq_id] == answer(list(range(start, start + prompt_len)), max_tokens)
    assert d.answers()[3] == answer(again, max_tokens)
    assert all(r.finish_reason == "length" for r in d.log.requests.values())
    d.engine.check_integrity()

    alone = Driver(config(scheduler, max_model_len=40, **ON), blocks + 1)
    alone.add(prompt_len, max_tokens)
    alone.run()
    assert alone.engine.stats().preemptions == 0


def test_one_block_less_is_refused() -> None:
    d = Driver(config("continuous", **ON), 4)
    with pytest.raises(Refused, match="need 4 KV blocks"):
        d.add(9, 4)
    d.add(9, 3)
    d.run()


@pytest.mark.parametrize("scheduler", ["continuous", "chunked", "prefill_first"])
def test_who_shares_a_prefix_needs_no_room_of_its_own_for_it(scheduler: str) -> None:
    """12 usable blocks: a second prompt of 9 would not fit beside the first one."""
    prompt = list(range(33))
    seats = {}
    for prefix_cache in (False, True):
        cfg = config(
            scheduler, max_model_len=48, max_num_batched_tokens=48, prefix_cache=prefix_cache, max_num_seqs=8
        )
        d = Driver(cfg, 13)
        d.engine.add(Request(prompt, 6))
        d.step()
        for last in (101, 102, 103):
            d.engine.add(Request([*prompt[:32], last], 3))
        d.step()
        seats[prefix_cache] = len(d.engine.scheduler.running)
        d.run()
        assert d.answers()[2] == answer([*prompt[:32], 102], 3)
    assert seats == {False: 1, True: 4}


def test_the_watermark_counts_what_can_be_evicted_as_free() -> None:
    """9 of 10 usable blocks are cached: somebody may still come in above a watermark of half the pool."""
    cfg = config(
        "continuous", max_model_len=40, max_num_batched_tokens=40, kv_watermark=0.5, prefix_cache=True
    )
    d = Driver(cfg, 11)
    d.add(36, 1)
    d.run()
    assert d.engine.stats().kv_cached == 9
    d.add(3, 9)
    d.add(7, 9)
    d.step()
    assert len(d.engine.scheduler.running) == 2
    d.add(9, 7)  # would leave 4 blocks
    d.step()
    assert len(d.engine.scheduler.running) == 2
    d.run()


@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked"])
@pytest.mark.parametrize("num_host_blocks", [0, 3, 50])
def test_an_abort_at_any_step_gives_everything_back(scheduler: str, num_host_blocks: int) -> None:
    requests = [(9, 7), (9, 5), (3, 9)]
    total = 60
    for victim in range(len(requests)):
        for at in range(total):
            d = Driver(
                config(scheduler, max_model_len=24, preempt_every=2, **ON), 9, num_host_blocks=num_host_blocks
            )
            ids = [
                d.engine.add(
                    Request([*range(8), *range(1000 * i, 1000 * i + p - 8)] if p > 8 else [7] * p, n)
                )
                for i, (p, n) in enumerate(requests)
            ]
            tick = 0
            while d.engine.has_work:
                if tick == at:
                    d.engine.abort(ids[victim])
                    d.engine.abort(ids[victim])
                    d.engine.check_integrity()
                d.step()
                tick += 1
            total = min(total, tick + 1)
            stats = d.engine.stats()
            assert (stats.kv_live, d.engine.scheduler.preemption.host.num_free) == (0, num_host_blocks)
            others = [i for i in ids if i != ids[victim]]
            assert [len(d.answers()[i]) for i in others] == [requests[i][1] for i in others]


def test_the_engine_that_falls_idle_looks_at_the_host_as_well() -> None:
    d = Driver(config("continuous", **ON), num_host_blocks=3)
    d.add(3, 2)
    d.step()
    d.engine.scheduler.preemption.host._free.pop()
    with pytest.raises(IntegrityError, match="1 blocks of the host are held by no request"):
        d.engine.step()
