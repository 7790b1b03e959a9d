"""The rows of a schedule as columns, so that a million requests take seconds and some hundred megabytes.

Texts are codes into a tuple of names. Prompts are three flat columns (whose segments, which, how long) with
the row bounds beside them; a segment is called names[code], or names[code]/number where its number is not
negative, so that no text exists for the segments of one request only until someone asks for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_HASHED_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of texts: names[codes[i]], or None where the code is negative."""

    codes: np.ndarray  # int64 [n]
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[str | None]) -> Texts:
        """Names in order of their first appearance."""
        known: dict[str, int] = {}
        codes = [-1 if v is None else known.setdefault(v, len(known)) for v in values]
        return cls(np.array(codes, dtype=np.int64), tuple(known))

    @classmethod
    def all(cls, name: str, n: int) -> Texts:
        return cls(np.zeros(n, dtype=np.int64), (name,))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray | slice) -> Texts:
        return Texts(self.codes[rows], self.names)

    def list(self) -> list[str | None]:
        names: list[str | None] = [*self.names, None]  # code -1 is the last one
        return [names[code] for code in self.codes.tolist()]

    def arrow(self) -> pa.Array:
        import pyarrow as pa

        names = pa.array(self.names, pa.string())
        return names.take(pa.array(self.codes, pa.int64(), mask=self.codes < 0))


@dataclass(frozen=True, slots=True)
class Segments:
    """The prompts of n rows. Row i owns segments start[i]:start[i + 1]."""

    start: np.ndarray  # int64 [n + 1]
    code: np.ndarray  # int64 [m] into names
    number: np.ndarray  # int64 [m], -1: none
    tokens: np.ndarray  # int64 [m]
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[str, int]]]) -> Segments:
        known: dict[str, int] = {}
        start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=start[1:])
        code = np.array([known.setdefault(s, len(known)) for row in rows for s, _ in row], dtype=np.int64)
        tokens = np.array([n for row in rows for _, n in row], dtype=np.int64)
        return cls(start, code, np.full(len(code), -1, dtype=np.int64), tokens, tuple(known))

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def row(self) -> np.ndarray:
        """The row of each segment, int64 [m]."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    def take(self, rows: np.ndarray | slice) -> Segments:
        """The prompts of these rows, in their order."""
        begins, ends = self.start[:-1][rows], self.start[1:][rows]
        counts = ends - begins
        start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=start[1:])
        which = np.arange(start[-1]) + np.repeat(begins - start[:-1], counts)
        return Segments(start, self.code[which], self.number[which], self.tokens[which], self.names)

    def totals(self) -> np.ndarray:
        """Tokens of each prompt, int64 [n]."""
        ends = np.concatenate([[0], np.cumsum(self.tokens)])[self.start]
        return np.diff(ends)

    def ids(self) -> list[str]:
        """What each segment is called, [m]."""
        names = self.names
        return [
            names[code] if number < 0 else f"{names[code]}/{number}"
            for code, number in zip(self.code.tolist(), self.number.tolist(), strict=True)
        ]

    def arrow_ids(self) -> pa.Array:
        """`ids`, as arrow text."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not len(self.code):
            return pa.array([], pa.string())
        prefix = pa.array([*self.names, *(f"{name}/" for name in self.names)], pa.string())
        code = pa.array(np.where(self.number < 0, self.code, self.code + len(self.names)), pa.int64())
        number = pc.cast(pa.array(self.number, pa.int64(), mask=self.number < 0), pa.string())
        return pc.binary_join_element_wise(prefix.take(code), pc.fill_null(number, ""), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One array per column of ScheduledRequest. NaN stands for a time or value that a row does not have."""

    id: Texts
    arrival_s: np.ndarray  # float64
    tenant: Texts
    request_class: Texts
    priority: np.ndarray  # int64
    deadline_ms: np.ndarray  # float64
    stream: np.ndarray  # bool
    transport: Texts
    session: Texts
    turn: np.ndarray  # int64
    segments: Segments
    max_tokens: np.ndarray  # int64
    stop_after: np.ndarray  # int64
    cancel_kind: Texts
    cancel_value: np.ndarray  # float64
    timeout_s: np.ndarray  # float64
    think_s: np.ndarray  # float64

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, rows: np.ndarray | slice) -> Columns:
        """These rows, in their order."""
        taken: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            taken[field.name] = column[rows] if isinstance(column, np.ndarray) else column.take(rows)
        return Columns(**taken)

    def prompt_tokens(self) -> np.ndarray:
        return self.segments.totals()

    def digest(self, header: str) -> str:
        """SHA-256 over the header and every column, in blocks of rows: numbers as little-endian bytes, texts
        by their lengths and characters. However the rows came to be, equal rows have one digest."""
        digest = hashlib.sha256(header.encode())
        for begin in range(0, len(self), _HASHED_ROWS):
            part = self.take(slice(begin, begin + _HASHED_ROWS))
            for field in fields(part):
                digest.update(field.name.encode())
                for piece in _bytes(getattr(part, field.name)):
                    digest.update(piece)
        return digest.hexdigest()


def _bytes(column: np.ndarray | Texts | Segments) -> list[bytes]:
    if isinstance(column, Texts):
        return _text_bytes(column.list())
    if isinstance(column, Segments):
        return [*_bytes(np.diff(column.start)), *_bytes(column.tokens), *_text_bytes(column.ids())]
    if column.dtype == np.float64:
        column = np.where(np.isnan(column), np.nan, column + 0.0)  # one NaN, and no -0
    return [np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<")).tobytes()]


def _text_bytes(texts: Sequence[str | None]) -> list[bytes]:
    lengths = np.fromiter((-1 if t is None else len(t) for t in texts), dtype="<i4", count=len(texts))
    return [lengths.tobytes(), "".join(t for t in texts if t is not None).encode("utf-8", "surrogatepass")]
