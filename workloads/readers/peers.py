"""Trace files of other load generators: vLLM's timed_trace, AIPerf's and genai-perf's mooncake_trace, NVIDIA
Dynamo's rows. Mooncake's keys or other names for them.

In a file with sessions a turn adds to its session, as AIPerf replays it: the prompt is the one before, the
answer to it, and the row's own tokens; `delay` counts from that answer. Rows that carry text instead of a
count of tokens are refused: how many tokens it has depends on the tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from workloads.readers.files import each_object
from workloads.readers.mooncake import checked_ids
from workloads.readers.rows import BLOCK_SIZES, Rows
from workloads.readers.values import BadRow, time_ns, tokens

INPUT = ("input_length", "input_tokens")
OUTPUT = ("output_length", "output_tokens")
TIME = ("timestamp", "created_time")
DELAY = ("delay", "delay_ms")
TEXT = ("text_input", "text", "messages", "payload")


def read(path: str, rows: Rows) -> None:
    rows.block_sizes = BLOCK_SIZES
    rows.part_names = ("block", "answer", "row")
    sessions: dict[str, _Session] = {}
    first: list[tuple[bool, bool]] = []  # of the first row: has it a time, has it a session

    def record(row: dict[str, Any]) -> None:
        text = next((key for key in TEXT if row.get(key) is not None), None)
        if text is not None and _first(row, INPUT) is None:
            raise BadRow("carries text; needs input_length, the number of its tokens", text)
        new = tokens(*_given(row, INPUT))
        answer = tokens(*_given(row, OUTPUT))
        name = None if row.get("session_id") is None else str(row["session_id"])
        delay_ns, at = (_time(row, names) for names in (DELAY, TIME))
        before = None if name is None else sessions.get(name)
        if at is None and before is not None:
            at = None if before.at is None else before.at + (delay_ns or 0)
        timed, in_sessions = first[0] if first else (at is not None, name is not None)
        if (at is not None) != timed:
            raise BadRow("is missing" if timed else "is there, and was missing before", TIME[0])
        if name is not None and not in_sessions:
            raise BadRow("is there, and was missing in the first row", "session_id")
        ids = checked_ids(rows, row.get("hash_ids"), new)
        first.append((timed, in_sessions)) if not first else None
        if not in_sessions:
            rows.add(at, new, answer)
            rows.add_ids(ids)
            return
        size = rows.block_sizes[0]
        parts = [(0, number, size) for number in ids[:-1]]
        rest = new - size * len(parts)
        parts.append((0, ids[-1], rest) if ids else (2, len(rows), rest))
        if before is not None:
            rows.closed |= delay_ns is not None
            parts = [*before.parts, (1, len(rows), before.answer), *parts]
        think = math.nan if before is None or delay_ns is None else delay_ns / 1e9
        rows.add(at, sum(part[2] for part in parts), answer, session=name, think_s=think)
        rows.add_parts(parts)
        if name is not None:
            sessions[name] = _Session(at, answer, parts)

    each_object(path, rows, record)


@dataclass(frozen=True, slots=True)
class _Session:
    """Its last request."""

    at: int | None
    answer: int
    parts: list[tuple[int, int, int]]


def _time(row: dict[str, Any], names: tuple[str, ...]) -> int | None:
    key = _first(row, names)
    return None if key is None else time_ns(row[key], key, "milliseconds", 1e6)


def _first(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _given(row: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, str]:
    name = _first(row, names)
    if name is None:
        raise BadRow(f"is missing; needs {' or '.join(names)}", names[0])
    return row[name], name
