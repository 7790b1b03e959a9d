"""The table of figures on the page: rows of metrics, a column a run, factors against the first run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.table import lookup, number, percent, why_null

MEANINGFUL = 0.02
"""A change below this share is shown without a verdict: runs differ by as much from one to the next."""


class Row(NamedTuple):
    label: str
    path: str
    better: str = ""  # "lower", "higher", or "": neither
    share: bool = False  # a share from 0 to 1, shown as a percentage


GROUPS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "What users felt",
        (
            Row("TTFT p50, ms", "latency_ms.ttft.from_intended.p50", "lower"),
            Row("TTFT p99, ms", "latency_ms.ttft.from_intended.p99", "lower"),
            Row("TPOT p50, ms", "latency_ms.tpot.p50", "lower"),
            Row("TPOT p99, ms", "latency_ms.tpot.p99", "lower"),
            Row("ITL p99, ms", "latency_ms.itl.p99", "lower"),
            Row("longest gap, ms", "stalls.longest_ms", "lower"),
            Row("E2E p50, ms", "latency_ms.e2e.from_intended.p50", "lower"),
            Row("E2E p99, ms", "latency_ms.e2e.from_intended.p99", "lower"),
            Row("normalized p50, ms/token", "latency_ms.normalized.p50", "lower"),
            Row("normalized p99, ms/token", "latency_ms.normalized.p99", "lower"),
        ),
    ),
    (
        "What came out",
        (
            Row("completed", "counts.completed"),
            Row("scheduled", "counts.scheduled"),
            Row("requests/s", "throughput.requests_per_s", "higher"),
            Row("output tokens/s", "throughput.output_tokens_per_s", "higher"),
            Row("goodput, requests/s", "throughput.goodput_rps", "higher"),
            Row("SLO attainment", "throughput.slo_attainment", "higher", share=True),
        ),
    ),
    (
        "What the engine did",
        (
            Row("useful tokens", "steps.useful_token_fraction", "higher", share=True),
            Row("sequences in a step, mean", "steps.batch_size_mean"),
            Row("steps", "steps.count"),
            Row("preemptions", "steps.preemptions"),
            Row("recomputed tokens", "steps.recomputed_tokens", "lower"),
            Row("KV blocks in use, mean", "steps.kv_live_mean"),
            Row("KV blocks in use, most", "steps.kv_live_max"),
            Row("device busy", "utilization.device_busy", "", share=True),
            Row("GPU utilization, %", "utilization.gpu_util_pct"),
            Row("host gap p50, ms", "steps.host_gap_ms.p50", "lower"),
        ),
    ),
)


def figure_table(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of rows for the template: each cell has text, ratio, note (why it is null) and css."""
    return [
        {
            "title": title,
            "rows": [
                {"label": row.label, "cells": [_cell(row, s, summaries[0]) for s in summaries]}
                for row in rows
            ],
        }
        for title, rows in GROUPS
    ]


def _cell(row: Row, summary: dict[str, Any], reference: dict[str, Any]) -> dict[str, str]:
    value = lookup(summary, row.path)
    if value is None:
        return {
            "text": "–",
            "ratio": "",
            "css": "soft",
            "note": why_null(summary, row.path) or "not measured",
        }
    reliable = _reliable(summary, row.path)
    text = percent(value) if row.share else number(value)
    ratio, css = _ratio(row, value, lookup(reference, row.path)) if summary is not reference else ("", "")
    return {
        "text": text if reliable else f"~{text}",
        "ratio": ratio,
        "css": css if reliable else f"{css} soft".strip(),
        "note": "" if reliable else "too few samples for a 95 % interval",
    }


def _reliable(summary: dict[str, Any], path: str) -> bool:
    block, _, name = path.rpartition(".")
    marks = lookup(summary, f"{block}.reliable")
    return bool(marks.get(name, True)) if isinstance(marks, dict) else True


def _ratio(row: Row, value: Any, reference: Any) -> tuple[str, str]:
    """How many times the reference, and whether that is better or worse."""
    if not row.better or not isinstance(reference, (int, float)) or reference <= 0 or value < 0:
        return "", ""
    factor = value / reference
    text = f"{factor:.2f}x" if factor < 10 else f"{factor:.0f}x"
    if abs(factor - 1) < MEANINGFUL:
        return text, ""
    better = (factor < 1) == (row.better == "lower")
    return f"{text} {'▲' if better else '▼'}", "better" if better else "worse"
