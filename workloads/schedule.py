"""The schedule: every request of a run, drawn before the run starts, independent of any engine.

A run saves it as `schedule.parquet`, names it by `sha256()`, and replays it byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.errors import WorkloadError

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = 1
CANCEL_KINDS = ("none", "before_first_token", "after_tokens", "after_s")
_FLOATS = ("arrival_s", "deadline_ms", "cancel_value", "timeout_s", "think_s")
_LATER = ("think_s",)
"""Columns that came after the first schedules: where one holds its default it is no part of the digest, so
that schedules without it keep theirs."""
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
        if self.think_s is not None:
            if not math.isfinite(self.think_s) or self.think_s < 0:
                raise WorkloadError(f"request {self.id}: think_s={self.think_s}, needs seconds of 0 or more")
            if self.turn < 1 or self.session is None:
                raise WorkloadError(
                    f"request {self.id}: think_s={self.think_s} with session={self.session}, "
                    f"turn={self.turn}, needs a session and a turn of 1 or more"
                )


@dataclass(frozen=True, slots=True)
class Schedule:
    """All requests of a run in order of arrival, and what they were drawn from."""

    requests: tuple[ScheduledRequest, ...]
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

    def sha256(self) -> str:
        """Hex digest over the seed (prompts are cut by it) and every column of every request: two schedules
        with one digest send the same bytes at the same times. Names, notes and planned rate do not
        count."""
        digest = hashlib.sha256(f"batchmark schedule {SCHEMA_VERSION} seed {self.seed}\n".encode())
        for request in self.requests:
            row = [
                _canonical(f.name, value)
                for f in fields(ScheduledRequest)
                if not ((value := getattr(request, f.name)) is None and f.name in _LATER)
            ]
            digest.update(json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def to_parquet(self, path: str | Path) -> None:
        """Write one row per request; what is not a column goes into the file's metadata."""
        import pyarrow as pa
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
        schema = _arrow_schema().with_metadata({_METADATA_KEY: json.dumps(about).encode()})
        columns: dict[str, list[Any]] = {
            f.name: [getattr(request, f.name) for request in self.requests] for f in fields(ScheduledRequest)
        }
        columns["segments"] = [[s._asdict() for s in request.segments] for request in self.requests]
        pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")

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
        if about["schema_version"] != SCHEMA_VERSION:
            raise WorkloadError(
                f"schedule {path}: has schema_version {about['schema_version']}, "
                f"this version reads {SCHEMA_VERSION}"
            )
        requests = []
        for row in table.to_pylist():
            row["segments"] = tuple(Segment(s["segment_id"], s["tokens"]) for s in row["segments"])
            requests.append(ScheduledRequest(**row))
        return cls(
            requests=tuple(requests),
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


def _canonical(column: str, value: Any) -> Any:
    # 5 and 5.0 are one time, and parquet gives back the second.
    return float(value) if column in _FLOATS and value is not None else value


def _arrow_schema() -> Any:
    import pyarrow as pa

    segment = pa.struct([pa.field("segment_id", pa.string()), pa.field("tokens", pa.int64())])
    kinds = {
        "arrival_s": pa.float64(),
        "priority": pa.int64(),
        "deadline_ms": pa.float64(),
        "stream": pa.bool_(),
        "turn": pa.int64(),
        "segments": pa.list_(segment),
        "prompt_tokens": pa.int64(),
        "max_tokens": pa.int64(),
        "stop_after": pa.int64(),
        "cancel_value": pa.float64(),
        "timeout_s": pa.float64(),
        "think_s": pa.float64(),
    }
    return pa.schema([pa.field(f.name, kinds.get(f.name, pa.string())) for f in fields(ScheduledRequest)])
