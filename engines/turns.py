"""Several engines behind one loop: they share the runner and take turns, a pass each. With one engine this is
that engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engines.engine import Engine
from engines.request import Output, Request
from engines.stats import QueueState, Stats
from engines.step_log import Ending


class Engines:
    """`engines` by route name, in the order in which routes are numbered. Their sequence ids must differ:
    give them one iterator of ids."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.by_name = dict(engines)
        self._all: Sequence[Engine] = list(engines.values())
        self._of: dict[int, Engine] = {}  # by seq_id, of those whose last output has not left
        self._turn = 0
        self.clock: Callable[[], float] = self._all[0].clock

    def add(self, request: Request, arrival: float | None = None, route: int = 0) -> int:
        """Raises Refused, and IndexError for a route that there is not."""
        engine = self._all[route]
        seq_id = engine.add(request, arrival)
        self._of[seq_id] = engine
        return seq_id

    def abort(self, seq_id: int, reason: str = "abort") -> None:
        if seq_id in self._of:
            self._of[seq_id].abort(seq_id, reason)

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._all)

    def next_wakeup(self, now: float) -> float | None:
        times = [t for engine in self._all if (t := engine.next_wakeup(now)) is not None]
        return min(times, default=None)

    def step(self) -> list[Output]:
        """One iteration of the next engine that has something to do."""
        now = self.clock()
        for _ in self._all:
            engine = self._all[self._turn]
            self._turn = (self._turn + 1) % len(self._all)
            wakeup = engine.next_wakeup(now)
            if wakeup is not None and wakeup <= now:
                outputs = engine.step()
                for output in outputs:
                    if output.finish_reason is not None:
                        self._of.pop(output.seq_id, None)
                return outputs
        return []

    def stats(self) -> Stats:
        """The sum over all."""
        total = self._all[0].stats()
        for engine in self._all[1:]:
            for name, value in vars(engine.stats()).items():
                mine = getattr(total, name)
                if isinstance(value, dict):
                    merged = {key: mine.get(key, 0) + value.get(key, 0) for key in {**mine, **value}}
                    setattr(total, name, merged)
                else:
                    setattr(total, name, mine + value)
        return total

    def queues(self) -> list[QueueState]:
        return [engine.queue_state() for engine in self._all]

    def set_limits(self, route: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """{name: {old, new}}. Raises ConfigError."""
        changed = self.by_name[route].set_limits(changes)
        return {name: asdict(change) for name, change in changed.items()}

    def limits(self) -> dict[str, dict[str, Any]]:
        return {name: engine.gate.limits for name, engine in self.by_name.items()}

    def end(self) -> list[Ending]:
        return [engine.end() for engine in self._all]
