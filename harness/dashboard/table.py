"""The table of figures on the page: a column a run, factors against the first run that has the figure."""

from __future__ import annotations

from typing import Any

from harness.comparison import BETTER, WORSE, Comparison, Row, comparison_rows, shown_rows
from harness.table import number, percent, why_null

GROUPS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "What users felt",
        (
            Row("latency_ms.ttft.from_intended.p50", "lower"),
            Row("latency_ms.ttft.from_intended.p99", "lower"),
            Row("latency_ms.ttft.from_send.p50", "lower", foreign=True),
            Row("latency_ms.ttft.from_send.p99", "lower", foreign=True),
            Row("latency_ms.ttfc.from_send.p50", "lower", foreign=True),
            Row("latency_ms.tpot.p50", "lower"),
            Row("latency_ms.tpot.p99", "lower"),
            Row("latency_ms.itl.p99", "lower"),
            Row("stalls.longest_ms", "lower"),
            Row("latency_ms.e2e.from_intended.p50", "lower"),
            Row("latency_ms.e2e.from_intended.p99", "lower"),
            Row("latency_ms.e2e.from_send.p50", "lower", foreign=True),
            Row("latency_ms.normalized.p50", "lower"),
            Row("latency_ms.normalized.p99", "lower"),
            Row("stalls.count", "lower"),
            Row("stalls.seconds", "lower"),
            Row("fluidity", "higher"),
        ),
    ),
    (
        "What came out",
        (
            Row("counts.scheduled", None),
            Row("counts.completed", None),
            Row("counts.cancelled", None),
            Row("counts.rejected", "lower"),
            Row("counts.failed", "lower"),
            Row("counts.timed_out", "lower"),
            Row("counts.cut_off", "lower"),
            Row("throughput.requests_per_s", "higher"),
            Row("throughput.output_tokens_per_s", "higher"),
            Row("throughput.goodput_rps", "higher"),
            Row("throughput.slo_attainment", "higher", share=True),
            Row("deadline_misses", "lower", optional=True),
        ),
    ),
    (
        "What the engine did",
        (
            Row("steps.useful_token_fraction", "higher", share=True),
            Row("steps.batch_size_mean", None),
            Row("steps.count", None),
            Row("steps.preemptions", None),
            Row("steps.recomputed_tokens", "lower"),
            Row("steps.kv_live_mean", None),
            Row("steps.kv_live_max", None),
            Row("utilization.device_busy", None, share=True),
            Row("utilization.gpu_util_pct", None),
            Row("steps.host_gap_ms.p50", "lower"),
            Row("cancellations.release_ms.p50", "lower"),
            Row("cancellations.reuse_ms.p50", "lower"),
            Row("cancellations.wasted_tokens", "lower"),
            Row("utilization.energy_j_per_token", "lower"),
        ),
    ),
    (
        "Where the time went, share of E2E",
        (
            Row("attribution.queue", "lower", share=True, said="queue"),
            Row("queue_reasons.seat", None, share=True, said="for a seat"),
            Row("queue_reasons.kv", None, share=True, said="for KV"),
            Row("queue_reasons.batch", None, share=True, said="for its batch"),
            Row("attribution.prefill", None, share=True, said="own prefill"),
            Row("attribution.decode", None, share=True, said="decode"),
            Row("attribution.stalled", "lower", share=True, said="stalled by others' prefill"),
            Row("attribution.skipped", "lower", share=True, said="not its turn"),
            Row("attribution.preempted", "lower", share=True, said="preempted"),
            Row("attribution.recompute", "lower", share=True, said="computed again"),
            Row("attribution.held", "lower", share=True, said="held by its batch"),
            Row("attribution.host", "lower", share=True, said="between passes"),
        ),
    ),
    (
        "In the steady window",
        (
            Row("steady.window.start_s", None, said="from, s", factor=False),
            Row("steady.window.end_s", None, said="to, s", factor=False),
            Row("steady.window.requests", None, said="requests"),
            Row("steady.latency_ms.ttft.from_intended.p50", "lower", said="TTFT p50, ms"),
            Row("steady.latency_ms.ttft.from_intended.p99", "lower", said="TTFT p99, ms"),
            Row("steady.latency_ms.tpot.p50", "lower", said="TPOT p50, ms"),
            Row("steady.latency_ms.tpot.p99", "lower", said="TPOT p99, ms"),
            Row("steady.throughput.requests_per_s", "higher", said="requests/s"),
            Row("steady.throughput.output_tokens_per_s", "higher", said="output tokens/s"),
        ),
    ),
    (
        "How the load arrived",
        (
            Row("arrivals.rate", None),
            Row("arrivals.rate_error", None, share=True, factor=False),
            Row("arrivals.cv", None),
            Row("arrivals.iod.1s", None),
            Row("in_flight.mean", None),
            Row("in_flight.peak", None),
            Row("arrivals.deferred", None),
            Row("arrivals.shed", None),
            Row("arrivals.dropped", None),
            Row("client.retries", None),
        ),
    ),
    (
        "Did the client keep up",
        (
            Row("client.own_lag_ms.p99", None),
            Row("client.loop_lag_ms.p99", None),
            Row("client.read_lag_ms.p99", None),
            Row("client.gaps_under_0.1ms_share", None, share=True),
            Row("client.tokens_per_chunk", None),
            Row("client.coalesced_share", None, share=True),
            Row("client.cpu_s_per_1k_tokens", None),
        ),
    ),
)


def figure_table(comparison: Comparison) -> list[dict[str, Any]]:
    """Groups of rows for the template: each cell has text, ratio, note (why it is null) and css."""
    groups = []
    for title, rows in GROUPS:
        found = comparison_rows(comparison, rows)
        width = len(comparison.summaries)
        cells = [found[i : i + width] for i in range(0, len(found), width)]
        groups.append(
            {
                "title": title,
                "rows": [
                    {
                        "label": row.label,
                        "path": row.path,
                        "cells": [_cell(row, *pair) for pair in zip(line, comparison.summaries, strict=True)],
                    }
                    for row, line in zip(shown_rows(comparison, rows), cells, strict=True)
                ],
            }
        )
    return groups


def _cell(row: Row, cell: dict[str, Any], summary: dict[str, Any]) -> dict[str, str]:
    if cell["value"] is None:
        reason = why_null(summary, row.path) or "not measured"
        return {"text": "–", "ratio": "", "css": "soft", "note": reason, "value": ""}
    text = percent(cell["value"]) if row.share else number(cell["value"])
    mark = {"better": f" {BETTER}", "worse": f" {WORSE}"}.get(cell["verdict"], "")
    ratio = f"{number(cell['ratio'])}x{mark}" if cell["ratio"] is not None else ""
    found = {
        "text": text,
        "ratio": ratio,
        "css": cell["verdict"] or "",
        "note": "",
        "value": str(cell["value"]),
    }
    if cell["reliable"]:
        return found
    note = "too few samples for a 95 % interval"
    return {**found, "text": f"~{text}", "css": "soft", "note": note}
