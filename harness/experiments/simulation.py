"""A schedule in virtual time (engines/virtual.py), and what a pass costs there.

For experiments in which counts matter (batches, waste, preemptions) and time only has to be in proportion.
The same schedule gives the same figures on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.request import Request
from engines.virtual import Log, play
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


def simulate(config: EngineConfig, schedule: Iterable[ScheduledRequest], cost: Cost | None = None) -> Log:
    """Replay a schedule, until its last answer is out. Nobody hangs up. `config` names its pool
    (num_kv_blocks)."""
    if config.num_kv_blocks is None:
        raise ValueError("a simulation needs engine.num_kv_blocks")
    due = [(r.arrival_s, as_request(r)) for r in sorted(schedule, key=lambda r: r.arrival_s)]
    return play(config, config.num_kv_blocks, due, cost or Cost())


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
