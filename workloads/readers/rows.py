"""The columns of a trace while it is read: 8 bytes a number, and no Python object a row."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from workloads.columns import Segments, Texts
from workloads.errors import TraceError
from workloads.readers.values import BadRow, hash_ids
from workloads.trace import Blocks, Trace

TEXTS = ("session", "user", "request_class")
FLOATS = ("think_s", "latency_s")
OWN_ID = 1 << 62  # block ids from here on are one row's own
BLOCK_SIZES = (512, 16, 64, 32, 128, 256)  # tokens a hash id stands for; the first that fits every row


class Rows:
    """Collects requests. Every `add` of one file gives the same optional columns."""

    def __init__(
        self, path: str, format: str, *, limit: int | None = None, skip_bad: bool = False, seed: int = 0
    ) -> None:
        self.path = path
        self.format = format
        self.skip_bad = skip_bad
        self.seed = seed
        self.skipped = 0
        self.failed = 0  # requests that got no answer: left out
        self.raised = 0  # answers of 0 tokens, taken as 1
        self.closed = False  # as in Trace
        self.notes: list[str] = []
        self.given: dict[str, Texts] = {}  # columns that a reader makes at the end
        self.names: dict[str, dict[str, int]] = {}
        self._limit = sys.maxsize if limit is None else limit
        self._first_bad = ""
        self._time, self._input, self._output = array("q"), array("q"), array("q")
        self._more: dict[str, array[Any]] = {}
        self._ends, self._ids = array("q"), array("q")  # of blocks
        self._part_ends, self._parts = array("q"), array("q")  # of (code, number, tokens)
        self.part_names: tuple[str, ...] = ()
        self.block_sizes: tuple[int, ...] = BLOCK_SIZES  # those that fit every row so far

    def __len__(self) -> int:
        return len(self._input)

    @property
    def full(self) -> bool:
        return len(self._input) >= self._limit

    @property
    def room(self) -> int:
        return self._limit - len(self._input)

    def bad(self, error: TraceError, cause: Exception) -> None:
        """A row that cannot be used: raised, or counted where bad rows are skipped."""
        if not self.skip_bad:
            error.skippable = True
            raise error from cause
        self.skipped += 1
        self._first_bad = self._first_bad or str(error)

    def add(self, time_ns: int | None, input_tokens: int, output_tokens: int, **more: Any) -> None:
        """One request. more: reused_tokens, session, user, request_class (texts or None), think_s, latency_s
        (seconds or NaN)."""
        if time_ns is not None:
            self._time.append(time_ns)
        self._input.append(input_tokens)
        self._output.append(output_tokens)
        for name, value in more.items():
            column = self._more.get(name)
            if column is None:
                column = self._more[name] = array("d" if name in FLOATS else "q")
                self.names[name] = {}
            if name in TEXTS:
                names = self.names[name]
                value = -1 if value is None else names.setdefault(value, len(names))
            column.append(value)

    def add_ids(self, ids: Iterable[int]) -> None:
        """The block ids of the request that was just added."""
        self._ids.extend(ids)
        self._ends.append(len(self._ids))

    def add_parts(self, parts: Iterable[tuple[int, int, int]]) -> None:
        """The prompt of the request that was just added: (code into part_names, number, tokens)."""
        for part in parts:
            self._parts.extend(part)
        self._part_ends.append(len(self._parts) // 3)

    def filled_ids(self, ids: Any, prompt: int) -> list[int]:
        """Block ids of a file whose last block has one only if it is full: a rest gets one that nobody
        shares."""
        if not ids and ids in (None, []):
            return []
        (size,) = self.block_sizes
        ids = hash_ids(ids)
        missing = -(-prompt // size) - len(ids)
        if missing not in (0, 1) or (missing and not prompt % size):
            needs = f"{prompt} tokens have {prompt // size} full blocks of {size}"
            raise BadRow(f"has {len(ids)} ids, {needs}", "hash_ids")
        return [*ids, OWN_ID + len(self)] if missing else ids

    def extend(
        self, time_ns: np.ndarray, input_tokens: np.ndarray, output_tokens: np.ndarray, user: np.ndarray
    ) -> None:
        """Many requests at once, as far as there is room; int64, of one length. user: codes of
        names["user"]."""
        room = self.room
        users = self._more.setdefault("user", array("q"))
        given = (
            (self._time, time_ns),
            (self._input, input_tokens),
            (self._output, output_tokens),
            (users, user),
        )
        for column, values in given:
            column.frombytes(np.ascontiguousarray(values[:room], dtype=np.int64).tobytes())

    def trace(self) -> Trace:
        """What was read, sorted by time. Raises TraceError where that is nothing."""
        n = len(self)
        if not n:
            reason = "has a header but no rows"
            if self.skipped or self.failed:
                reason = f"has no usable row; skipped {self.skipped}"
                reason += (
                    f", first: {self._first_bad}" if self.skipped else f", {self.failed} failed requests"
                )
            raise TraceError(self.path, reason)
        if self.skipped:
            self.notes.insert(0, f"{self.skipped} bad rows skipped, first: {self._first_bad}")
        if self.failed:
            self.notes.append(f"{self.failed} failed requests (without tokens) left out")
        if self.raised:
            self.notes.append(f"{self.raised} answers of 0 tokens taken as 1")
        columns = self._columns()
        latency_s = columns.pop("latency_s", None)
        made = Trace(
            path=self.path,
            format=self.format,
            time_ns=_numbers(self._time) if len(self._time) else None,
            input_tokens=_numbers(self._input),
            output_tokens=_numbers(self._output),
            blocks=self._blocks(),
            parts=self._segments(),
            closed=self.closed,
            skipped=self.skipped,
            failed=self.failed,
            **columns,
        )
        if made.time_ns is not None:
            falls = int((np.diff(made.time_ns) < 0).sum())
            if falls:
                self.notes.append(f"timestamps go back {falls} times; rows sorted by time")
                order = np.argsort(made.time_ns, kind="stable")  # rows of one time keep the order of the file
                made = made.take(order)
                latency_s = None if latency_s is None else latency_s[order]
        changes: dict[str, Any] = {"notes": tuple(self.notes)}
        if made.session is not None and made.think_s is None and made.time_ns is not None:
            changes["think_s"] = think_times(made.session, made.time_ns, latency_s)
        return replace(made, **changes)

    def _columns(self) -> dict[str, Any]:
        """The optional columns that say something."""
        columns: dict[str, Any] = dict(self.given)
        for name, column in self._more.items():
            values = _numbers(column)
            if name in TEXTS:
                if self.names[name]:
                    columns[name] = Texts(values, tuple(self.names[name]))
            elif not np.isnan(values).all() if name in FLOATS else values.any():
                columns[name] = values
        return columns

    def _blocks(self) -> Blocks | None:
        if not len(self._ids):
            return None
        start = np.concatenate([[0], _numbers(self._ends)]).astype(np.int64)
        return Blocks(start, _numbers(self._ids), self.block_sizes[0])

    def _segments(self) -> Segments | None:
        if not len(self._parts):
            return None
        start = np.concatenate([[0], _numbers(self._part_ends)]).astype(np.int64)
        code, number, tokens = _numbers(self._parts).reshape(-1, 3).T.copy()
        return Segments(start, code, number, tokens, self.part_names)


def think_times(session: Texts, time_ns: np.ndarray, latency_s: np.ndarray | None) -> np.ndarray:
    """Seconds from the end of the request before in the same session (its start, where the trace does not
    say how long it took), at least 0; NaN in a session's first and outside of sessions. Rows are sorted by
    time."""
    order = np.argsort(session.codes, kind="stable")
    follows = np.diff(session.codes[order]) == 0
    follows &= session.codes[order][1:] >= 0
    gaps = np.diff(time_ns[order]) / 1e9
    if latency_s is not None:
        gaps = gaps - np.nan_to_num(latency_s[order][:-1])
    think_s = np.full(len(time_ns), np.nan)
    think_s[order[1:][follows]] = np.maximum(gaps[follows], 0.0)
    return think_s


def _numbers(column: array[Any]) -> np.ndarray:
    return np.frombuffer(column, dtype=np.float64 if column.typecode == "d" else np.int64)
