"""Earliest deadline first (Liu and Layland, JACM 1973), and an end for whoever cannot make it.

    key = deadline (arrival + deadline_ms, when the last token is due), then arrival
    before each iteration: end those that never had a seat, if now + the least time they need > deadline

EDF meets every deadline that any order could, as long as there is no overload; under overload, serving what
is late already makes the next one late as well. Hence the drop: its time goes to those that can still make
it. The least time is measured (engines/deadlines.py). pace=fastest drops nobody who could have made it at the
speed of the fastest passes lately; pace=usual is a forecast and drops earlier. least_answer says how many
tokens an answer has at least.

Requests without a deadline come after those with one, by arrival, or get default_deadline_ms.

Bound: a request is overtaken only by those that come before its own deadline, since later ones are due later;
so it waits for a known number of requests or is dropped. Without a deadline and a default there is none."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from engines.deadlines import Deadlines, DropSettings, LeastTime
from engines.queues.base import Key, WaitingQueue
from engines.sequence import Sequence, Status


@dataclass(frozen=True)
class DeadlineSettings(DropSettings):
    default_deadline_ms: float | None = None  # orders those without one; they are not dropped

    def __post_init__(self) -> None:
        DropSettings.__post_init__(self)
        if self.default_deadline_ms is not None and not self.default_deadline_ms > 0:
            raise ValueError(f"default_deadline_ms={self.default_deadline_ms}: needs more than 0, or null")


class DeadlineQueue(WaitingQueue):
    Settings = DeadlineSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._least = LeastTime(self.settings)
        self._deadlines = Deadlines(self._least)

    def key(self, seq: Sequence) -> Key:
        default_ms = self.settings.default_deadline_ms
        if seq.deadline is not None:
            due = seq.deadline
        else:
            due = inf if default_ms is None else seq.arrival + default_ms / 1e3
        return (due, seq.seq_id)

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        if self.settings.drop and seq.deadline is not None and seq.status is Status.WAITING:
            self._deadlines.push(seq, seq.deadline)

    def passed(self, num_tokens: int, seconds: float) -> None:
        self._least.passed(num_tokens, seconds)

    def hopeless(self, now: float) -> list[Sequence]:
        return self._deadlines.late(now)

    def next_hopeless(self) -> float | None:
        return self._deadlines.next()
