"""Strategies: one small file each. They import no torch, no asyncio and no clock."""

from __future__ import annotations

from engines.config import EngineConfig
from engines.kv_pool import BlockPool
from engines.preemption import RecomputeNewest
from engines.queue import FcfsQueue
from engines.reservation import build as build_reservation
from engines.schedulers.base import Scheduler
from engines.schedulers.chunked import ChunkedScheduler
from engines.schedulers.continuous import ContinuousScheduler
from engines.schedulers.static import StaticScheduler

SCHEDULERS: dict[str, type[Scheduler]] = {
    "static": StaticScheduler,
    "continuous": ContinuousScheduler,
    "chunked": ChunkedScheduler,
}


def build(config: EngineConfig, pool: BlockPool) -> Scheduler:
    """The scheduler that the configuration names, with the objects for its other decisions."""
    cls = SCHEDULERS[config.scheduler]
    return cls(config, pool, FcfsQueue(), build_reservation(config), RecomputeNewest())
