"""What the engine writes down: a row for every iteration, a line for every request that leaves, its own end.

`steps.arrow` is an Arrow IPC stream, `engine_requests.jsonl` has an object a line, `engine_end.json` is one
object of an engine that came to its end; docs/architecture.md lists the columns. The first two are appended
when a second has passed and whenever the engine falls idle, by write() straight to the system, so kill -9
loses a second at most. A stream that was cut off is read batch by batch until the reader raises ArrowInvalid
or OSError: that needs pyarrow alone, `read_steps` shows how."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

FLUSH_INTERVAL_NS = 1_000_000_000

_TYPES = {
    "ids": pa.list_(pa.int64()),
    "tokens": pa.list_(pa.int32()),
    "kind": pa.list_(pa.int8()),
    "preempted": pa.list_(pa.int64()),
    "blocked": pa.string(),
}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One iteration. prefill + decode + recomputed + ended + left pads is all that the pass computed; the
    first two are useful. Over its life, a request that ends by itself has prompt_tokens in the first and
    in cached_tokens together, and output_tokens - 1 in the second, whatever the strategy: its last token is
    never computed, only sampled."""

    step: int
    start_ns: int  # the pass begins; scheduling and assembly lie before, in the host gap
    duration_ns: int
    host_gap_ns: int | None  # since the last pass ended; null after the engine was idle
    num_seqs: int  # rows computed for someone
    prefill_tokens: int  # of prompts, for the first time
    decode_tokens: int  # of answers, for the first time
    ended_rows: int
    left_pad_tokens: int
    recomputed_tokens: int  # had been computed before a preemption
    cached_tokens: int  # of prompts, found in the prefix cache by those that got a seat: not computed
    backend_pad_rows: int
    waiting: int
    running: int
    kv_live: int
    kv_cached: int
    kv_free: int
    preemptions: int  # since the last row
    swapped_out: int  # blocks copied to host memory before the pass, in its duration
    swapped_in: int  # and back
    refusals: int  # since the last row
    ids: list[int]
    tokens: list[int]
    kind: list[int]  # plan.Kind
    preempted: list[int]  # seq_id of those that lost their seat when it was planned
    blocked: str | None  # why the head of the queue is not in it (admission.blocked); null: nobody waits


@dataclass(slots=True)
class RequestRecord:
    """One request that has left, or was refused. Times are nanoseconds of the engine's clock."""

    seq_id: int
    run: str | None
    id: str | None
    attempt: int | None
    tenant: str
    request_class: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    arrival_ns: int
    admitted_ns: int | None = None  # first scheduled
    first_token_ns: int | None = None
    finish_ns: int | None = None  # its blocks are free
    finish_reason: str | None = None  # stop | length | abort | queue_timeout | deadline | refused | error
    refusal: str | None = None
    output_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0  # of them those after which its KV was put away in host memory
    recomputed_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache had
    abort_state: str | None = None  # queued | prefill | decode | held
    abort_seen_ns: int | None = None
    wasted_tokens: int = (
        0  # aborted: all that was computed for it, recomputation and rows kept afterwards included
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """The engine when it had nothing left to do and was about to go: `engine_end.json`."""

    at_ns: int  # of the engine's clock
    aborted: int  # requests that were still under way and were ended for it
    running: int
    waiting: int
    kv_live: int  # blocks
    kv_cached: int
    kv_free: int
    integrity: str  # ok, or what does not add up
    graphs: dict[str, Any] | None = None  # of CUDA: whether on, sizes, passes and how many were replayed


STEP_SCHEMA = pa.schema([(f.name, _TYPES.get(f.name, pa.int64())) for f in fields(StepRecord)])


class _WholeFile(io.FileIO):
    """A disk that fills up takes the beginning of a write and says how much, which no writer above looks at:
    here a write is whole or an OSError."""

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[super().write(rest) or 0 :]
        return size


class StepLog:
    """Writes the files of `directory`, which it creates. One thread only. Raises OSError, FileExistsError
    where there are records already: two servers, or two runs, must not mix theirs."""

    def __init__(self, directory: Path | str) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._steps_file = _WholeFile(directory / "steps.arrow", "xb")
        self._requests_file = _WholeFile(directory / "engine_requests.jsonl", "ab")
        self._writer = pa.ipc.new_stream(self._steps_file, STEP_SCHEMA)
        self._columns: dict[str, list[Any]] = {name: [] for name in STEP_SCHEMA.names}
        self._lines: list[str] = []
        self._flushed_ns = 0

    def step(self, record: StepRecord) -> None:
        for name, column in self._columns.items():
            column.append(getattr(record, name))
        if record.start_ns - self._flushed_ns >= FLUSH_INTERVAL_NS:
            self.flush()
            self._flushed_ns = record.start_ns

    def request(self, record: RequestRecord) -> None:
        self._lines.append(json.dumps(asdict(record), separators=(",", ":")) + "\n")

    def flush(self) -> None:
        if self._columns["step"]:
            self._writer.write_batch(pa.record_batch(self._columns, schema=STEP_SCHEMA))
            for column in self._columns.values():
                column.clear()
        if self._lines:
            self._requests_file.write("".join(self._lines).encode())
            self._lines.clear()

    def end(self, ending: Ending) -> None:
        with _WholeFile(self._directory / "engine_end.json", "wb") as file:
            file.write(json.dumps(asdict(ending)).encode() + b"\n")

    def close(self) -> None:
        """Harmless when repeated."""
        if self._steps_file.closed:
            return
        self.flush()
        self._writer.close()
        self._steps_file.close()
        self._requests_file.close()


def read_steps(path: Path | str) -> pa.Table:
    """The rows of a steps.arrow, up to where it was cut off."""
    batches: list[pa.RecordBatch] = []
    with open(path, "rb") as file:
        try:
            reader = pa.ipc.open_stream(file)
            for batch in reader:
                batches.append(batch)
        except (pa.ArrowInvalid, OSError):
            pass
    return pa.Table.from_batches(batches, schema=STEP_SCHEMA)
