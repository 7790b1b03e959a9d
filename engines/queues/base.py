"""Who is next: the order of the sequences that have no seat.

An order is a key per sequence, smaller first, that stays the same while the sequence waits. It ends with
seq_id, so it is total: of two equal requests the earlier one is served first, and one that lost its seat
comes back in front of every later arrival of the same urgency (vLLM V1 keeps the same promise)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from engines.sequence import Sequence, Status

Key = tuple[Any, ...]


class WaitingQueue(ABC):
    """What a scheduler and the engine ask of any queue."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Sequence]] = []
        self._keys: dict[int, Key] = {}  # by seq_id, of those that wait

    @abstractmethod
    def key(self, seq: Sequence) -> Key:
        """Its place, smaller first; ends with seq_id. Also the order in which `least_urgent` takes seats
        away, last first."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of service."""
        return (seq for _, seq in self._entries)

    @property
    def head(self) -> Sequence:
        return self._entries[0][1]

    def push(self, seq: Sequence) -> None:
        """It arrives, or it has lost its seat."""
        key = self._keys[seq.seq_id] = self.key(seq)
        insort(self._entries, (key, seq), key=lambda entry: entry[0])

    def remove(self, seq: Sequence) -> None:
        """Nothing happens if it is not here."""
        key = self._keys.pop(seq.seq_id, None)
        if key is not None:
            del self._entries[bisect_left(self._entries, key, key=lambda entry: entry[0])]

    def served(self, seq: Sequence, num_tokens: int) -> None:  # noqa: B027  (only fair shares count)
        """The pass has computed `num_tokens` of it."""

    def hopeless(self, now: float) -> list[Sequence]:
        """Those that cannot make their deadline any more, whatever happens: the engine ends them."""
        return []

    def overdue(self, now: float, timeout: float) -> list[Sequence]:
        """Those that have waited for `timeout` seconds without ever being scheduled."""
        return [seq for seq in self if seq.status is Status.WAITING and seq.arrival + timeout <= now]

    def next_overdue(self, timeout: float) -> float | None:
        """When the first of them will have, if it is not scheduled before."""
        return min((seq.arrival + timeout for seq in self if seq.status is Status.WAITING), default=None)
