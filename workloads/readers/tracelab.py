"""TraceLab's coding-agent traces: JSONL with one model call a row, whose `timing_events` begin with what was
asked and end with the last of the answer; and its CSV export, which numbers calls instead and whose arrivals
are synthetic (ms, of sessions).

The CSV's input_len counts the appended tokens alone."""

from __future__ import annotations

import math
from typing import Any

from workloads.readers.files import each_object, each_record, head
from workloads.readers.rows import Rows
from workloads.readers.values import BadRow, needed, number_text, shown, stamp_ns, tokens, tokens_text

KEYS = ("session_id", "input_tokens_total", "output_tokens", "timing_events")
COLUMNS = ("id", "input_len", "output_len", "arrival_time", "round_idx", "tool_wait_after_ms", "prefix_len")
ASKS = ("user_message", "tool_result")
"""Events that come before the answer."""


def read(path: str, rows: Rows) -> None:
    if head(path).lstrip().startswith(b"{"):
        each_object(path, rows, lambda row: _call(rows, row))
    else:
        _read_csv(path, rows)


def _call(rows: Rows, row: dict[str, Any]) -> None:
    needed(row, *KEYS)
    prompt = tokens(row["input_tokens_total"], "input_tokens_total")
    reused = tokens(row.get("prefix_tokens") or 0, "prefix_tokens", 0)
    if reused > prompt:
        raise BadRow(f"{reused} is above input_tokens_total={prompt}", "prefix_tokens")
    answer = tokens(row["output_tokens"], "output_tokens", 0)
    events = row["timing_events"]
    if not isinstance(events, list) or not events or not all(isinstance(event, dict) for event in events):
        raise BadRow(f"{shown(events)} is not a list of events with a timestamp", "timing_events")
    stamps = [
        (stamp_ns(event.get("timestamp"), "timing_events.timestamp"), event.get("event_type"))
        for event in events
    ]
    begin = stamps[0][0]
    for stamp, kind in stamps:
        if kind not in ASKS:
            break
        begin = stamp
    asked = stamps[0][1]
    rows.raised += answer == 0
    rows.add(
        begin,
        prompt,
        max(answer, 1),
        reused_tokens=reused,
        session=str(row["session_id"]),
        user=None if row.get("provider") is None else str(row["provider"]),
        request_class=asked if isinstance(asked, str) and asked in ASKS else None,
        latency_s=max(0, stamps[-1][0] - begin) / 1e9,
    )


def _read_csv(path: str, rows: Rows) -> None:
    """The times of later calls are the earliest ones, as if answers took no time."""
    waits: dict[str, tuple[float, float]] = {}  # session: ms waited so far, ms after its last call

    def record(fields: list[str]) -> None:
        session, appended, answer, arrival, number, wait, prefix = fields
        at_ms = number_text(arrival, COLUMNS[3])
        wait_ms = number_text(wait, COLUMNS[5]) if wait else 0.0
        reused = tokens_text(prefix, COLUMNS[6], 0)
        new, made = tokens_text(appended, COLUMNS[1]), tokens_text(answer, COLUMNS[2])
        before = waits.get(session)
        if before is None and number != "0":
            raise BadRow(f"{shown(number)} is the first of id {shown(session)}, needs 0", COLUMNS[4])
        waited = 0.0 if before is None else sum(before)
        rows.add(
            round((at_ms + waited) * 1e6),
            new + reused,
            made,
            reused_tokens=reused,
            session=session,
            think_s=math.nan if before is None else before[1] / 1e3,
        )
        waits[session] = (waited, wait_ms)

    each_record(path, rows, COLUMNS, record)
    rows.closed = True
    rows.notes.append("arrivals of sessions are synthetic (Poisson), as TraceLab's export makes them")
