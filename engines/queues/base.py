"""Who is next: the order of the sequences that have no seat.

A queue answers two questions. `in_turn`: who may enter this iteration, one after the other? `key`: which of
two sequences is more urgent, running ones included? (`least_urgent` takes a seat from the greatest key.)

In most orders both are one key that never changes while a sequence lives and that ends with seq_id, so that
it is total: of two equal requests the earlier one is served first, one that lost its seat comes back in front
of every later arrival of the same urgency (vLLM V1 keeps the same promise), and two sequences never evict
each other in turn. Orders in which urgency moves with time (`fair`) freeze it for whoever has had a seat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from engines.plan import Plan
from engines.sequence import Sequence, Status

Key = tuple[Any, ...]
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class NoSettings:
    """An order without settings of its own."""


class WaitingQueue(ABC):
    """What schedulers and the engine ask of any queue. A subclass gives `key`; one whose order moves with
    time also keeps its own entries (`push`, `remove`, `__iter__`)."""

    Settings: ClassVar[type[Any]] = NoSettings  # a frozen dataclass: the keys of engine.queue_policy

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = self.Settings() if settings is None else settings
        self._entries: list[tuple[Key, Sequence]] = []
        self._keys: dict[int, Key] = {}  # by seq_id, of those that wait
        self._new: OrderedDict[int, Sequence] = OrderedDict()  # that never had a seat, as they came

    @abstractmethod
    def key(self, seq: Sequence) -> Key:
        """How urgent it is, the smaller the more; a total order of all sequences, waiting or running."""

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of service. The one that was yielded last may leave the queue meanwhile."""
        i = 0
        while i < len(self._entries):
            entry = self._entries[i]
            yield entry[1]
            i += i < len(self._entries) and self._entries[i] is entry

    @property
    def head(self) -> Sequence:
        return next(iter(self))

    def in_turn(self, plan: Plan, partial: Iterable[Sequence] = ()) -> Iterator[Sequence]:
        """Whose prompt is next in this iteration: running ones that are partly computed (`partial`, in the
        order of their seats), then those that may enter. One that waits and has not been added to `plan` by
        the time that the next is asked for could not enter: nobody overtakes it."""
        yield from (seq for seq in partial if seq.status is Status.RUNNING)
        for seq in self:
            yield seq
            if not plan.ends_with(seq):
                return

    def budget(self, seq: Sequence, plan: Plan) -> int:
        """Prompt tokens of it that this iteration may still compute, as far as the queue has a say."""
        return NO_LIMIT

    # -- what it is told

    def push(self, seq: Sequence) -> None:
        """It arrives, or it has lost its seat."""
        self._note(seq)
        key = self._keys[seq.seq_id] = self.key(seq)
        insort(self._entries, (key, seq), key=_key_of)

    def remove(self, seq: Sequence) -> None:
        """It waits no longer. Nothing happens if it is not here."""
        self._new.pop(seq.seq_id, None)
        key = self._keys.pop(seq.seq_id, None)
        if key is not None:
            del self._entries[bisect_left(self._entries, key, key=_key_of)]

    def entered(self, seq: Sequence) -> None:
        """It has got a seat."""
        self.remove(seq)

    def gone(self, seq: Sequence) -> None:
        """It has ended, wherever it was. Harmless when repeated."""
        self.remove(seq)

    def served(self, seq: Sequence, num_tokens: int) -> None:  # noqa: B027  (only shares count)
        """The pass has computed `num_tokens` of it. It may be gone by now."""

    def passed(self, num_tokens: int, seconds: float) -> None:  # noqa: B027  (only deadlines need a speed)
        """A pass of `num_tokens` has taken so long."""

    # -- who must go

    def hopeless(self, now: float) -> list[Sequence]:
        """An iteration begins. Those that never had a seat and cannot make their deadline any more, whatever
        happens: the engine ends them."""
        return []

    def next_hopeless(self) -> float | None:
        """When `hopeless` has somebody next, if nobody enters before."""
        return None

    def overdue(self, now: float, timeout: float) -> list[Sequence]:
        """Those that have waited for `timeout` seconds without ever being scheduled."""
        return list(takewhile(lambda seq: seq.arrival + timeout <= now, self._new.values()))

    def next_overdue(self, timeout: float) -> float | None:
        """When the first of them will have, if it is not scheduled before."""
        return next((seq.arrival + timeout for seq in self._new.values()), None)

    def disorder(self) -> str | None:
        """What is wrong with the order, for the check of the engine's integrity."""
        keys = [self.key(seq) for seq in self]
        return None if keys == sorted(keys) else f"the queue is out of its order: {keys}"

    def _note(self, seq: Sequence) -> None:
        if seq.status is Status.WAITING:
            self._new[seq.seq_id] = seq


def _key_of(entry: tuple[Key, Sequence]) -> Key:
    return entry[0]
