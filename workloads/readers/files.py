"""Trace files as numbered lines, plain or gzip, never more than one line in memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from workloads.errors import TraceError
from workloads.readers.rows import Rows
from workloads.readers.values import BadRow, shown

LONGEST_LINE = 1 << 20
LARGEST_DOCUMENT = 1 << 28  # bytes of a file that is one JSON value
_LFS = b"version https://git-lfs.github.com/spec/"

Line = tuple[int, str]


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO | io.BufferedReader]:
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for, a device has no end
        raise TraceError(path, "is no regular file; needs a trace, plain or gzip")
    try:
        with open(path, "rb") as plain:
            start = plain.peek(len(_LFS))
            if start.startswith(_LFS):
                raise TraceError(path, "is a Git LFS pointer, not the data; fetch it with: git lfs pull")
            # By content: a .gz that was unpacked keeps its name.
            zipped = start[:2] == b"\x1f\x8b"
            yield io.BufferedReader(gzip.GzipFile(fileobj=plain), 1 << 18) if zipped else plain
    except FileNotFoundError as exc:
        raise TraceError(path, "no such file; set workload.path to a trace") from exc
    except OSError as exc:
        raise TraceError(path, f"cannot be read ({exc.strerror or exc})") from exc


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes with the line end), without a byte order mark. Raises TraceError."""
    number = 0
    with _opened(path) as stream:
        try:
            while raw := stream.readline(LONGEST_LINE + 1):
                number += 1
                if len(raw) > LONGEST_LINE:
                    raise TraceError(path, f"is longer than {LONGEST_LINE} bytes; not a trace?", line=number)
                yield number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
            raise _damaged(path, exc, number + 1) from exc


def document(path: str) -> Any:
    """The one JSON value that a file is. Raises TraceError."""
    with _opened(path) as stream:
        try:
            data = stream.read(LARGEST_DOCUMENT + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
            raise _damaged(path, exc, 1) from exc
    if len(data) > LARGEST_DOCUMENT:
        raise TraceError(path, f"is longer than {LARGEST_DOCUMENT} bytes; one session is not")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise TraceError(path, f"is not JSON ({one_line(exc) or 'too deep'})") from exc


def head(path: str, size: int = 1 << 16) -> bytes:
    """The first bytes of what a file holds, to tell its format by."""
    with _opened(path) as stream:
        try:
            return stream.read(size).removeprefix(b"\xef\xbb\xbf")
        except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
            raise _damaged(path, exc, 1) from exc


def _damaged(path: str, exc: Exception, line: int) -> TraceError:
    return TraceError(path, f"gzip data is cut short or damaged ({exc}); fetch the file again", line=line)


def decoded(path: str, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as exc:
        raise TraceError(path, f"byte {exc.start} is not UTF-8 text", line=number) from exc


def each_line(
    path: str, rows: Rows, parse: Callable[[str], None], lines: Iterator[tuple[int, bytes]]
) -> None:
    """Parse what is left of `lines` until there are rows enough. Blank lines are passed over; a bad row is
    raised as TraceError, or counted."""
    for number, raw in lines:
        if rows.full:
            return
        try:
            text = decoded(path, number, raw)
            if text:
                parse(text)
        except BadRow as bad:
            rows.bad(TraceError(path, bad.reason, line=number, column=bad.column), bad)
        except OverflowError as exc:  # a column holds 64 bits
            rows.bad(TraceError(path, f"has a number that is too large ({one_line(exc)})", line=number), exc)
        except TraceError as exc:
            rows.bad(exc, exc)


def each_object(path: str, rows: Rows, parse: Callable[[dict[str, Any]], None]) -> None:
    """The JSON objects of a file with one a line."""

    def line(text: str) -> None:
        parse(json_object(text))

    each_line(path, rows, line, raw_lines(path))


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a line. Raises BadRow."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise BadRow(f"is not JSON ({one_line(exc) or 'too deep'})") from exc
    if not isinstance(row, dict):
        raise BadRow(f"{shown(text)} is not a JSON object")
    return row


def each_record(
    path: str, rows: Rows, columns: tuple[str, ...], parse: Callable[[list[str]], None], *optional: str
) -> None:
    """The rows of a CSV file by the names in its header: parse gets the fields of `columns`, in their order,
    without spaces around them, then those of the `optional` columns, "" where the file has none."""
    lines = raw_lines(path)
    number, header = next(((number, raw) for number, raw in lines if raw.strip()), (1, b""))
    text = decoded(path, number, header)
    try:
        names = [name.strip() for name in csv_fields(text)]
    except BadRow as bad:
        raise TraceError(path, bad.reason, line=number) from bad
    for column in columns:
        if names.count(column) != 1:
            reason = f"header has this column {names.count(column)} times, needs {','.join(columns)}"
            raise TraceError(path, f"{reason}; found {shown(text)}", line=number, column=column)
    at = [names.index(column) if column in names else -1 for column in (*columns, *optional)]
    count = len(names)

    def record(text: str) -> None:
        fields = csv_fields(text)
        if len(fields) != count:
            raise BadRow(f"has {len(fields)} fields, the header has {count}")
        fields.append("")  # at -1
        parse([fields[i].strip() for i in at])

    each_line(path, rows, record, lines)


def csv_fields(text: str) -> list[str]:
    """The fields of one line of CSV. Raises BadRow."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as exc:
        raise BadRow(f"is not CSV ({exc})") from exc


def one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())
