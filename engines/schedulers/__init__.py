"""Strategies: one small file each, named by `engine.scheduler`. They import no torch, no asyncio and no
clock."""

from __future__ import annotations

from engines import plugins, preemption, queues, reservation
from engines.config import EngineConfig
from engines.kv_pool import BlockPool
from engines.schedulers.base import Scheduler


def names() -> list[str]:
    return plugins.names(__name__)


def scheduler_class(name: str) -> type[Scheduler]:
    """The scheduler of engines/schedulers/<name>.py, or of `package.module:Class`. Raises PluginError."""
    found: type[Scheduler] = plugins.find(name, __name__, Scheduler)
    return found


def build(config: EngineConfig, pool: BlockPool, num_host_blocks: int = 0) -> Scheduler:
    """The scheduler that the configuration names, with the objects for its other decisions.
    `num_host_blocks`: of host memory, for preemption=swap."""
    scheduler = scheduler_class(config.scheduler)
    waiting = queues.build(config, scheduler.whole_prompts)
    return scheduler(
        config, pool, waiting, reservation.build(config), preemption.build(config, waiting, num_host_blocks)
    )
