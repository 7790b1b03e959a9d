"""requests.jsonl: what the client appends while a load runs, and how it is read afterwards.

Appending is one write per line straight to the operating system, so what has ended is on file when a process
dies. A reader takes a file as a kill -9 or a full disk left it: a line that was cut off is dropped, and a
RecordsWarning says so. The contract, field by field, is in docs/architecture.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

SCHEMA_VERSION = 1
REQUESTS = "requests.jsonl"
OUTCOMES = ("completed", "failed", "timed_out", "rejected", "cancelled", "cut_off")
TOKEN_SOURCES = ("usage", "ids", "retokenised")


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
    final: bool = True  # False: this attempt was followed by a retry
    first_output_ns: int | None = None  # the first chunk with a token that is no reasoning
    reasoning_tokens: int | None = None  # of output_tokens, as the server counted them
    reads: int = 0  # reads of the socket that brought body bytes; 0 where they were not counted
    coalesced: int = 0  # token-bearing chunks that came in one read with an earlier one
    cached_tokens: int | None = None  # of prompt_tokens, found in the server's prefix cache, as it says
    transport: str = "http"  # or websocket
    text: str | None = None

    def to_json(self) -> bytes:
        """The line of requests.jsonl, with its newline. `text` is left out when it was not kept."""
        line = dict(zip(_LINE_FIELDS, ("request", *_values(self)), strict=True))
        if self.text is None:
            del line["text"]
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> RequestRecord:
        """From a decoded line. Raises KeyError for a missing field without a default; unknown fields are
        left out."""
        values = {name: row[name] for name in _RECORD_FIELDS if name in row or name not in _DEFAULTED}
        values["chunk_ns"] = tuple(int(t) for t in values["chunk_ns"])
        values["chunk_tokens"] = tuple(int(n) for n in values["chunk_tokens"])
        return cls(**values)


_RECORD_FIELDS = tuple(f.name for f in fields(RequestRecord))
_LINE_FIELDS = ("type", *_RECORD_FIELDS)
_values = attrgetter(*_RECORD_FIELDS)
_DEFAULTED = frozenset(f.name for f in fields(RequestRecord) if f.default is not MISSING)


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
        self._write(_header(run, t0_ns))

    def append(self, record: RequestRecord) -> None:
        """Raises RecordsWriteError when the disk takes no more."""
        self._write(record.to_json())
        self.records += 1

    def extend(self, records: Sequence[RequestRecord]) -> None:
        """Several at once, in one write: for those that nobody waits for. Raises RecordsWriteError, and then
        none of them is kept."""
        self._write(b"".join(record.to_json() for record in records))
        self.records += len(records)

    def set_tokens(self, record_id: str, attempt: int, output_tokens: int) -> None:
        """A count known only after the run (the whole text retokenised): readers put it in the record."""
        line = {"type": "tokens", "id": record_id, "attempt": attempt, "output_tokens": output_tokens}
        self._write(_line(line))

    def close(self) -> None:
        """Write the footer. Closing twice does nothing; after a write error no footer is written."""
        if self._file.closed:
            return
        try:
            if self.error is None:
                self._write(_footer(self.records))
        finally:
            self._file.close()

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
    for number, row in json_lines(path):
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
                    warn(f"{path}: the footer counts {row['records']} records, {len(rows)} were read")
            else:
                raise KeyError("type")
        except (KeyError, TypeError, ValueError):
            dropped += 1
            warn(f"{path}: line {number} is cut off or broken and was left out")
    if header is None:
        raise RecordsError(path, f"{path}: no header line; this is no record of a run")
    for key, tokens in counts.items():
        if key in rows:
            rows[key] = replace(rows[key], output_tokens=tokens, token_source="retokenised")
    return RequestFile(str(header["run"]), int(header["t0_ns"]), list(rows.values()), closed, dropped)


def read_run_file(run_dir: str | os.PathLike[str]) -> RequestFile:
    """The client's records of a run: requests.jsonl, or the parts of its workers as a kill left them before
    they were merged. Both give the same records in the same order. Raises RecordsError and
    FileNotFoundError."""
    folder = Path(run_dir)
    parts = part_paths(folder)
    if (folder / REQUESTS).exists() or not parts:
        return read_request_file(folder / REQUESTS)  # it is put in its place whole: parts beside it are in it
    files: list[RequestFile] = []
    empty: list[RecordsError] = []
    for path in parts:
        try:
            files.append(read_request_file(path))
        except RecordsError as error:  # its worker died before it had written anything
            empty.append(error)
    if not files:
        raise empty[0]
    records = {(r.id, r.attempt): r for file in files for r in file.records}
    return RequestFile(
        files[0].run,
        files[0].t0_ns,
        sorted(records.values(), key=_by_end),
        closed=not empty and all(file.closed for file in files),
        dropped=sum(file.dropped for file in files),
    )


def read_requests(run_dir: str | os.PathLike[str]) -> list[RequestRecord]:
    """The client's records of a run, in the order in which the requests ended. Raises RecordsError."""
    return read_run_file(run_dir).records


def merge_parts(
    run_dir: str | os.PathLike[str], file: RequestFile, *, missing: Iterable[RequestRecord] = ()
) -> None:
    """Make one requests.jsonl, with its footer, of what the workers left (`file`, from read_run_file) and of
    `missing`, records that none of them wrote. It appears whole or not at all; then the parts go. Raises
    RecordsWriteError, and then the parts stay as they are."""
    folder = Path(run_dir)
    whole, partial = folder / REQUESTS, folder / f"{REQUESTS}.partial"
    records = sorted([*file.records, *missing], key=_by_end)
    try:
        with open(partial, "wb") as out:
            out.write(_header(file.run, file.t0_ns))
            out.writelines(record.to_json() for record in records)
            out.write(_footer(len(records)))
        os.replace(partial, whole)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise RecordsWriteError(whole, exc) from exc
    for path in part_paths(folder):
        path.unlink(missing_ok=True)


def part_name(number: int, of: int) -> str:
    """The file that worker `number` (from 0) of `of` writes: one worker needs no merging."""
    return REQUESTS if of == 1 else f"requests.{number}.jsonl"


def part_paths(folder: Path) -> list[Path]:
    """The parts in a run directory, in the order of their workers."""
    numbered = [(int(m[1]), path) for path in folder.glob("requests.*.jsonl") if (m := _PART(path.name))]
    return [path for _, path in sorted(numbered)]


_PART = re.compile(r"requests\.(\d+)\.jsonl").fullmatch


def is_closed(path: Path) -> bool:
    """Whether its log was closed and had lost nothing: the last line is the footer. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 256))
        last = file.read().splitlines()[-1:]
    try:
        return bool(last) and orjson.loads(last[0]).get("type") == "footer"
    except (orjson.JSONDecodeError, AttributeError):
        return False


def _by_end(record: RequestRecord) -> tuple[bool, int, str, int]:
    """In order of their ends, then those that never were under way."""
    moment = record.intended_ns if record.end_ns is None else record.end_ns
    return record.end_ns is None, moment, record.id, record.attempt


def _header(run: str, t0_ns: int) -> bytes:
    return _line({"type": "header", "schema_version": SCHEMA_VERSION, "run": run, "t0_ns": t0_ns})


def _footer(records: int) -> bytes:
    return _line({"type": "footer", "records": records})


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def json_lines(path: Path) -> Iterable[tuple[int, dict[str, Any] | None]]:
    """(line number, object) for every line; None where a line holds no JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            yield number, row if isinstance(row, dict) else None


def warn(message: str) -> None:
    warnings.warn(message, RecordsWarning, stacklevel=3)
