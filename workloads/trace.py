"""A recorded trace as columns: one row per request, sorted by time. Readers (`workloads.tracefile`) make
it, replay (`workloads.traces`), `fit`, `show` and `convert` use it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads.columns import Texts


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
    skipped: int = 0  # bad rows
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_tokens)

    def times_s(self) -> np.ndarray:
        """Seconds from the first row; zeros where the trace has no times."""
        if self.time_ns is None or not len(self):
            return np.zeros(len(self))
        return (self.time_ns - self.time_ns[0]) / 1e9

    def take(self, rows: np.ndarray) -> Trace:
        """These rows, in their order."""
        columns: dict[str, Any] = {}
        for name in ("time_ns", "input_tokens", "output_tokens", "reused_tokens", "think_s"):
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows]
        for name in ("blocks", "session", "user", "request_class"):
            column = getattr(self, name)
            columns[name] = None if column is None else column.take(rows)
        return replace(self, **columns)
