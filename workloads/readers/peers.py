"""Trace files of other load generators: vLLM's timed_trace, AIPerf's and genai-perf's mooncake_trace, NVIDIA
Dynamo's rows. Mooncake's keys or other names for them, with sessions whose later turns have a delay.

Rows that carry text instead of a count of tokens are refused: how many tokens it has depends on the
tokenizer."""

from __future__ import annotations

import math
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
    last_ns: dict[str, int] = {}  # of each session
    timed: list[bool] = []

    def record(row: dict[str, Any]) -> None:
        text = next((key for key in TEXT if row.get(key) is not None), None)
        if text is not None and _first(row, INPUT) is None:
            raise BadRow("carries text; needs input_length, the number of its tokens", text)
        prompt = tokens(*_given(row, INPUT))
        answer = tokens(*_given(row, OUTPUT))
        session = None if row.get("session_id") is None else str(row["session_id"])
        delay_ns = None
        if (key := _first(row, DELAY)) is not None:
            delay_ns = time_ns(row[key], key, "milliseconds", 1e6)
        at = None
        if (key := _first(row, TIME)) is not None:
            at = time_ns(row[key], key, "milliseconds", 1e6)
        elif session in last_ns:
            at = last_ns[session] + (delay_ns or 0)
        if not timed:
            timed.append(at is not None)
        if (at is not None) != timed[0]:
            raise BadRow("is missing" if timed[0] else "is there, and was missing before", TIME[0])
        ids = checked_ids(rows, row.get("hash_ids"), prompt)
        follows = session is not None and session in last_ns
        if follows and delay_ns is not None:
            rows.closed = True
        think = delay_ns / 1e9 if follows and delay_ns is not None else math.nan
        rows.add(at, prompt, answer, session=session, think_s=think)
        rows.add_ids(ids)
        if session is not None:
            last_ns[session] = at or 0

    each_object(path, rows, record)


def _first(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _given(row: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, str]:
    name = _first(row, names)
    if name is None:
        raise BadRow(f"is missing; needs {' or '.join(names)}", names[0])
    return row[name], name
