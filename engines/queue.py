"""Who is next: first come, first served, with preempted sequences in front."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engines.sequence import Sequence, Status


class FcfsQueue:
    """Sequences without a seat. A preempted one came before everyone who waits: its place is in front."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def head(self) -> Sequence:
        return next(iter(self._waiting.values()))

    def push(self, seq: Sequence) -> None:
        self._waiting[seq.seq_id] = seq

    def push_front(self, seq: Sequence) -> None:
        self.push(seq)
        self._waiting.move_to_end(seq.seq_id, last=False)

    def remove(self, seq: Sequence) -> None:
        """Nothing happens if it is not here."""
        self._waiting.pop(seq.seq_id, None)

    def overdue(self, now: float, timeout: float) -> list[Sequence]:
        """Those that have waited for `timeout` seconds without ever being scheduled."""
        return [seq for seq in self if seq.status is Status.WAITING and seq.arrival + timeout <= now]

    def next_overdue(self, timeout: float) -> float | None:
        """When the first of them will have, if it is not scheduled before."""
        return min((seq.arrival + timeout for seq in self if seq.status is Status.WAITING), default=None)
