"""Engines of the presets in harness/conf/engine, with or without limits small enough to follow by hand."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from engines.config import EngineConfig
from harness.conf import compose
from tests.support.engine_driver import Driver

SMALL = ["engine.max_num_seqs=3", "engine.max_model_len=16", "engine.block_size=4"]


def preset(name: str, *overrides: str, blocks: int = 100) -> Driver:
    """An engine of the preset. `blocks` are usable ones."""
    cfg = compose([f"engine={name}", *overrides])
    engine: Any = OmegaConf.to_container(cfg.engine)
    return Driver(EngineConfig.from_mapping(engine), num_kv_blocks=blocks + 1)


def small(name: str, *overrides: str, budget: int = 64, blocks: int = 100) -> Driver:
    return preset(name, *SMALL, f"engine.max_num_batched_tokens={budget}", *overrides, blocks=blocks)


def add(driver: Driver, *requests: tuple[int, int], **more: Any) -> None:
    for prompt_len, max_tokens in requests:
        driver.add(prompt_len, max_tokens, **more)


def live(driver: Driver) -> list[int]:
    return [step.kv_live for step in driver.log.steps]
