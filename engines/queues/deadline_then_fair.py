"""Fair shares, except for those that would miss their deadline by it.

    1. those that had a seat, as in `fair`
    2. by deadline: requests that would miss theirs if they started later than margin_ms from now, unless
       their tenant has had more than ahead_tokens over the smallest counter
    3. everyone else, as in `fair`
    before each iteration: end those that cannot make their deadline any more, as in `deadline`

Who is served early is charged all the same, so its tenant pays later; who writes short deadlines on
everything gains ahead_tokens at most, once.

Bound: that of `fair` plus ahead_tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engines.deadlines import Deadlines, DropSettings, LeastTime
from engines.queues.fair import FairQueue, FairSettings
from engines.sequence import Sequence


@dataclass(frozen=True)
class DeadlineThenFairSettings(FairSettings, DropSettings):
    margin_ms: float = 500.0
    ahead_tokens: float = 8192.0  # at weight 1

    def __post_init__(self) -> None:
        FairSettings.__post_init__(self)
        DropSettings.__post_init__(self)
        for name in ("margin_ms", "ahead_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: needs 0 or more")


class DeadlineThenFairQueue(FairQueue):
    Settings = DeadlineThenFairSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._least = LeastTime(self.settings)
        self._lost = Deadlines(self._least)
        self._pressing = Deadlines(self._least, self.settings.margin_ms / 1e3)
        self._urgent: list[tuple[float, int, Sequence]] = []  # by deadline

    def __iter__(self) -> Iterator[Sequence]:
        yield from [seq for _, seq in self._entries]
        charged: dict[str, float] = {}
        had: set[int] = set()
        most = self._shares.least() + self.settings.ahead_tokens
        for _, _, seq in list(self._urgent):
            if self._shares.of(seq.tenant) + charged.get(seq.tenant, 0.0) <= most:
                cost = self._prompt_cost(seq)
                had.add(seq.seq_id)
                charged[seq.tenant] = charged.get(seq.tenant, 0.0) + cost
                yield seq
        yield from self._by_share(charged, had)

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        if seq.deadline is not None and seq.seq_id not in self._started:
            self._lost.push(seq, seq.deadline)
            self._pressing.push(seq, seq.deadline)

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        place = bisect_left(self._urgent, (seq.deadline or 0.0, seq.seq_id), key=lambda urgent: urgent[:2])
        if place < len(self._urgent) and self._urgent[place][2] is seq:
            del self._urgent[place]

    def passed(self, num_tokens: int, seconds: float) -> None:
        self._least.passed(num_tokens, seconds)

    def hopeless(self, now: float) -> list[Sequence]:
        for seq in self._pressing.late(now):
            assert seq.deadline is not None
            insort(self._urgent, (seq.deadline, seq.seq_id, seq))
        return self._lost.late(now) if self.settings.drop else []

    def next_hopeless(self) -> float | None:
        return self._lost.next() if self.settings.drop else None
