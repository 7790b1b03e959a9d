"""An engine that is as busy as a server under load, for the benches: every seat taken, more waiting than fit,
and a model that takes no time, so that what is left is the host's own work."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from omegaconf import OmegaConf

import engines.engine
from engines.batch import Copies, RaggedBatch, StepResult
from engines.config import EngineConfig
from engines.engine import Engine
from engines.request import Request
from harness.conf import choices, compose

PROMPT, ANSWER, BLOCK = 64, 256, 16
"""Tokens of a prompt; answers have 1 to ANSWER."""


class NoModel:
    def run(self, batch: RaggedBatch) -> StepResult:
        return StepResult(np.zeros(len(batch.sample_rows), dtype=np.int64))

    def copy(self, copies: Copies) -> None:
        pass


def presets() -> list[str]:
    return [name for name in choices("engine") if name != "openai"]


def num_kv_blocks(running: int) -> int:
    """For so many of the longest and a few more: nobody is preempted, in any preset."""
    return 1 + (running + 64) * -(-(PROMPT + ANSWER) // BLOCK)


def token_budget(running: int) -> int:
    return max(65536, running * (PROMPT + ANSWER))


def preset_config(preset: str, running: int) -> EngineConfig:
    """The preset with `running` seats."""
    limits = [
        f"engine.max_num_seqs={running}",
        f"engine.max_num_batched_tokens={token_budget(running)}",
        f"engine.max_model_len={PROMPT + ANSWER}",
        f"engine.block_size={BLOCK}",
        f"engine.num_kv_blocks={num_kv_blocks(running)}",
    ]
    if preset == "dynamic":
        limits.append(f"engine.policy.preferred_batch_sizes=[{running}]")
    node: Any = OmegaConf.to_container(compose([f"engine={preset}", *limits]).engine)
    return EngineConfig.from_mapping(node)


_lengths = random.Random(7)


def top_up(engine: Engine, waiting: int, lengths: random.Random = _lengths) -> None:
    while len(engine.scheduler.waiting) < waiting:
        engine.add(Request([1] * PROMPT, lengths.randint(1, ANSWER), ignore_eos=True))


def busy_engine(
    preset: str, running: int, waiting: int, runner: Any = None, lengths: random.Random = _lengths
) -> Engine:
    """After its first iteration, in which all seats are taken."""
    config = preset_config(preset, running)
    engine = Engine(config, runner or NoModel(), num_kv_blocks=config.num_kv_blocks or 0)
    top_up(engine, running + waiting, lengths)
    engine.step()
    return engine


class Stopwatch:
    """Adds up the CPU seconds that the engine spends in its parts."""

    def __init__(self, engine: Engine) -> None:
        self.spent: Counter[str] = Counter()
        self._assemble = engines.engine.assemble
        engine.scheduler.schedule = self._timed("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
        engine.scheduler.published = self._timed("publish", engine.scheduler.published)  # type: ignore[method-assign]
        engine._publish = self._timed("publish", engine._publish)  # type: ignore[method-assign]
        engine._dismiss = self._timed("publish", engine._dismiss)  # type: ignore[method-assign]
        engines.engine.assemble = self._timed("assemble", self._assemble)

    def stop(self) -> None:
        engines.engine.assemble = self._assemble

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args)
            finally:
                self.spent[part] += time.thread_time() - begin  # type: ignore[assignment]

        return call
