"""By priority, lower first, then by arrival (vLLM's scheduling_policy=priority).

    key = priority, arrival
    with aging_s: key = priority + arrival / aging_s, arrival

Who waits for aging_s seconds counts one level more urgent. Ageing is continuous: everyone's urgency grows at
the same speed, so the order of two requests never changes and one key, taken at arrival, is enough.

Bound: without aging_s none, since a stream of more urgent requests can keep the others waiting for ever. With
it, a request of priority p is overtaken by one of priority q < p only if that comes within (p - q) * aging_s
seconds after it: by a known number of requests, whatever the load."""

from __future__ import annotations

from dataclasses import dataclass

from engines.queues.base import Key, WaitingQueue
from engines.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrioritySettings:
    aging_s: float | None = None

    def __post_init__(self) -> None:
        if self.aging_s is not None and not self.aging_s > 0:
            raise ValueError(f"aging_s={self.aging_s}: needs seconds above 0, or null")


class PriorityQueue(WaitingQueue):
    Settings = PrioritySettings

    def key(self, seq: Sequence) -> Key:
        aging_s = self.settings.aging_s
        aged = 0.0 if aging_s is None else seq.arrival / aging_s
        return (seq.priority + aged, seq.seq_id)
