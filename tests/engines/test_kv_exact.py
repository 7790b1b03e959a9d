"""The real runner on the CPU in float32: sharing KV, putting it away and bringing it back changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.batch import Copies
from engines.config import ConfigError, EngineConfig
from engines.engine import Engine
from engines.model.invariance import BITWISE
from engines.request import Request, SamplingParams
from engines.runner import ModelRunner, build_runner, host_blocks
from tests.support.engine_driver import MemoryLog, config

# isort: split
import torch

LIMITS: dict[str, Any] = {
    "max_num_seqs": 5,
    "max_num_batched_tokens": 512,
    "max_model_len": 96,
    "reservation": "on_demand",
    "threads": 1,
}
MODEL = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}
SMALL_POOL = {16: 14, 4: 50}  # blocks: fewer than five sequences need

# (prefix, tokens of it, own tokens, answer): two families, ends at and around block borders
REQUESTS = [(0, 48, 3, 17), (0, 48, 16, 9), (0, 40, 1, 24), (1, 33, 7, 12), (0, 48, 3, 21), (1, 32, 0, 16)]
REQUESTS += [(1, 20, 30, 20), (0, 64, 1, 1), (1, 33, 8, 25), (0, 16, 0, 30)]


def runner_of(**changes: Any) -> ModelRunner:
    cfg = config("continuous", **{**LIMITS, "block_size": 16, "num_kv_blocks": 60, **changes})
    runner = build_runner(MODEL, cfg, device="cpu", dtype="float32", seed=0)
    if runner.info()["determinism"] != BITWISE:
        pytest.skip(f"no exact comparison on this machine: {runner.info()['determinism']}")
    return runner


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[int, ModelRunner]]:
    """By block size; 12 blocks of 16 fit the host, or 48 of 4."""
    host = 12 * 16 * bytes_per_token() / 1e9
    found = {
        16: runner_of(preemption="swap", swap_memory_gb=host),
        4: runner_of(block_size=4, num_kv_blocks=240, preemption="swap", swap_memory_gb=host),
    }
    yield found
    for runner in found.values():
        runner.close()


def bytes_per_token() -> int:
    runner = runner_of(num_kv_blocks=2)
    size = runner.info()["kv_bytes"] // (2 * 16)
    runner.close()
    return size


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, 256, (2, 64))
    return [
        [*prefixes[family, :shared].tolist(), *rng.integers(0, 256, own).tolist()]
        for family, shared, own, _ in REQUESTS
    ]


def generate(
    runner: ModelRunner, cfg: EngineConfig, blocks: int, sampling: SamplingParams
) -> tuple[list[list[int]], Engine]:
    engine = Engine(
        cfg,
        runner,
        num_kv_blocks=blocks,
        num_host_blocks=runner.num_host_blocks,
        step_log=MemoryLog(),  # type: ignore[arg-type]
        seed=5,
    )
    answers: dict[int, list[int]] = {}
    todo = list(zip(prompts(), REQUESTS, strict=True))
    for _ in range(2000):
        if todo:
            prompt, (_, _, _, max_tokens) = todo.pop(0)
            answers[engine.add(Request(prompt, max_tokens, sampling))] = []
        elif not engine.has_work:
            return list(answers.values()), engine
        for output in engine.step():
            assert output.error is None
            answers[output.seq_id] += output.token_ids
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def alone(runners: dict[int, ModelRunner], sampling: SamplingParams) -> list[list[int]]:
    """Nothing shared, nobody preempted, one at a time."""
    cfg = config("continuous", **{**LIMITS, "max_num_seqs": 1, "block_size": 16})
    return generate(runners[16], cfg, 60, sampling)[0]


@pytest.fixture(scope="module")
def plain(runners: dict[int, ModelRunner]) -> list[list[int]]:
    return alone(runners, SamplingParams())


def variant(scheduler: str, prefix_cache: bool, preemption: str, block_size: int) -> EngineConfig:
    changes = {"prefix_cache": prefix_cache, "preemption": preemption, "block_size": block_size}
    return config(scheduler, **{**LIMITS, **changes, "prefill_chunk_size": 13, "preempt_every": 5})


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked"])
def test_the_same_tokens_whatever_becomes_of_the_kv(
    runners: dict[int, ModelRunner],
    plain: list[list[int]],
    scheduler: str,
    prefix_cache: bool,
    preemption: str,
    block_size: int,
) -> None:
    cfg = variant(scheduler, prefix_cache, preemption, block_size)
    answers, engine = generate(runners[block_size], cfg, SMALL_POOL[block_size], SamplingParams())
    assert answers == plain
    assert len({token for tokens in answers for token in tokens}) > 20, "a model that says one thing"
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.prefix_cache_hits > 0) == prefix_cache
    assert (stats.swapped_out > 0) == (preemption == "swap")
    if preemption == "recompute" and not prefix_cache:
        assert stats.recomputed_tokens > 0


def test_sampled_tokens_as_well(runners: dict[int, ModelRunner]) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    expected = alone(runners, sampling)
    for preemption in ("recompute", "swap"):
        cfg = variant("chunked", True, preemption, 16)
        answers, engine = generate(runners[16], cfg, SMALL_POOL[16], sampling)
        assert answers == expected
        assert engine.stats().preemptions > 0


@torch.inference_mode()
def test_a_block_comes_back_as_it_was(runners: dict[int, ModelRunner]) -> None:
    runner = runners[16]
    for cache in runner._caches:
        cache.normal_()
    before = [cache.clone() for cache in runner._caches]
    runner.copy(Copies(out=((3, 0), (7, 11)), back=()))
    for cache in runner._caches:
        cache[3:8] = 0
    runner.copy(Copies(out=((9, 5),), back=((11, 7), (0, 4))))
    for cache, old in zip(runner._caches, before, strict=True):
        assert (cache[7] == old[7]).all()
        assert (cache[4] == old[3]).all()
        assert (cache[9] == old[9]).all()
        assert not cache[3].any()
    with pytest.raises(IndexError):
        runner.copy(Copies(out=((3, runner.num_host_blocks),), back=()))


def test_host_memory_is_refused_when_it_cannot_be_had() -> None:
    for size, words in ((1e-9, "needs at least one block"), (1e6, "GB are free")):
        cfg = config("continuous", preemption="swap", swap_memory_gb=size)
        with pytest.raises(ConfigError, match="engine.swap_memory_gb=.*" + words):
            host_blocks(cfg, 1024)
    assert host_blocks(config("continuous", preemption="swap", swap_memory_gb=1e-3), 1000) == 250
    assert host_blocks(config("continuous", swap_memory_gb=1e6), 1024) == 0
