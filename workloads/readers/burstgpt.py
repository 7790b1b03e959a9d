"""BurstGPT: CSV with columns whose names hold spaces, found by name since file 3 has two more in the middle;
Wang et al. 2025 (KDD). Also its copy as JSONL (`request_arrival_ts_s`).

A failed request is recorded as 0,0,0: left out and counted. Models become users. Sessions and the time that
an answer took are in file 3 alone, and there of conversations only."""

from __future__ import annotations

import math
from typing import Any

from workloads.readers.files import each_object, each_record, head
from workloads.readers.rows import Rows
from workloads.readers.values import NS, needed, number_text, seconds_text_ns, time_ns, tokens, tokens_text

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Model", "Log Type", "Session ID", "Elapsed time")
KEYS = ("request_arrival_ts_s", "input_tokens", "output_tokens")


def read(path: str, rows: Rows) -> None:
    def record(fields: list[str]) -> None:
        time, request, response, model, kind, session, elapsed = fields
        prompt, answer = tokens_text(request, COLUMNS[1], 0), tokens_text(response, COLUMNS[2], 0)
        at = seconds_text_ns(time, COLUMNS[0])
        if not prompt or not answer:
            rows.failed += 1
            return
        rows.add(
            at,
            prompt,
            answer,
            user=model or None,
            request_class=kind or None,
            session=session or None,
            latency_s=number_text(elapsed, "Elapsed time") if elapsed else math.nan,
        )

    def item(row: dict[str, Any]) -> None:
        needed(row, *KEYS)
        prompt, answer = (tokens(row[key], key, 0) for key in KEYS[1:])
        at = time_ns(row[KEYS[0]], KEYS[0], "seconds", NS)
        if not prompt or not answer:
            rows.failed += 1
            return
        rows.add(at, prompt, answer)

    if head(path).lstrip().startswith(b"{"):
        each_object(path, rows, item)
    else:
        each_record(path, rows, COLUMNS, record, *OPTIONAL)
