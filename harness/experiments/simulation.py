"""The engine in virtual time: its own loop, scheduler and KV pool, over a model that only takes time.

For experiments in which counts matter (batches, waste, preemptions) and time only has to be in proportion.
The same schedule gives the same figures on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engines.batch import Copies, RaggedBatch, StepResult
from engines.config import EngineConfig
from engines.engine import Engine
from engines.request import Request
from engines.step_log import RequestRecord, StepRecord
from workloads.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a pass: `step` for any, `row` for each row in it (a sequence, or pads before one), `token`
    for each token beyond a row's first. The defaults are about those of model=tiny, float32, on one core."""

    step: float = 0.0045
    row: float = 0.0003
    token: float = 0.0001

    def __call__(self, rows: int, tokens: int) -> float:
        return self.step + self.row * rows + self.token * (tokens - rows)


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


def simulate(config: EngineConfig, schedule: Iterable[ScheduledRequest], cost: Cost | None = None) -> Log:
    """Replay a schedule, until its last answer is out. Nobody hangs up. `config` names its pool
    (num_kv_blocks)."""
    if config.num_kv_blocks is None:
        raise ValueError("a simulation needs engine.num_kv_blocks")
    clock, log = Clock(), Log()
    engine = Engine(
        config,
        VirtualRunner(clock, cost or Cost()),
        num_kv_blocks=config.num_kv_blocks,
        clock=clock,
        step_log=log,  # type: ignore[arg-type]
    )
    due = [(r.arrival_s, as_request(r)) for r in sorted(schedule, key=lambda r: r.arrival_s)]
    due.reverse()
    while due or engine.has_work:
        while due and due[-1][0] <= clock.now:
            at, request = due.pop()
            engine.add(request, at)
        wakeup = engine.next_wakeup(clock.now)
        if wakeup is not None and wakeup <= clock.now:
            engine.step()
        else:
            clock.now = min(time for time in (wakeup, due[-1][0] if due else None) if time is not None)
    return log


def as_request(planned: ScheduledRequest) -> Request:
    """Tokens are the numbers of their segment, so that prompts which share one share its tokens."""
    prompt = [
        token
        for segment, count in planned.segments
        for token in range(_start(segment), _start(segment) + count)
    ]
    return Request(
        prompt,
        planned.max_tokens,
        stop_after=planned.stop_after,
        label={"run": "simulation", "id": planned.id, "attempt": 1},
        tenant=planned.tenant,
        request_class=planned.request_class,
        priority=planned.priority,
        deadline_ms=planned.deadline_ms,
    )


def _start(segment: str) -> int:
    """Where the tokens of a segment begin: another place for every name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(segment.encode(), digest_size=7).digest(), "big")
