"""The records of a run: what client and engine append while it runs, and how they are read afterwards.

Appending is one write per line straight to the operating system, so what has ended is on file when a process
dies. Readers take files as a kill -9 or a full disk left them: a line or an Arrow batch that was cut off is
dropped, and a RecordsWarning says so. The contract, field by field, is in docs/architecture.md.

pandas and pyarrow are imported where they are used: pointing a load at a server needs neither.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 1
OUTCOMES = ("completed", "failed", "timed_out", "rejected", "cancelled", "cut_off")
TOKEN_SOURCES = ("usage", "ids", "retokenised")

INT64, INT32, INT8, FLOAT, TEXT, BOOL = "int64", "int32", "int8", "float64", "string", "bool"

STEP_COLUMNS = {
    **dict.fromkeys(("step", "start_ns", "duration_ns", "host_gap_ns"), INT64),
    **dict.fromkeys(("num_seqs", "prefill_tokens", "decode_tokens", "ended_rows", "left_pad_tokens"), INT64),
    **dict.fromkeys(("recomputed_tokens", "backend_pad_rows", "waiting", "running"), INT64),
    **dict.fromkeys(("kv_live", "kv_cached", "kv_free", "preemptions", "refusals"), INT64),
    "ids": "list<int64>",
    "tokens": "list<int32>",
    "kind": "list<int8>",
}
ENGINE_REQUEST_COLUMNS = {
    "seq_id": INT64,
    "run": TEXT,
    "id": TEXT,
    "attempt": INT64,
    "tenant": TEXT,
    "request_class": TEXT,
    **dict.fromkeys(("priority", "prompt_tokens", "max_tokens"), INT64),
    **dict.fromkeys(("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns"), INT64),
    "finish_reason": TEXT,
    "refusal": TEXT,
    **dict.fromkeys(("output_tokens", "preemptions", "recomputed_tokens"), INT64),
    "abort_state": TEXT,
    "abort_seen_ns": INT64,
    "wasted_tokens": INT64,
}
TELEMETRY_COLUMNS = {
    "t_ns": INT64,
    **dict.fromkeys(("server_cpu_pct", "server_rss_mb", "client_cpu_pct", "client_rss_mb"), FLOAT),
    **dict.fromkeys(("gpu_util_pct", "gpu_memory_gb", "gpu_power_w"), FLOAT),
}
CHUNK_COLUMNS = {"id": TEXT, "attempt": INT64, "k": INT32, "t_ns": INT64, "tokens": INT32}
REQUEST_COLUMNS = {
    "id": TEXT,
    "attempt": INT64,
    "tenant": TEXT,
    "request_class": TEXT,
    "priority": INT64,
    "session": TEXT,
    "turn": INT64,
    "stream": BOOL,
    **dict.fromkeys(("intended_ns", "dispatch_ns", "send_ns"), INT64),
    **dict.fromkeys(("headers_ns", "first_event_ns", "end_ns"), INT64),
    **dict.fromkeys(("prompt_tokens", "planned_prompt_tokens", "output_tokens"), INT64),
    "token_source": TEXT,
    "token_mismatch": BOOL,
    "max_tokens": INT64,
    "stop_after": INT64,
    "outcome": TEXT,
    "reason": TEXT,
    "status": INT64,
    "finish_reason": TEXT,
    "error": TEXT,
    "text": TEXT,
}


class RecordsError(RuntimeError):
    """A record file cannot be used. The message is one line that names the file; `path` is that file."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class RecordsWriteError(RecordsError):
    """The disk took no more. Whole lines written before are kept; the run is incomplete."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(path, f"cannot write {path}: {cause.strerror or cause}; what was written is kept")


class RecordsWarning(UserWarning):
    """Part of a record file was cut off or broken, and was left out."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it. `*_ns` count from the run's t0; None: it did not happen.

    chunk_ns and chunk_tokens describe token-bearing chunks only and have the same length. Where a server
    sends text without ids, every chunk counts 1 and output_tokens comes from usage: they need not add up.
    """

    id: str
    attempt: int
    tenant: str
    request_class: str
    priority: int
    session: str | None
    turn: int
    stream: bool
    intended_ns: int
    dispatch_ns: int | None
    send_ns: int | None
    headers_ns: int | None
    first_event_ns: int | None
    end_ns: int | None
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    prompt_tokens: int | None
    planned_prompt_tokens: int
    output_tokens: int | None
    token_source: str | None
    token_mismatch: bool
    max_tokens: int
    stop_after: int
    outcome: str
    reason: str | None
    status: int | None
    finish_reason: str | None
    error: str | None
    text: str | None = None

    def to_json(self) -> bytes:
        """The line of requests.jsonl, with its newline. `text` is left out when it was not kept."""
        line: dict[str, Any] = {"type": "request"}
        line.update((name, getattr(self, name)) for name in _RECORD_FIELDS)
        if self.text is None:
            del line["text"]
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> RequestRecord:
        """From a decoded line. Raises KeyError for a missing field; unknown fields are left out."""
        values = {name: row[name] for name in _RECORD_FIELDS if name != "text"}
        values["chunk_ns"] = tuple(int(t) for t in values["chunk_ns"])
        values["chunk_tokens"] = tuple(int(n) for n in values["chunk_tokens"])
        return cls(**values, text=row.get("text"))


_RECORD_FIELDS = tuple(f.name for f in fields(RequestRecord))


class RequestLog:
    """Appends to requests.jsonl: the header when opened, a line per ended request, the footer when closed.

    Every line is handed to the operating system at once. After a RecordsWriteError the file ends with its
    last whole line and the log takes nothing more.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str, t0_ns: int) -> None:
        self.path = Path(path)
        self.records = 0
        self.error: RecordsWriteError | None = None
        try:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  (open for the whole run)
        except OSError as exc:
            raise RecordsWriteError(self.path, exc) from exc
        self._size = 0
        self._line({"type": "header", "schema_version": SCHEMA_VERSION, "run": run, "t0_ns": t0_ns})

    def append(self, record: RequestRecord) -> None:
        """Raises RecordsWriteError when the disk takes no more."""
        self._write(record.to_json())
        self.records += 1

    def set_tokens(self, record_id: str, attempt: int, output_tokens: int) -> None:
        """A count known only after the run (the whole text retokenised): readers put it in the record."""
        self._line({"type": "tokens", "id": record_id, "attempt": attempt, "output_tokens": output_tokens})

    def close(self) -> None:
        """Write the footer. Closing twice does nothing; after a write error no footer is written."""
        if self._file.closed:
            return
        try:
            if self.error is None:
                self._line({"type": "footer", "records": self.records})
        finally:
            self._file.close()

    def _line(self, value: dict[str, Any]) -> None:
        self._write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))

    def _write(self, line: bytes) -> None:
        if self.error is not None:
            raise self.error
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as exc:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            self.error = RecordsWriteError(self.path, exc)
            raise self.error from exc
        self._size += len(line)


@dataclass(frozen=True, slots=True)
class RequestFile:
    """What requests.jsonl holds. closed: its footer is there; dropped: lines that could not be read."""

    run: str
    t0_ns: int
    records: list[RequestRecord]
    closed: bool
    dropped: int


def read_request_file(path: str | os.PathLike[str]) -> RequestFile:
    """requests.jsonl, also one that was cut off. Raises RecordsError if there is no readable header."""
    path = Path(path)
    header: dict[str, Any] | None = None
    rows: dict[tuple[str, int], RequestRecord] = {}
    counts: dict[tuple[str, int], int] = {}
    closed, dropped = False, 0
    for number, row in _json_lines(path):
        kind = row.get("type") if row is not None else None
        try:
            if row is not None and kind == "header":
                header = row
            elif row is not None and kind == "request":
                rows[row["id"], row["attempt"]] = RequestRecord.from_mapping(row)
            elif row is not None and kind == "tokens":
                counts[row["id"], row["attempt"]] = int(row["output_tokens"])
            elif row is not None and kind == "footer":
                closed = True
                if row["records"] != len(rows):
                    _warn(f"{path}: the footer counts {row['records']} records, {len(rows)} were read")
            else:
                raise KeyError("type")
        except (KeyError, TypeError, ValueError):
            dropped += 1
            _warn(f"{path}: line {number} is cut off or broken and was left out")
    if header is None:
        raise RecordsError(path, f"{path}: no header line; this is no record of a run")
    for key, tokens in counts.items():
        if key in rows:
            rows[key] = replace(rows[key], output_tokens=tokens, token_source="retokenised")
    return RequestFile(str(header["run"]), int(header["t0_ns"]), list(rows.values()), closed, dropped)


def read_requests(run_dir: str | os.PathLike[str]) -> list[RequestRecord]:
    """The client's records of a run, in the order in which the requests ended. Raises RecordsError."""
    return read_request_file(Path(run_dir) / "requests.jsonl").records


def requests_frame(records: Iterable[RequestRecord]) -> pd.DataFrame:
    """One row per request, columns as in REQUEST_COLUMNS; whole numbers are nullable Int64."""
    return _to_pandas(_requests_table(records))


def read_steps(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """The engine's iterations: steps.parquet, or steps.arrow as far as it goes; no rows without either."""
    return _to_pandas(_steps_table(Path(run_dir)))


def read_engine_requests(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """engine_requests.jsonl, columns as in ENGINE_REQUEST_COLUMNS; no rows if there is no such file."""
    return _to_pandas(_lines_table(Path(run_dir) / "engine_requests.jsonl", ENGINE_REQUEST_COLUMNS))


def read_telemetry(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """telemetry.jsonl, columns as in TELEMETRY_COLUMNS; no rows if there is no such file."""
    return _to_pandas(_lines_table(Path(run_dir) / "telemetry.jsonl", TELEMETRY_COLUMNS))


def read_meta(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """meta.json. Raises RecordsError if it is missing, broken or of another schema."""
    path = Path(run_dir) / "meta.json"
    try:
        meta = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecordsError(path, f"{path}: no such file; give the folder of a run") from None
    except (OSError, orjson.JSONDecodeError) as exc:
        raise RecordsError(path, f"{path}: cannot be read ({exc})") from None
    if not isinstance(meta, dict) or meta.get("schema_version") != SCHEMA_VERSION:
        version = meta.get("schema_version") if isinstance(meta, dict) else None
        raise RecordsError(path, f"{path}: schema_version {version}; this program reads {SCHEMA_VERSION}")
    return meta


def write_meta(run_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Replace meta.json in one step: a reader sees the old one or the new one. Raises RecordsWriteError."""
    write_json(Path(run_dir) / "meta.json", {"schema_version": SCHEMA_VERSION, **meta})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step. Raises RecordsWriteError."""
    data = orjson.dumps(
        value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    )
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise RecordsWriteError(path, exc) from exc


def finalise(run_dir: str | os.PathLike[str]) -> None:
    """Write requests, chunks, steps and telemetry as parquet, from whatever is on file; steps.arrow is then
    removed. May be called again. Raises RecordsWriteError and RecordsError."""
    folder = Path(run_dir)
    records = read_requests(folder)
    _write_parquet(_requests_table(records), folder / "requests.parquet")
    _write_parquet(_chunks_table(records), folder / "chunks.parquet")
    if (folder / "steps.arrow").exists() or not (folder / "steps.parquet").exists():
        _write_parquet(_steps_table(folder), folder / "steps.parquet")
        (folder / "steps.arrow").unlink(missing_ok=True)
    _write_parquet(_lines_table(folder / "telemetry.jsonl", TELEMETRY_COLUMNS), folder / "telemetry.parquet")


def _json_lines(path: Path) -> Iterable[tuple[int, dict[str, Any] | None]]:
    """(line number, object) for every line; None where a line holds no JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            yield number, row if isinstance(row, dict) else None


def _lines_table(path: Path, columns: dict[str, str]) -> pa.Table:
    import pyarrow as pa

    schema = _schema(columns)
    rows = []
    if path.exists():
        for number, row in _json_lines(path):
            if row is None:
                _warn(f"{path}: line {number} is cut off or broken and was left out")
            elif row.get("type") not in ("header", "footer"):
                rows.append(row)
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise RecordsError(path, f"{path}: a value is not of its column's type ({exc})") from exc


def _steps_table(folder: Path) -> pa.Table:
    """steps.arrow wins over steps.parquet: it is removed only once the parquet file is whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stream, table = folder / "steps.arrow", folder / "steps.parquet"
    if not stream.exists():
        return pq.read_table(table) if table.exists() else _schema(STEP_COLUMNS).empty_table()
    batches: list[pa.RecordBatch] = []
    schema = _schema(STEP_COLUMNS)
    try:
        with pa.OSFile(str(stream)) as file, pa.ipc.open_stream(file) as reader:
            schema = reader.schema
            while True:
                batches.append(reader.read_next_batch())
    except StopIteration:
        pass
    except (pa.ArrowInvalid, OSError, EOFError):
        _warn(f"{stream}: cut off after {sum(b.num_rows for b in batches)} rows; the rest was left out")
    return pa.Table.from_batches(batches, schema=schema)


def _requests_table(records: Iterable[RequestRecord]) -> pa.Table:
    import pyarrow as pa

    rows = list(records)
    columns = {name: [getattr(row, name) for row in rows] for name in REQUEST_COLUMNS}
    return pa.table(columns, schema=_schema(REQUEST_COLUMNS))


def _chunks_table(records: Iterable[RequestRecord]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in CHUNK_COLUMNS}
    for record in records:
        n = len(record.chunk_ns)
        columns["id"].extend([record.id] * n)
        columns["attempt"].extend([record.attempt] * n)
        columns["k"].extend(range(n))
        columns["t_ns"].extend(record.chunk_ns)
        columns["tokens"].extend(record.chunk_tokens)
    return pa.table(columns, schema=_schema(CHUNK_COLUMNS))


def _schema(columns: dict[str, str]) -> pa.Schema:
    import pyarrow as pa

    types = {
        "list<int64>": pa.list_(pa.int64()),
        "list<int32>": pa.list_(pa.int32()),
        "list<int8>": pa.list_(pa.int8()),
    }
    return pa.schema([(name, types.get(kind) or pa.type_for_alias(kind)) for name, kind in columns.items()])


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    """Whole numbers are nullable and stay whole: nanoseconds of a long-running host outgrow a float."""
    import pandas as pd
    import pyarrow as pa

    nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.int8(): pd.Int8Dtype()}
    return table.to_pandas(types_mapper=nullable.get)


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    partial = path.with_name(path.name + ".partial")
    try:
        pq.write_table(table, partial, compression="zstd")
        os.replace(partial, path)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise RecordsWriteError(path, exc) from exc


def _warn(message: str) -> None:
    warnings.warn(message, RecordsWarning, stacklevel=3)
