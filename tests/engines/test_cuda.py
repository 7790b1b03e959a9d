"""On a machine with a GPU the runner agrees with the one on the CPU. The check to run there is
`python -m pytest tests/engines/test_cuda.py`; elsewhere it is skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engines.batch import Copies
from engines.engine import Engine
from engines.request import Request
from engines.runner import build_runner
from tests.support.engine_driver import config

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

MODEL = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}
LIMITS = {"max_num_seqs": 8, "max_model_len": 256, "block_size": 16, "num_kv_blocks": 200, "threads": 1}


def answers(scheduler: str, device: str, dtype: str = "float32", **changes: Any) -> dict[int, list[int]]:
    budget = 256 if scheduler == "continuous" else 48
    cfg = config(scheduler, **LIMITS, max_num_batched_tokens=budget, **changes)
    runner = build_runner(MODEL, cfg, device=device, dtype=dtype, seed=0)
    host = runner.num_host_blocks
    engine = Engine(cfg, runner, num_kv_blocks=runner.num_kv_blocks, num_host_blocks=host)
    rng = np.random.default_rng(0)
    found: dict[int, list[int]] = {}
    for length in (1, 16, 17, 90, 200, 33):
        found[engine.add(Request(rng.integers(0, 256, length).tolist(), 12))] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.seq_id] += output.token_ids
    engine.check_integrity()
    runner.close()
    return found


@pytest.mark.parametrize("scheduler", ["continuous", "chunked"])
def test_greedy_tokens_in_float32_are_those_of_the_cpu(scheduler: str) -> None:
    here, there = answers(scheduler, "cpu"), answers(scheduler, "cuda")
    assert [len(tokens) for tokens in there.values()] == [12] * 6
    # The two add in another order: a near tie may fall the other way late in an answer, not at its start.
    assert [tokens[0] for tokens in here.values()] == [tokens[0] for tokens in there.values()]
    same = sum(a == b for seq in here for a, b in zip(here[seq], there[seq], strict=True))
    assert same >= 0.9 * 72


def test_bfloat16_runs_to_the_end() -> None:
    assert all(len(tokens) == 12 for tokens in answers("chunked", "cuda", "bfloat16").values())


@torch.inference_mode()
def test_blocks_go_to_pinned_memory_and_come_back() -> None:
    cfg = config("continuous", **LIMITS, max_num_batched_tokens=256, preemption="swap", swap_memory_gb=0.01)
    runner = build_runner(MODEL, cfg, device="cuda", dtype="float32", seed=0)
    assert all(cache.is_pinned() for cache in runner._host_caches)
    for cache in runner._caches:
        cache.normal_()
    before = [cache.clone() for cache in runner._caches]
    runner.copy(Copies(out=((3, 0), (7, 11)), back=()))
    for cache in runner._caches:
        cache[1:9] = 0
    runner.copy(Copies(out=(), back=((11, 7), (0, 4))))
    for cache, old in zip(runner._caches, before, strict=True):
        assert (cache[7] == old[7]).all()
        assert (cache[4] == old[3]).all()
    runner.close()


@pytest.mark.parametrize("changes", [{"preemption": "swap"}, {"prefix_cache": True}])
def test_preempted_or_shared_it_answers_alike(changes: dict[str, Any]) -> None:
    plain = answers("continuous", "cuda")
    assert answers("continuous", "cuda", **changes, preempt_every=4) == plain
