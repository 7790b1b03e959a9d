"""Reading trace files, row by row: Azure's CSV and Mooncake's JSONL, plain or gzip.

Whatever is wrong is one line that names the file, the line, the column and the reason. A bad row can be
skipped and counted; a file that cannot be read to its end, or whose header is wrong, cannot.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from workloads.errors import TraceError, WorkloadError
from workloads.trace import Blocks, Trace

FORMATS = ("auto", "azure", "mooncake")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
BLOCK_TOKENS = 512  # of a Mooncake hash id
MOST_TOKENS = 10_000_000  # a length above this is a broken row, not a prompt
_LONGEST_LINE = 1 << 20
_STAMP = re.compile(
    r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:\.(\d{1,12}))?(Z|[+-]\d{2}:?\d{2})?", re.ASCII
)
_WHOLE = re.compile(r"[+-]?\d{1,300}(\.0*)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    time_ns: int  # on the trace's own clock
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None  # one for each started block of BLOCK_TOKENS prompt tokens


def read_trace(
    path: str | Path, *, format: str = "auto", limit: int | None = None, on_bad_row: str = "error"
) -> Trace:
    """Read at most `limit` usable rows, no further into the file than that needs. Raises TraceError."""
    if format not in FORMATS:
        raise WorkloadError(f"workload.format={format}: choose from {', '.join(FORMATS)}")
    path = str(Path(path).expanduser())
    lines = _numbered_lines(path)
    first = next(((number, raw) for number, raw in lines if raw.strip()), None)
    if first is None:
        raise TraceError(path, "is empty; needs an Azure CSV or a Mooncake JSONL trace")
    head = _decode(path, *first)
    found = _detect(path, head) if format == "auto" else format
    parse: Callable[[str, int, str], TraceRow]
    if found == "azure":
        parse = _azure_parser(path, first[0], head)
        rest: Iterator[tuple[int, bytes]] = lines
    else:
        parse = _mooncake_row
        rest = chain([first], lines)

    rows: list[TraceRow] = []
    skipped = 0
    first_bad = ""
    for number, raw in rest:
        if limit is not None and len(rows) >= limit:
            break
        if not raw.strip():
            continue
        try:
            rows.append(parse(path, number, _decode(path, number, raw)))
        except TraceError as exc:
            if on_bad_row != "skip":
                raise
            skipped += 1
            first_bad = first_bad or str(exc)
    if not rows:
        reason = (
            f"has no usable row; skipped {skipped}, first: {first_bad}"
            if skipped
            else "has a header but no rows"
        )
        raise TraceError(path, reason)
    notes = [f"{skipped} bad rows skipped, first: {first_bad}"] if skipped else []
    falls = sum(b.time_ns < a.time_ns for a, b in pairwise(rows))
    if falls:
        rows.sort(key=lambda row: row.time_ns)  # stable: rows of one time keep the order of the file
        notes.append(f"timestamps go back {falls} times; rows sorted by time")
    blocks = None
    if any(row.hash_ids for row in rows):
        start = np.concatenate([[0], np.cumsum([len(row.hash_ids or ()) for row in rows])])
        ids = np.array([i for row in rows for i in row.hash_ids or ()], dtype=np.int64)
        blocks = Blocks(start.astype(np.int64), ids, BLOCK_TOKENS)
    return Trace(
        path=path,
        format=found,
        time_ns=np.array([row.time_ns for row in rows], dtype=np.int64),
        input_tokens=np.array([row.input_tokens for row in rows], dtype=np.int64),
        output_tokens=np.array([row.output_tokens for row in rows], dtype=np.int64),
        blocks=blocks,
        skipped=skipped,
        notes=tuple(notes),
    )


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for, a device has no end
        raise TraceError(
            path, "is no regular file; needs an Azure CSV or a Mooncake JSONL trace, plain or gzip"
        )
    try:
        with open(path, "rb") as plain:
            zipped = plain.peek(2)[:2] == b"\x1f\x8b"  # by content: a .gz that was unpacked keeps its name
            stream: BinaryIO | io.BufferedReader = (
                io.BufferedReader(gzip.GzipFile(fileobj=plain)) if zipped else plain
            )
            while raw := stream.readline(_LONGEST_LINE + 1):
                number += 1
                if len(raw) > _LONGEST_LINE:
                    raise TraceError(path, f"is longer than {_LONGEST_LINE} bytes; not a trace?", line=number)
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                yield number, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
        reason = f"gzip data is cut short or damaged ({exc}); fetch the file again"
        raise TraceError(path, reason, line=number + 1) from exc
    except FileNotFoundError as exc:
        raise TraceError(path, "no such file; set workload.path to a trace") from exc
    except OSError as exc:
        raise TraceError(path, f"cannot be read ({exc.strerror or exc})") from exc


def _decode(path: str, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as exc:
        raise TraceError(path, f"byte {exc.start} is not UTF-8 text", line=number) from exc


def _detect(path: str, head: str) -> str:
    if head.startswith("{"):
        return "mooncake"
    if AZURE_COLUMNS[0] in head:
        return "azure"
    raise TraceError(
        path,
        f"begins with {_shown(head)}, neither the header {','.join(AZURE_COLUMNS)} nor a JSON object; "
        "set workload.format to azure or mooncake",
        line=1,
    )


def _azure_parser(path: str, number: int, header: str) -> Callable[[str, int, str], TraceRow]:
    names = [name.strip() for name in _csv_fields(path, number, header)]
    for column in AZURE_COLUMNS:
        if names.count(column) != 1:
            reason = f"header has this column {names.count(column)} times, needs {','.join(AZURE_COLUMNS)}"
            raise TraceError(path, f"{reason}; found {_shown(header)}", line=number, column=column)
    at = [names.index(column) for column in AZURE_COLUMNS]

    def parse(path: str, number: int, line: str) -> TraceRow:
        fields = _csv_fields(path, number, line)
        if len(fields) != len(names):
            raise TraceError(path, f"has {len(fields)} fields, the header has {len(names)}", line=number)
        stamp, context, generated = (fields[i].strip() for i in at)
        return TraceRow(
            time_ns=_stamp_ns(path, number, stamp),
            input_tokens=_tokens_text(path, number, AZURE_COLUMNS[1], context),
            output_tokens=_tokens_text(path, number, AZURE_COLUMNS[2], generated),
        )

    return parse


def _csv_fields(path: str, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as exc:
        raise TraceError(path, f"is not CSV ({exc})", line=number) from exc


def _stamp_ns(path: str, number: int, text: str) -> int:
    """Nanoseconds since 1970. Takes any number of fractional digits, also none, and times without a zone as
    UTC."""
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        day, clock, fraction, zone = match.groups()
        moment = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}")
    except ValueError:
        reason = f"{_shown(text)} is not a time such as 2023-11-16 18:15:46.6805900"
        raise TraceError(path, reason, line=number, column=AZURE_COLUMNS[0]) from None
    whole = (moment - _EPOCH) // timedelta(seconds=1)
    return whole * 1_000_000_000 + int((fraction or "")[:9].ljust(9, "0"))


def _tokens_text(path: str, number: int, column: str, text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise TraceError(path, f"{_shown(text)} is not a whole number", line=number, column=column)
    return _tokens(path, number, column, int(text.split(".")[0]))


def _tokens(path: str, number: int, column: str, tokens: int) -> int:
    if tokens < 1:
        raise TraceError(path, f"{_shown(tokens)} is below 1 token", line=number, column=column)
    if tokens > MOST_TOKENS:
        raise TraceError(path, f"{_shown(tokens)} is above {MOST_TOKENS} tokens", line=number, column=column)
    return tokens


def _mooncake_row(path: str, number: int, line: str) -> TraceRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise TraceError(path, f"is not JSON ({exc or 'too deep'})", line=number) from exc
    if not isinstance(row, dict):
        raise TraceError(path, f"{_shown(line)} is not a JSON object", line=number)
    for key in MOONCAKE_KEYS:
        if key not in row:
            raise TraceError(path, f"is missing; needs {', '.join(MOONCAKE_KEYS)}", line=number, column=key)
    stamp = row["timestamp"]
    if not _is_number(stamp) or not 0 <= stamp < 1e15:
        reason = f"{_shown(stamp)} is not a time in milliseconds of 0 or more"
        raise TraceError(path, reason, line=number, column="timestamp")
    tokens = []
    for key in MOONCAKE_KEYS[1:]:
        value = row[key]
        if not _is_number(value) or value != int(value):
            raise TraceError(path, f"{_shown(value)} is not a whole number", line=number, column=key)
        tokens.append(_tokens(path, number, key, int(value)))
    return TraceRow(round(stamp * 1e6), tokens[0], tokens[1], _hash_ids(path, number, row, tokens[0]))


def _hash_ids(path: str, number: int, row: dict[str, Any], input_tokens: int) -> tuple[int, ...] | None:
    ids = row.get("hash_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        reason = f"{_shown(ids)} is not a list of whole numbers of 0 or more"
        raise TraceError(path, reason, line=number, column="hash_ids")
    blocks = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) != blocks:
        reason = f"has {len(ids)} ids, {input_tokens} tokens need {blocks} blocks of {BLOCK_TOKENS}"
        raise TraceError(path, reason, line=number, column="hash_ids")
    return tuple(ids)


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
