"""Which format a trace has, told by what it holds and never by its name."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

from workloads.errors import TraceError
from workloads.readers import burstgpt, lengths, peers, ragpulse, requestlog, servegen, tracelab, weka
from workloads.readers.azure import COLUMNS as AZURE
from workloads.readers.files import csv_fields, decoded, head
from workloads.readers.values import BadRow, shown

_LINES = 100  # of a JSONL file, at most, until one tells its format
KINDS = "a CSV or JSONL trace"

_HEADERS = (
    ("burstgpt", burstgpt.COLUMNS),
    ("weka", weka.CSV_COLUMNS),
    ("servegen", servegen.COLUMNS),
    ("tracelab", tracelab.COLUMNS),
    ("lengths", lengths.COLUMNS),
)
_KEYS = (
    ("bailian", ("parent_chat_id",)),
    ("tracelab", ("timing_events", "input_tokens_total")),
    ("burstgpt", ("request_arrival_ts_s",)),
    ("servegen", ("img_ids",)),
)
_CHUNK_ROW = re.compile(r"[\d.]+,[\d.eE+-]+,[^,]*,\s*[A-Za-z]*\s*(,[^,]*){0,2}", re.ASCII)


def detect(path: str) -> str:
    """The name of the format. Raises TraceError."""
    if Path(path).is_dir():
        return _of_folder(Path(path))
    start = head(path)
    first, end, _ = start.lstrip().partition(b"\n")
    line = decoded(path, 1, first) if end else first.decode("utf-8", "replace").strip()
    if not line:
        raise TraceError(path, f"is empty; needs {KINDS}")
    if line.startswith("{"):
        return _of_objects(line, start)
    found = _of_header(line)
    if found is None:
        reason = f"begins with {shown(line)}, no header or JSON object of a known trace"
        raise TraceError(path, f"{reason}; set workload.format (fit, convert: --format)", line=1)
    return found


def _of_folder(folder: Path) -> str:
    if ragpulse.trace_file(folder):
        return "ragpulse"
    if servegen.chunk_files(folder):
        return "servegen"
    if weka.session_files(folder):
        return "weka"
    raise TraceError(
        str(folder),
        "is no regular file, and no folder with 0_trace.jsonl (RAGPulse), session *.json (Weka) or "
        "chunk-*-trace.csv (ServeGen)",
    )


def _of_header(line: str) -> str | None:
    try:
        names = {name.strip() for name in csv_fields(line)}
    except BadRow:
        return None
    for format, columns in _HEADERS:
        if names.issuperset(columns):
            return format
    if AZURE[0] in names:
        return "azure"
    return "servegen" if _CHUNK_ROW.fullmatch(line) else None


def _of_objects(first: str, start: bytes) -> str:
    """By the first line that tells: a log may begin with a failed request, which has no counts."""
    whole = start.decode("utf-8", "replace").splitlines()[:-1]
    for line in (first, *islice(whole, 1, _LINES)):
        row = _object(line)
        found = None if row is None else _of_row(row)
        if found is not None:
            return found
    row = _object(first)
    if row is None:  # longer than the first bytes, printed over several lines, or broken
        return "weka" if b'"requests"' in start and b'"input_length"' not in start else "mooncake"
    return "mooncake" if "timestamp" in row else "aiperf"


def _object(line: str) -> dict[str, Any] | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _of_row(row: dict[str, Any]) -> str | None:
    if isinstance(row.get("requests"), list):
        return "weka"
    if isinstance(row.get("hash_ids"), dict):
        return "ragpulse"
    for format, keys in _KEYS:
        if any(key in row for key in keys):
            return format
    if requestlog.looks_like(row):
        return "requestlog"
    if "request_id" in row and "timestamp" not in row:
        return "servegen"
    if not any(key in row for key in (*peers.INPUT, *peers.TEXT)):
        return None
    others = (*peers.INPUT[1:], *peers.TIME[1:], *peers.OUTPUT[1:], *peers.DELAY, *peers.TEXT, "session_id")
    return "aiperf" if any(key in row for key in others) or "timestamp" not in row else "mooncake"
