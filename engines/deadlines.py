"""Which waiting requests run out of time: deadlines, and the least time that a request still needs."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, nextafter

from engines.sequence import Sequence, Status

PACES = ("fastest", "usual")


@dataclass(frozen=True)
class DropSettings:
    """Who is ended since its deadline is out of reach."""

    drop: bool = True
    pace: str = "fastest"  # of the passes to come: as the fastest lately, or as they usually were
    least_answer: int = 1  # tokens that an answer has at least

    def __post_init__(self) -> None:
        if self.pace not in PACES:
            raise ValueError(f"pace={self.pace}: choose from {', '.join(PACES)}")
        if self.least_answer < 1:
            raise ValueError(f"least_answer={self.least_answer}: needs 1 or more tokens")


class LeastTime:
    """The least time that a sequence needs until its last token, at the pace of the passes seen lately. By
    the fastest of them nobody could be faster, alone on the engine; by the usual one it is a forecast. 0 as
    long as nothing was seen."""

    FORGET = 1 / 64  # `fastest`: so much slower with each pass that was not as fast
    FOLLOW = 1 / 16  # `usual`: what one pass weighs

    def __init__(self, settings: DropSettings) -> None:
        self._settings = settings
        self.token_s = 0.0
        self.step_s = 0.0

    def passed(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            self.step_s = self._follow(self.step_s, seconds)
            self.token_s = self._follow(self.token_s, seconds / num_tokens)

    def _follow(self, known: float, seen: float) -> float:
        if not known:
            return seen
        if self._settings.pace == "usual":
            return known + (seen - known) * self.FOLLOW
        return min(seen, known * (1 + self.FORGET))

    def of(self, seq: Sequence) -> float:
        produced = seq.num_tokens - seq.prompt_len
        decodes = max(0, self._settings.least_answer - produced - 1)
        return max(seq.remaining * self.token_s, self.step_s) + decodes * self.step_s


class Deadlines:
    """Waiting sequences by the last moment at which they may start and still make it, `margin` seconds
    earlier. Kept at the speed that was known when they came; whoever seems late is looked at again."""

    DRIFT = 1.25  # the speed has changed by so much: everyone is looked at again

    def __init__(self, least: LeastTime, margin: float = 0.0) -> None:
        self._least = least
        self._margin = margin
        self._heap: list[tuple[float, int, float, Sequence]] = []  # last moment, seq_id, deadline
        self._speed = 0.0
        self._sweep_at = 64

    def push(self, seq: Sequence, deadline: float) -> None:
        heappush(self._heap, self._entry(seq, deadline))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def late(self, now: float) -> list[Sequence]:
        """Those that have not had a seat and would miss their deadline if they started later than now, given
        the margin. They are forgotten."""
        speed = self._least.token_s
        if not self._speed / self.DRIFT <= speed <= self._speed * self.DRIFT:
            self._speed = speed
            self._sweep()
        found = []
        while self._heap and self._heap[0][0] < now:
            _, _, deadline, seq = heappop(self._heap)
            if seq.status is Status.WAITING:
                entry = self._entry(seq, deadline)
                if entry[0] < now:
                    found.append(seq)
                else:
                    heappush(self._heap, entry)
        return found

    def next(self) -> float | None:
        """When `late` has somebody next, at the pace known now."""
        while self._heap:
            moment, _, deadline, seq = self._heap[0]
            entry = self._entry(seq, deadline)
            if seq.status is not Status.WAITING:
                heappop(self._heap)
            elif entry[0] > moment:
                heapreplace(self._heap, entry)
            else:
                return nextafter(moment, inf)
        return None

    def _entry(self, seq: Sequence, deadline: float) -> tuple[float, int, float, Sequence]:
        return deadline - self._least.of(seq) - self._margin, seq.seq_id, deadline, seq

    def _sweep(self) -> None:
        """Drop those that have entered or gone, at a cost of O(1) for each that came."""
        waiting = [(seq, due) for _, _, due, seq in self._heap if seq.status is Status.WAITING]
        self._heap = [self._entry(seq, due) for seq, due in waiting]
        heapify(self._heap)
        self._sweep_at = max(64, 2 * len(self._heap))
