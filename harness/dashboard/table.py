"""The table of figures on the page: a column a run, factors against the first run that has the figure."""

from __future__ import annotations

from typing import Any

from harness.comparison import BETTER, WORSE, Comparison, Row, comparison_rows, shown_rows
from harness.table import number, percent, why_null

GROUPS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "What users felt",
        (
            Row("TTFT p50, ms", "latency_ms.ttft.from_intended.p50", "lower"),
            Row("TTFT p99, ms", "latency_ms.ttft.from_intended.p99", "lower"),
            Row("TTFT from send p50, ms", "latency_ms.ttft.from_send.p50", "lower", foreign=True),
            Row("TTFT from send p99, ms", "latency_ms.ttft.from_send.p99", "lower", foreign=True),
            Row("first event from send p50, ms", "latency_ms.ttfc.from_send.p50", "lower", foreign=True),
            Row("TPOT p50, ms", "latency_ms.tpot.p50", "lower"),
            Row("TPOT p99, ms", "latency_ms.tpot.p99", "lower"),
            Row("ITL p99, ms", "latency_ms.itl.p99", "lower"),
            Row("longest gap, ms", "stalls.longest_ms", "lower"),
            Row("E2E p50, ms", "latency_ms.e2e.from_intended.p50", "lower"),
            Row("E2E p99, ms", "latency_ms.e2e.from_intended.p99", "lower"),
            Row("E2E from send p50, ms", "latency_ms.e2e.from_send.p50", "lower", foreign=True),
            Row("normalized p50, ms/token", "latency_ms.normalized.p50", "lower"),
            Row("normalized p99, ms/token", "latency_ms.normalized.p99", "lower"),
            Row("stalls", "stalls.count", "lower"),
            Row("stalled, s", "stalls.seconds", "lower"),
            Row("fluidity", "fluidity", "higher"),
        ),
    ),
    (
        "What came out",
        (
            Row("scheduled", "counts.scheduled", None),
            Row("completed", "counts.completed", None),
            Row("cancelled", "counts.cancelled", None),
            Row("rejected", "counts.rejected", "lower"),
            Row("failed", "counts.failed", "lower"),
            Row("timed out", "counts.timed_out", "lower"),
            Row("cut off", "counts.cut_off", "lower"),
            Row("requests/s", "throughput.requests_per_s", "higher"),
            Row("output tokens/s", "throughput.output_tokens_per_s", "higher"),
            Row("goodput, requests/s", "throughput.goodput_rps", "higher"),
            Row("SLO attainment", "throughput.slo_attainment", "higher", share=True),
            Row("deadline misses", "deadline_misses", "lower", optional=True),
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
            Row("KV free after a hang-up p50, ms", "cancellations.release_ms.p50", "lower"),
            Row("slot in use again p50, ms", "cancellations.reuse_ms.p50", "lower"),
            Row("tokens wasted on hang-ups", "cancellations.wasted_tokens", "lower"),
            Row("energy, J/token", "utilization.energy_j_per_token", "lower"),
        ),
    ),
    (
        "Where the time went, share of E2E",
        (
            Row("queue", "attribution.queue", "lower", share=True),
            Row("for a seat", "queue_reasons.seat", None, share=True),
            Row("for KV", "queue_reasons.kv", None, share=True),
            Row("for its batch", "queue_reasons.batch", None, share=True),
            Row("own prefill", "attribution.prefill", None, share=True),
            Row("decode", "attribution.decode", None, share=True),
            Row("stalled by others' prefill", "attribution.stalled", "lower", share=True),
            Row("not its turn", "attribution.skipped", "lower", share=True),
            Row("preempted", "attribution.preempted", "lower", share=True),
            Row("computed again", "attribution.recompute", "lower", share=True),
            Row("held by its batch", "attribution.held", "lower", share=True),
            Row("between passes", "attribution.host", "lower", share=True),
        ),
    ),
    (
        "In the steady window",
        (
            Row("from, s", "steady.window.start_s", None),
            Row("to, s", "steady.window.end_s", None),
            Row("requests", "steady.window.requests", None),
            Row("TTFT p50, ms", "steady.latency_ms.ttft.from_intended.p50", "lower"),
            Row("TTFT p99, ms", "steady.latency_ms.ttft.from_intended.p99", "lower"),
            Row("TPOT p50, ms", "steady.latency_ms.tpot.p50", "lower"),
            Row("TPOT p99, ms", "steady.latency_ms.tpot.p99", "lower"),
            Row("requests/s", "steady.throughput.requests_per_s", "higher"),
            Row("output tokens/s", "steady.throughput.output_tokens_per_s", "higher"),
        ),
    ),
    (
        "How the load arrived",
        (
            Row("requests/s sent", "arrivals.rate", None),
            Row("off the drawn rate", "arrivals.rate_error", None, share=True),
            Row("CV of the gaps", "arrivals.cv", None),
            Row("dispersion at 1 s", "arrivals.iod.1s", None),
            Row("in flight, mean", "in_flight.mean", None),
            Row("in flight, most", "in_flight.peak", None),
            Row("deferred", "arrivals.deferred", None),
            Row("shed", "arrivals.shed", None),
            Row("dropped", "arrivals.dropped", None),
            Row("retries", "client.retries", None),
        ),
    ),
    (
        "Did the client keep up",
        (
            Row("send lag p99, ms", "client.own_lag_ms.p99", None),
            Row("loop lag p99, ms", "client.loop_lag_ms.p99", None),
            Row("read lag p99, ms", "client.read_lag_ms.p99", None),
            Row("gaps under 0.1 ms", "client.gaps_under_0.1ms_share", None, share=True),
            Row("tokens a chunk", "client.tokens_per_chunk", None),
            Row("chunks that shared a read", "client.coalesced_share", None, share=True),
            Row("CPU s per 1,000 tokens", "client.cpu_s_per_1k_tokens", None),
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
