"""Canaries: does KV ever cross? (ROCm/ATOM PR#2028: under a small pool, requests drifted into another one's
context after preemption, and no comparison of greedy answers could show it.)

Each tenant counts in a range of its own, from the number that its prompt ends with. The model says the number
after the one that it reads in its KV, at every position: a number of another range is somebody else's KV, a
jump is KV that was lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engines.batch import RaggedBatch
from engines.request import Request
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import MockRunner

RANGE = 1_000_000
TENANTS = 4
PREFIX = 9  # tokens that all requests of a tenant begin with


class CountingRunner(MockRunner):
    """What it reads of a sequence has to be a prefix and then a count, all of one range; it counts on."""

    def _next(self, batch: RaggedBatch, row: int, i: int) -> int:
        super()._next(batch, row, i)  # the positions are right
        positions = np.arange(int(batch.kv_len[row]))
        blocks = batch.block_table[row, positions // self.block_size].astype(np.int64)
        seen = self.tokens[blocks * self.block_size + positions % self.block_size]
        assert len(set(seen // RANGE)) == 1, f"KV of another tenant: {seen}"
        assert (np.diff(seen[PREFIX:]) == 1).all(), f"context was lost: {seen}"
        return int(seen[-1]) + 1


def prompt(tenant: int, number: int, length: int) -> list[int]:
    """The tenant's prefix, and `length` numbers from a start of the request's own."""
    start = tenant * RANGE + 1000 * (number + 1)
    return [*range(tenant * RANGE, tenant * RANGE + PREFIX), *range(start, start + length)]


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix_cache": {"prefix_cache": True},
    "salted": {"prefix_cache": True, "prefix_cache_salt": "tenant"},
    "swap": {"preemption": "swap"},
    "both": {"prefix_cache": True, "preemption": "swap"},
    "both_forced": {"prefix_cache": True, "preemption": "swap", "preempt_every": 3},
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", CHANGES)
def test_everybody_counts_in_his_own_range(scheduler: str, name: str) -> None:
    cfg = config(
        scheduler,
        max_num_seqs=6,
        max_model_len=48,
        max_num_batched_tokens=96,
        reservation="on_demand",
        pad_finished=False,  # what an ended row reads is for nobody
        **CHANGES[name],
    )
    d = Driver(cfg, num_kv_blocks=20, num_host_blocks=7)
    runner = CountingRunner(20, cfg.block_size)
    d.engine.runner = runner
    rng = np.random.default_rng(0)
    starts: dict[int, tuple[int, int]] = {}
    for number in range(64):
        tenant, length = number % TENANTS, int(rng.integers(1, 12))
        tokens, limit = prompt(tenant, number, length), int(rng.integers(1, 27))
        seq_id = d.engine.add(Request(tokens, limit, tenant=str(tenant)))
        starts[seq_id] = tokens[-1] + 1, limit
        if number % 7 == 6:
            d.engine.abort(int(rng.integers(0, seq_id + 1)))
        for _ in range(int(rng.integers(0, 4))):
            d.step()
    d.run()
    assert not [output.error for output in d.outputs if output.error]
    reasons = d.reasons()
    answers = d.answers()
    for seq_id, (start, limit) in starts.items():
        got = answers[seq_id]
        assert got == list(range(start, start + len(got)))
        assert len(got) == limit or reasons[seq_id] == "abort"
    stats = d.engine.stats()
    assert (stats.prefix_cache_hits > 0) == ("prefix_cache" in CHANGES[name])
    if scheduler in ("continuous", "chunked", "prefill_first"):
        assert stats.preemptions > 0
        assert (stats.swapped_out > 0) == ("preemption" in CHANGES[name])
