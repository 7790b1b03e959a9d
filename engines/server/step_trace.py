"""The last step plans, for a look after an incident: a ring in the engine's process, read through
/debug/steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from engines.plan import Kind

if TYPE_CHECKING:  # the server reads MOST, and does without pyarrow
    from engines.step_log import StepRecord

MOST = 10_000
"""Steps that are kept: at 256 sequences each about 60 MB, at 16 about 5."""
PIECE = 250
"""Steps that are told at once, so that a long dump holds up an iteration for milliseconds only."""


class StepTrace:
    """Numbers steps from 0 over all routes; a step's own `step` counts within its route."""

    def __init__(self, most: int = MOST) -> None:
        self._ring: deque[tuple[str, StepRecord]] = deque(maxlen=most)
        self._next = 0

    def add(self, route: str, record: StepRecord) -> None:
        self._ring.append((route, record))
        self._next += 1

    def piece(self, first: int | None, last: int) -> dict[str, Any]:
        """Up to PIECE steps from number `first` on, or, where it is None, from the last `last` ones on; and
        the number that comes next, or None."""
        oldest = self._next - len(self._ring)
        start = max(oldest, self._next - last if first is None else first)
        end = min(self._next, start + PIECE)
        steps = [self._shown(self._ring[at - oldest]) for at in range(start, end)]
        return {"steps": steps, "next": end if end < self._next else None}

    @staticmethod
    def _shown(entry: tuple[str, StepRecord]) -> dict[str, Any]:
        route, record = entry
        return {
            "route": route,
            "step": record.step,
            "start_ns": record.start_ns,
            "duration_ns": record.duration_ns,
            "ids": record.ids,
            "tokens": record.tokens,
            "kind": [Kind(kind).name.lower() for kind in record.kind],
            "preempted": record.preempted,
            "running": record.running,
            "waiting": record.waiting,
            "head_blocked_by": record.blocked,
            "kv_live": record.kv_live,
            "kv_cached": record.kv_cached,
            "kv_free": record.kv_free,
        }
