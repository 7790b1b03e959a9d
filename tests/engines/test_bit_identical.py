"""On the CPU in float32 the strategy changes when a token is computed and never which: every preset gives the
same greedy tokens bit for bit, whole prompts or chunks, alone or in a batch, preempted or not, computed again
or brought back from host memory. (test_kv_exact.py: block sizes and shared prefixes.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.config import EngineConfig
from engines.engine import Engine
from engines.model.invariance import BITWISE
from engines.request import Request, SamplingParams
from engines.runner import ModelRunner, build_runner
from tests.support.cases import PRESETS, small
from tests.support.checker import Checker
from tests.support.engine_driver import MemoryLog, config
from tests.support.promises import promises_of

LIMITS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 512,
    "max_model_len": 128,
    "block_size": 16,
    "threads": 1,
}
WHOLE_POOL = 6 * 8 + 1
SMALL_POOL = 8 + 1  # exactly what the longest sequence needs

# prompt and answer length: block borders, prompts longer than a chunk, and a prompt of one token
REQUESTS = [(1, 20), (15, 9), (16, 17), (17, 24), (32, 1), (33, 30), (90, 12), (100, 27), (7, 25), (64, 16)]

VARIANTS: dict[str, tuple[EngineConfig, int]] = {
    "static": (config("static", **LIMITS), WHOLE_POOL),
    "static_bare": (config("static", left_pad=False, pad_finished=False, drain=False, **LIMITS), WHOLE_POOL),
    "static_forced": (config("static", preempt_every=3, **LIMITS), WHOLE_POOL),
    "static_small": (config("static", reservation="on_demand", **LIMITS), SMALL_POOL),
    "continuous": (config("continuous", **LIMITS), WHOLE_POOL),
    "continuous_forced": (config("continuous", preempt_every=3, **LIMITS), WHOLE_POOL),
    "continuous_small": (config("continuous", **LIMITS), SMALL_POOL),
    "chunked": (config("chunked", **{**LIMITS, "max_num_batched_tokens": 24}), WHOLE_POOL),
    "chunked_pieces": (config("chunked", prefill_chunk_size=7, **LIMITS), WHOLE_POOL),
    "chunked_forced": (config("chunked", prefill_chunk_size=7, preempt_every=3, **LIMITS), WHOLE_POOL),
    "chunked_small": (config("chunked", **{**LIMITS, "max_num_batched_tokens": 24}), SMALL_POOL),
}

FORCED: dict[str, Any] = {"preempt_every": 4, "preempt_seed": 3, "block_size": 16}
DECISIONS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute", "prefix_cache": False},
    "swap": {"preemption": "swap", "prefix_cache": True, "victim": "least_urgent"},
}


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    model = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}
    cfg = config("continuous", num_kv_blocks=WHOLE_POOL, preemption="swap", swap_memory_gb=1e-2, **LIMITS)
    runner = build_runner(model, cfg, device="cpu", dtype="float32", seed=0)
    if runner.info()["determinism"] != BITWISE:
        pytest.skip(f"no exact comparison on this machine: {runner.info()['determinism']}")
    yield runner
    runner.close()


def generate(
    runner: ModelRunner, cfg: EngineConfig, blocks: int, sampling: SamplingParams, requests: int | None = None
) -> tuple[dict[int, list[int]], Engine, MemoryLog]:
    log = MemoryLog()
    engine = Engine(
        cfg,
        runner,
        num_kv_blocks=blocks,
        num_host_blocks=runner.num_host_blocks,
        step_log=log,  # type: ignore[arg-type]
        seed=5,
    )
    checker = Checker(engine, log, promises_of(engine))
    rng = np.random.default_rng(0)
    answers: dict[int, list[int]] = {}
    for prompt_len, max_tokens in REQUESTS[:requests]:
        prompt = rng.integers(0, 256, prompt_len).tolist()
        answers[engine.add(Request(prompt, max_tokens, sampling))] = []
    for _ in range(2000):
        if not engine.has_work:
            return answers, engine, log
        before = checker.before()
        outputs = engine.step()
        checker.after(before, outputs)
        for output in outputs:
            answers[output.seq_id] += output.token_ids
    raise AssertionError("the engine does not come to an end")


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[int, list[int]]:
    """Every request in a batch of its own."""
    cfg = config("continuous", **{**LIMITS, "max_num_seqs": 1})
    answers, _, _ = generate(runner, cfg, WHOLE_POOL, SamplingParams())
    assert [len(answers[i]) for i in range(len(REQUESTS))] == [n for _, n in REQUESTS]
    assert len({token for tokens in answers.values() for token in tokens}) > 20, "a model that says one thing"
    return answers


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_those_of_a_request_alone(
    runner: ModelRunner, alone: dict[int, list[int]], name: str
) -> None:
    cfg, blocks = VARIANTS[name]
    answers, engine, log = generate(runner, cfg, blocks, SamplingParams())
    assert answers == alone

    stats = engine.stats()
    preempted = name.endswith(("_forced", "_small"))
    assert (stats.preemptions > 0) == (stats.recomputed_tokens > 0) == preempted
    assert stats.prefill_tokens == sum(s.prefill_tokens for s in log.steps) == sum(p for p, _ in REQUESTS)
    assert stats.decode_tokens == sum(s.decode_tokens for s in log.steps) == sum(n - 1 for _, n in REQUESTS)
    assert (stats.ended_rows > 0) == (stats.left_pad_tokens > 0)
    assert (stats.left_pad_tokens > 0) == (cfg.scheduler == "static" and cfg.left_pad)


@pytest.mark.parametrize("preemption", DECISIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_in_a_small_pool_with_preemptions_at_random(
    runner: ModelRunner, alone: dict[int, list[int]], name: str, preemption: str
) -> None:
    cfg = small(name, **{**LIMITS, **FORCED, **DECISIONS[preemption]})
    answers, engine, _ = generate(runner, cfg, SMALL_POOL + 2, SamplingParams(), requests=6)
    assert answers == {seq_id: alone[seq_id] for seq_id in range(6)}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.swapped_out > 0) == (preemption == "swap")
    assert stats.recomputed_tokens > 0 or preemption == "swap"


@pytest.mark.parametrize("name", ["static_small", "continuous_forced", "chunked_forced"])
def test_sampled_tokens_depend_on_the_seed_alone(runner: ModelRunner, name: str) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    plain, _, _ = generate(runner, *VARIANTS["continuous"], sampling)
    answers, engine, _ = generate(runner, *VARIANTS[name], sampling)
    assert engine.stats().preemptions > 0
    assert answers == plain


def test_useful_and_padded_tokens_of_the_static_batches(runner: ModelRunner) -> None:
    """6 and then 4 requests: pads fill every prompt up to 33 and to 100, ended rows every answer up to 30 and
    to 27."""
    _, engine, log = generate(runner, *VARIANTS["static"], SamplingParams())
    first, second = REQUESTS[:6], REQUESTS[6:]
    assert [s.num_seqs for s in log.steps if s.prefill_tokens] == [6, 4]
    assert len(log.steps) == 30 + 27
    stats = engine.stats()
    assert stats.left_pad_tokens == sum(33 - p for p, _ in first) + sum(100 - p for p, _ in second)
    assert stats.ended_rows == sum(30 - n for _, n in first) + sum(27 - n for _, n in second)
    assert stats.recomputed_tokens == 0
