"""The records of a run: what client and engine append while it runs, and how they are read afterwards.

Appending is one write per line straight to the operating system, so what has ended is on file when a process
dies. Readers take files as a kill -9 or a full disk left them: a line or an Arrow batch that was cut off is
dropped, and a RecordsWarning says so. The contract, field by field, is in docs/architecture.md.

pandas and pyarrow are imported where they are used: pointing a load at a server needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from harness.request_log import (
    OUTCOMES,
    SCHEMA_VERSION,
    TOKEN_SOURCES,
    RecordsError,
    RecordsWarning,
    RecordsWriteError,
    RequestFile,
    RequestLog,
    RequestRecord,
    json_lines,
    merge_parts,
    part_name,
    part_paths,
    read_request_file,
    read_requests,
    read_run_file,
    warn,
)
from workloads import output

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = [
    "OUTCOMES",
    "SCHEMA_VERSION",
    "TOKEN_SOURCES",
    "RecordsError",
    "RecordsWarning",
    "RecordsWriteError",
    "RequestFile",
    "RequestLog",
    "RequestRecord",
    "merge_parts",
    "part_name",
    "part_paths",
    "read_request_file",
    "read_requests",
    "read_run_file",
]

INT64, INT32, INT8, FLOAT, TEXT, BOOL = "int64", "int32", "int8", "float64", "string", "bool"

STEP_COLUMNS = {
    **dict.fromkeys(("step", "start_ns", "duration_ns", "host_gap_ns"), INT64),
    **dict.fromkeys(("num_seqs", "prefill_tokens", "decode_tokens", "ended_rows", "left_pad_tokens"), INT64),
    **dict.fromkeys(("recomputed_tokens", "cached_tokens", "backend_pad_rows", "waiting", "running"), INT64),
    **dict.fromkeys(("kv_live", "kv_cached", "kv_free", "preemptions", "refusals"), INT64),
    **dict.fromkeys(("swapped_out", "swapped_in"), INT64),
    "ids": "list<int64>",
    "tokens": "list<int32>",
    "kind": "list<int8>",
    "preempted": "list<int64>",
    "blocked": TEXT,
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
    **dict.fromkeys(("output_tokens", "preemptions", "recomputed_tokens", "cached_tokens", "swaps"), INT64),
    "abort_state": TEXT,
    "abort_seen_ns": INT64,
    "wasted_tokens": INT64,
}
TELEMETRY_COLUMNS = {
    "t_ns": INT64,
    **dict.fromkeys(("server_cpu_pct", "server_rss_mb", "client_cpu_pct", "client_rss_mb"), FLOAT),
    **dict.fromkeys(("gpu_util_pct", "gpu_memory_gb", "gpu_power_w", "gpu_energy_j"), FLOAT),
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
    "final": BOOL,
    **dict.fromkeys(("first_output_ns", "reasoning_tokens", "reads", "coalesced", "cached_tokens"), INT64),
    "transport": TEXT,
    "text": TEXT,
}


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
    try:
        output.whole(path, data)
    except OSError as exc:
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


def _lines_table(path: Path, columns: dict[str, str]) -> pa.Table:
    import pyarrow as pa

    schema = _schema(columns)
    rows = []
    if path.exists():
        for number, row in json_lines(path):
            if row is None:
                warn(f"{path}: line {number} is cut off or broken and was left out")
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
        warn(f"{stream}: cut off after {sum(b.num_rows for b in batches)} rows; the rest was left out")
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
