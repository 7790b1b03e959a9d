"""The table of figures on the page: rows of metrics, a column a run, factors against the first run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.comparison import BETTER, WORSE, Row, is_reliable, judge
from harness.table import lookup, number, percent, why_null

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
            Row("completed", "counts.completed", None),
            Row("scheduled", "counts.scheduled", None),
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
            Row("sequences in a step, mean", "steps.batch_size_mean", None),
            Row("steps", "steps.count", None),
            Row("preemptions", "steps.preemptions", None),
            Row("recomputed tokens", "steps.recomputed_tokens", "lower"),
            Row("KV blocks in use, mean", "steps.kv_live_mean", None),
            Row("KV blocks in use, most", "steps.kv_live_max", None),
            Row("device busy", "utilization.device_busy", None, share=True),
            Row("GPU utilization, %", "utilization.gpu_util_pct", None),
            Row("host gap p50, ms", "steps.host_gap_ms.p50", "lower"),
        ),
    ),
)


def figure_table(summaries: Sequence[dict[str, Any]], *, comparable: bool) -> list[dict[str, Any]]:
    """Groups of rows for the template: each cell has text, ratio, note (why it is null) and css."""
    reference = summaries[0] if comparable else None
    return [
        {
            "title": title,
            "rows": [{"label": r.label, "cells": [_cell(r, s, reference) for s in summaries]} for r in rows],
        }
        for title, rows in GROUPS
    ]


def _cell(row: Row, summary: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, str]:
    value = lookup(summary, row.path)
    if value is None:
        reason = why_null(summary, row.path) or "not measured"
        return {"text": "–", "ratio": "", "css": "soft", "note": reason}
    text, ratio, css, note = percent(value) if row.share else number(value), "", "", ""
    base = lookup(reference, row.path) if reference is not None and reference is not summary else None
    if base:
        verdict = judge(value, base, row.better)
        mark = {"better": f" {BETTER}", "worse": f" {WORSE}"}.get(verdict or "", "")
        ratio, css = f"{number(value / base)}x{mark}", verdict or ""
    if not is_reliable(summary, row.path):
        text, css, note = f"~{text}", f"{css} soft".strip(), "too few samples for a 95 % interval"
    return {"text": text, "ratio": ratio, "css": css, "note": note}
