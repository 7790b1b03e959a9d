"""The schedule: every request of a run, drawn before the run starts, independent of any engine.

A run saves it as `schedule.parquet`, names it by `sha256()`, and replays it byte for byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from workloads.columns import Columns, Segments, Texts
from workloads.errors import WorkloadError

SCHEMA_VERSION = 2
CANCEL_KINDS = ("none", "before_first_token", "after_tokens", "after_s")
TRANSPORTS = ("http", "websocket")
_METADATA_KEY = b"batchmark.schedule"


class Segment(NamedTuple):
    """A run of prompt tokens. Requests that name the same segment_id have the same tokens there."""

    segment_id: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request, as its user means it: the columns of `schedule.parquet`."""

    id: str  # r000000, in order of arrival
    arrival_s: float  # from the start of the run; of a session's later turns: at the earliest
    tenant: str = "default"
    request_class: str = "default"
    priority: int = 0  # lower first
    deadline_ms: float | None = None
    stream: bool = True
    session: str | None = None
    turn: int = 0
    segments: tuple[Segment, ...]
    prompt_tokens: int  # the sum of the segments
    max_tokens: int  # what the client declares
    stop_after: int  # where the answer really ends, in tokens; never above max_tokens
    cancel_kind: str = "none"  # one of CANCEL_KINDS
    cancel_value: float | None = None  # seconds from the send, or tokens of the answer; None when none
    timeout_s: float | None = None
    think_s: float | None = None  # of a later turn: seconds from the end of the turn before it
    transport: str = "http"  # one of TRANSPORTS; a websocket always streams

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival_s) or self.arrival_s < 0:
            raise WorkloadError(f"request {self.id}: arrival_s={self.arrival_s}, needs a time of 0 or more")
        if self.prompt_tokens < 1 or self.prompt_tokens != sum(tokens for _, tokens in self.segments):
            raise WorkloadError(
                f"request {self.id}: prompt_tokens={self.prompt_tokens}, "
                "needs to be the sum of its segments, at least 1"
            )
        if not 1 <= self.stop_after <= self.max_tokens:
            raise WorkloadError(
                f"request {self.id}: stop_after={self.stop_after}, needs 1 to max_tokens={self.max_tokens}"
            )
        if self.cancel_kind not in CANCEL_KINDS or (self.cancel_kind == "none") != (
            self.cancel_value is None
        ):
            raise WorkloadError(
                f"request {self.id}: cancel_kind={self.cancel_kind} with cancel_value={self.cancel_value}, "
                f"needs one of {', '.join(CANCEL_KINDS)} and a value unless none"
            )
        if self.transport not in TRANSPORTS or (self.transport == "websocket" and not self.stream):
            raise WorkloadError(
                f"request {self.id}: transport={self.transport} with stream={self.stream}, "
                f"needs one of {', '.join(TRANSPORTS)}; a websocket streams"
            )
        if self.think_s is not None:
            if not math.isfinite(self.think_s) or self.think_s < 0:
                raise WorkloadError(f"request {self.id}: think_s={self.think_s}, needs seconds of 0 or more")
            if self.turn < 1 or self.session is None:
                raise WorkloadError(
                    f"request {self.id}: think_s={self.think_s} with session={self.session}, "
                    f"turn={self.turn}, needs a session and a turn of 1 or more"
                )


class Rows(Sequence[ScheduledRequest]):
    """The rows of columns, each made when it is asked for."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScheduledRequest]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRequest | Sequence[ScheduledRequest]:
        return self._all[index]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _all(self) -> tuple[ScheduledRequest, ...]:
        return tuple(_requests(self.columns))


@dataclass(frozen=True)
class Schedule:
    """All requests of a run in order of arrival, and what they were drawn from."""

    requests: Sequence[ScheduledRequest]
    name: str
    seed: int
    length_scale: float = 1.0
    planned_rate: float | None = None  # requests/s; None when all arrive at once
    skipped_rows: int = 0  # bad rows of a trace that were passed over
    notes: tuple[str, ...] = ()  # what the reader did to the input, for people

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self.requests)

    @cached_property
    def columns(self) -> Columns:
        """The same rows as arrays."""
        return self.requests.columns if isinstance(self.requests, Rows) else columns_of(self.requests)

    def websockets(self) -> int:
        """How many requests come over a WebSocket."""
        transport = self.columns.transport
        return int((np.array(transport.names) == "websocket")[transport.codes].sum()) if len(self) else 0

    def over_http(self) -> Sequence[ScheduledRequest]:
        """The requests as a server without a route for WebSockets is sent them: those stream as SSE."""
        return Rows(replace(self.columns, transport=Texts.all("http", len(self))))

    def sha256(self) -> str:
        """Hex digest over the seed (prompts are cut by it) and every column of every request: two schedules
        with one digest send the same bytes at the same times. Names, notes and planned rate do not
        count."""
        return self.columns.digest(f"batchmark schedule {SCHEMA_VERSION} seed {self.seed}\n")

    def to_parquet(self, path: str | Path) -> None:
        """Write one row per request; what is not a column goes into the file's metadata."""
        import pyarrow.parquet as pq

        about = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "seed": self.seed,
            "length_scale": self.length_scale,
            "planned_rate": self.planned_rate,
            "skipped_rows": self.skipped_rows,
            "notes": list(self.notes),
        }
        table = _arrow_table(self.columns)
        pq.write_table(
            table.replace_schema_metadata({_METADATA_KEY: json.dumps(about).encode()}),
            path,
            compression="zstd",
        )

    @classmethod
    def from_parquet(cls, path: str | Path) -> Schedule:
        """Read what `to_parquet` wrote, with or without the columns that came later. Raises WorkloadError
        when it is missing or something else."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as exc:
            reason = str(exc).splitlines()[0]
            raise WorkloadError(f"schedule {path}: cannot be read as parquet ({reason})") from exc
        raw = (table.schema.metadata or {}).get(_METADATA_KEY)
        if raw is None:
            raise WorkloadError(f"schedule {path}: is parquet, but not a schedule that this project wrote")
        about = json.loads(raw)
        if about["schema_version"] not in range(1, SCHEMA_VERSION + 1):
            raise WorkloadError(
                f"schedule {path}: has schema_version {about['schema_version']}, "
                f"this version reads 1 to {SCHEMA_VERSION}"
            )
        return cls(
            requests=Rows(_from_arrow(table)),
            name=about["name"],
            seed=about["seed"],
            length_scale=about["length_scale"],
            planned_rate=about["planned_rate"],
            skipped_rows=about["skipped_rows"],
            notes=tuple(about["notes"]),
        )


def request_id(index: int) -> str:
    """The id of the request that arrives as number `index` (from 0)."""
    return f"r{index:06d}"


def planned_rate(arrivals_s: Sequence[float] | np.ndarray) -> float | None:
    """Requests/s of given arrival times: gaps over the time they span; None when they span none."""
    span = float(arrivals_s[-1] - arrivals_s[0]) if len(arrivals_s) > 1 else 0.0
    return (len(arrivals_s) - 1) / span if span > 0 else None


_ABSENT = ("deadline_ms", "cancel_value", "timeout_s", "think_s")
"""Columns where NaN stands for None."""


def columns_of(requests: Sequence[ScheduledRequest]) -> Columns:
    """The columns of requests."""
    columns: dict[str, Any] = {}
    for field in fields(Columns):
        values = [getattr(r, field.name) for r in requests]
        if field.name == "segments":
            columns[field.name] = Segments.of(values)
        elif field.type == "Texts":
            columns[field.name] = Texts.of(values)
        elif field.name in _ABSENT or field.name == "arrival_s":
            columns[field.name] = np.array([np.nan if v is None else v for v in values], dtype=float)
        else:
            columns[field.name] = np.array(values, dtype=bool if field.name == "stream" else np.int64)
    return Columns(**columns)


def _requests(columns: Columns) -> Iterator[ScheduledRequest]:
    values: dict[str, list[Any]] = {}
    for field in fields(Columns):
        column = getattr(columns, field.name)
        if field.name in _ABSENT:
            values[field.name] = [None if v != v else v for v in column.tolist()]
        elif isinstance(column, Texts):
            values[field.name] = column.list()
        elif isinstance(column, np.ndarray):
            values[field.name] = column.tolist()
    prompts = columns.segments
    segments = [*map(Segment, prompts.ids(), prompts.tokens.tolist())]
    start = prompts.start.tolist()
    totals = prompts.totals().tolist()
    names = list(values)
    for i, row in enumerate(zip(*values.values(), strict=True)):
        yield ScheduledRequest(
            segments=tuple(segments[start[i] : start[i + 1]]),
            prompt_tokens=totals[i],
            **dict(zip(names, row, strict=True)),
        )


def _arrow_table(columns: Columns) -> Any:
    import pyarrow as pa

    prompts = columns.segments
    pieces = pa.StructArray.from_arrays(
        [prompts.arrow_ids(), pa.array(prompts.tokens)], names=["segment_id", "tokens"]
    )
    made: dict[str, Any] = {
        "segments": pa.LargeListArray.from_arrays(pa.array(prompts.start), pieces),
        "prompt_tokens": pa.array(prompts.totals()),
    }
    for field in fields(Columns):
        column = getattr(columns, field.name)
        if isinstance(column, Texts):
            made[field.name] = column.arrow()
        elif isinstance(column, np.ndarray):
            missing = np.isnan(column) if field.name in _ABSENT else None
            made[field.name] = pa.array(column, mask=missing)
    return pa.table({field.name: made[field.name] for field in fields(ScheduledRequest)})


def _from_arrow(table: Any) -> Columns:
    import pyarrow as pa

    n = table.num_rows
    columns: dict[str, Any] = {}
    for field in fields(Columns):
        if field.name not in table.column_names:  # written before it existed
            late = {"transport": Texts.all("http", n), "think_s": np.full(n, np.nan)}
            columns[field.name] = late[field.name]
            continue
        column = table[field.name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        if field.name == "segments":
            pieces = column.flatten()
            ids = _texts(pieces.field("segment_id"))
            tokens = np.asarray(pieces.field("tokens"), dtype=np.int64)
            counts = np.asarray(column.value_lengths(), dtype=np.int64)
            start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            columns[field.name] = Segments(start, ids.codes, np.full(len(tokens), -1), tokens, ids.names)
        elif field.type == "Texts":
            columns[field.name] = _texts(column)
        elif field.name in _ABSENT or field.name == "arrival_s":
            columns[field.name] = np.array(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
        else:
            columns[field.name] = np.array(column.to_numpy(zero_copy_only=False))
    return Columns(**columns)


def _texts(column: Any) -> Texts:
    coded = column.dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False)
    codes = np.where(np.isnan(codes), -1, codes) if codes.dtype.kind == "f" else codes
    return Texts(codes.astype(np.int64), tuple(coded.dictionary.to_pylist()))
