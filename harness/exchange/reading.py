"""A result file -> the summary of one result in it. The tool is found by what the file holds.

A file may hold several results (--append-result, a line a run, a sweep): FILE#2 is the second."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.exchange import aiperf, guidellm, sglang, vllm
from harness.exchange.result import ASSUMPTIONS, Result, ResultError, summary_of

MAX_BYTES = 512 * 1024 * 1024
PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\xfd7zXZ")  # gzip, zstd, zip, xz
TOOLS = (vllm, sglang, guidellm, aiperf)
KNOWN = "vllm bench serve, sglang.bench_serving, guidellm or aiperf"


def is_result(path: str | Path) -> bool:
    """Whether this names a file (FILE or FILE#k) and not a run directory."""
    return split(path)[0].is_file()


def split(path: str | Path) -> tuple[Path, int | None]:
    """FILE#2 -> (FILE, 2); a file that is really called so wins."""
    whole = re.fullmatch(r"(.+)#(\d{1,6})", str(path))
    return (Path(path), None) if whole is None or Path(path).exists() else (Path(whole[1]), int(whole[2]))


def imported(path: str | Path, assume: tuple[str, ...] = ()) -> dict[str, Any]:
    """The summary of a result. Raises ResultError in one line, whatever the file holds."""
    file, wanted = split(path)
    for name in assume:
        if name not in ASSUMPTIONS:
            raise ResultError(f"--assume {name}: unknown; choose from {', '.join(ASSUMPTIONS)}")
    assumed = frozenset(assume)
    try:
        found = results(load(file), assumed)
        if not found:
            raise ResultError(f"{file}: not a result of {KNOWN}")
        if wanted is None and len(found) > 1:
            raise ResultError(f"{file}: holds {len(found)} results; choose one, like {file}#1")
        chosen = 1 if wanted is None else wanted
        if not 1 <= chosen <= len(found):
            raise ResultError(f"{path}: there are {len(found)} results in it, counted from 1")
        name = file.name if wanted is None else f"{file.name}#{wanted}"
        return summary_of(found[chosen - 1], name, assumed)
    except aiperf.VersionError as error:
        raise ResultError(f"{file}: {error}") from None
    except RecursionError as error:
        raise ResultError(f"{file}: nested too deeply to be a result file") from error


def load(file: Path) -> list[dict[str, Any]]:
    """The objects of a file, one after the other (a document, JSON lines, or appended documents)."""
    try:
        with file.open("rb") as stream:  # a pipe or a device has no size to ask for
            data = stream.read(MAX_BYTES + 1)
        content = data.decode("utf-8-sig") if len(data) <= MAX_BYTES else ""
    except OSError as error:
        raise ResultError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        packed = "; unpack it first" if data.startswith(PACKED) else ""
        raise ResultError(f"{file}: no UTF-8 text (byte {error.start}){packed}") from error
    if len(data) > MAX_BYTES:
        raise ResultError(f"{file}: more than {MAX_BYTES} bytes; a result file has at most {MAX_BYTES}")
    if not content.strip():
        raise ResultError(f"{file}: empty")
    try:
        return list(objects(content))
    except ValueError as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ResultError(f"{file}: not JSON, or cut off: {what}{where}") from error


def objects(content: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(parse_constant=no_constant)
    space = re.compile(r"\s*")
    at = space.match(content).end()  # type: ignore[union-attr]
    while at < len(content):
        value, at = decoder.raw_decode(content, at)
        yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, dict))
        at = space.match(content, at).end()  # type: ignore[union-attr]


def no_constant(name: str) -> float:
    raise ValueError(f"{name} is no figure")


def results(values: list[dict[str, Any]], assumed: frozenset[str]) -> list[Result]:
    """Every result that these objects hold."""
    if values and all(aiperf.is_record(value) for value in values):
        return [aiperf.read_records(values, assumed)]
    found: list[Result] = []
    for value in (inner for outer in values for inner in benchmarks(outer)):
        tool = next((t for t in TOOLS if t.is_mine(value)), None)
        if tool is None:
            return []
        found.append(tool.read(value, assumed))
    return found


def benchmarks(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """GuideLLM's document as its benchmarks, each with the document's version; any other as it is."""
    inner = value.get("benchmarks")
    if not isinstance(inner, list):
        return [value]
    version = guidellm.part(value, "metadata").get("guidellm_version")
    return [{**item, "guidellm_version": version} for item in inner if isinstance(item, dict)]
