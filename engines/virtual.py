"""The engine in virtual time: its own loop, scheduler and KV pool, over a model that only takes time.

Nothing is computed, so the same arrivals give the same figures on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.batch import Copies, RaggedBatch, StepResult
from engines.config import EngineConfig
from engines.engine import Engine
from engines.request import Request
from engines.step_log import RequestRecord, StepRecord

Arrival = tuple[float, Request]
"""Seconds on the clock, and what comes then."""
Cost = Callable[[int, int], float]
"""Seconds of a pass of so many rows (sequences, or pads before one) and so many tokens."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualRunner:
    """Moves the clock and computes nothing. Pads and ended rows cost what any other token costs."""

    def __init__(self, clock: Clock, cost: Cost) -> None:
        self.clock = clock
        self.cost = cost

    def run(self, batch: RaggedBatch) -> StepResult:
        self.clock.now += self.cost(len(batch.kv_len), len(batch.token_ids))
        return StepResult(np.zeros(len(batch.sample_rows), dtype=np.int64))

    def copy(self, copies: Copies) -> None:
        pass


@dataclass
class Log:
    """Keeps in memory what StepLog writes."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def flush(self) -> None:
        pass


def play(config: EngineConfig, num_kv_blocks: int, arrivals: Sequence[Arrival], cost: Cost) -> Log:
    """`arrivals` in the order of their times, until the last answer is out. Nobody hangs up. Raises
    Refused."""
    clock, log = Clock(), Log()
    engine = Engine(
        config,
        VirtualRunner(clock, cost),
        num_kv_blocks=num_kv_blocks,
        clock=clock,
        step_log=log,  # type: ignore[arg-type]
    )
    left = list(reversed(arrivals))
    while left or engine.has_work:
        while left and left[-1][0] <= clock.now:
            at, request = left.pop()
            engine.add(request, at)
        wakeup = engine.next_wakeup(clock.now)
        if wakeup is not None and wakeup <= clock.now:
            engine.step()
        else:
            clock.now = min(time for time in (wakeup, left[-1][0] if left else None) if time is not None)
    return log
