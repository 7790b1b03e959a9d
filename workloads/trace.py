"""A recorded trace as columns: one row per request, sorted by time. Readers (`workloads.readers`) make
it, replay (`workloads.traces`), `fit`, `show` and `convert` use it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads.columns import Segments, Texts

_FEWEST_TICKED = 20  # rows that tell a coarse clock from chance
_SHORTEST_TICK_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class Blocks:
    """The prompts as blocks: row i has ids[start[i]:start[i + 1]], one for each started block of `tokens`
    prompt tokens. Two rows whose first k ids are equal have their first k blocks in common."""

    start: np.ndarray  # int64 [n + 1]
    ids: np.ndarray  # int64 [m]
    tokens: int

    def take(self, rows: np.ndarray) -> Blocks:
        """Of these rows, in their order."""
        counts = np.diff(self.start)[rows]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        which = np.arange(int(start[-1])) + np.repeat(self.start[:-1][rows] - start[:-1], counts)
        return Blocks(start, self.ids[which], self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All columns have one length. None: the format does not record it."""

    path: str
    format: str
    time_ns: np.ndarray | None  # int64, on the trace's own clock, not falling; None: lengths alone
    input_tokens: np.ndarray  # int64, 1 or more
    output_tokens: np.ndarray  # int64, 1 or more
    blocks: Blocks | None = None
    reused_tokens: np.ndarray | None = None  # int64: of the prompt, recorded as found in a cache or repeated
    session: Texts | None = None
    user: Texts | None = None  # tenant, client or model
    request_class: Texts | None = None  # what kind of request the trace says it is
    think_s: np.ndarray | None = None  # float64, NaN in a session's first: from the end of the request before
    parts: Segments | None = None  # the prompts as pieces: those of one name and number are equal (RAGPulse)
    closed: bool = False  # in a session only think_s was recorded: times of later rows are the earliest ones
    skipped: int = 0  # bad rows
    failed: int = 0  # requests that got no answer, which are left out
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_tokens)

    def times_s(self) -> np.ndarray:
        """Seconds from the first row; zeros where the trace has no times."""
        if self.time_ns is None or not len(self):
            return np.zeros(len(self))
        return (self.time_ns - self.time_ns[0]) / 1e9

    def tick_s(self) -> float | None:
        """The step of the clock that stamped the rows, where it is so coarse that some share a stamp: every
        gap is a multiple of it, to 0.5 %. None: no such step of 0.1 s or more."""
        if self.time_ns is None or len(self) < _FEWEST_TICKED:
            return None
        gaps = np.diff(self.time_ns)
        some = gaps[gaps > 0]
        if len(some) in (0, len(gaps)) or some.min() < _SHORTEST_TICK_NS:
            return None
        near = some[some < 10 * some.min()]
        tick = near.sum() / np.rint(near / near.min()).sum()
        off = np.abs(some - np.rint(some / tick) * tick)
        return float(np.rint(tick / 1e6) / 1e3) if off.max() <= 0.005 * tick else None

    def spread(self, random: np.random.Generator) -> Trace:
        """Where the clock is coarse, every stamp moved to a random place within its tick, since nothing
        else is known of it. The rows keep their order."""
        tick = self.tick_s()
        if self.time_ns is None or tick is None:
            return self
        moved = self.time_ns + np.rint(random.random(len(self)) * (tick * 1e9)).astype(np.int64)
        return replace(self, time_ns=np.sort(moved))

    def take(self, rows: np.ndarray) -> Trace:
        """These rows, in their order."""
        columns: dict[str, Any] = {}
        for name in ("time_ns", "input_tokens", "output_tokens", "reused_tokens", "think_s"):
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows]
        for name in ("blocks", "parts", "session", "user", "request_class"):
            column = getattr(self, name)
            columns[name] = None if column is None else column.take(rows)
        return replace(self, **columns)
