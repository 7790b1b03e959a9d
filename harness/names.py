"""The one table of what people call a figure of summary.json: on pages, on the terminal, in a job summary.

Machine formats (JSON, JUnit, Bencher) keep the path: by it a figure is followed over time."""

from __future__ import annotations

import re

BLOCKS = {
    "latency_ms.ttft.from_intended": ("TTFT", "ms"),
    "latency_ms.ttft.from_send": ("TTFT from send", "ms"),
    "latency_ms.ttfc.from_intended": ("first event", "ms"),
    "latency_ms.ttfc.from_send": ("first event from send", "ms"),
    "latency_ms.ttfo.from_intended": ("TTFO (no reasoning)", "ms"),
    "latency_ms.ttfo.from_send": ("TTFO from send", "ms"),
    "latency_ms.tpot": ("TPOT", "ms"),
    "latency_ms.itl": ("ITL", "ms"),
    "latency_ms.icl": ("gap between chunks", "ms"),
    "latency_ms.e2e.from_intended": ("E2E", "ms"),
    "latency_ms.e2e.from_send": ("E2E from send", "ms"),
    "latency_ms.normalized": ("normalized latency", "ms/token"),
    "latency_ms.queue_delay": ("queue delay", "ms"),
    "latency_ms.prefill": ("prefill time", "ms"),
    "latency_ms.decode": ("decode time", "ms"),
    "latency_ms.adj_ttft": ("adjusted TTFT", "ms"),
    "latency_ms.adj_e2e": ("adjusted E2E", "ms"),
    "steps.host_gap_ms": ("host gap", "ms"),
    "cancellations.release_ms": ("KV free after a hang-up", "ms"),
    "cancellations.reuse_ms": ("slot in use again", "ms"),
    "server_metrics.queue_time_ms": ("queue time, as the server says", "ms"),
    "server_metrics.ttft_ms": ("TTFT, as the server says", "ms"),
    "client.send_lag_ms": ("send lag", "ms"),
    "client.own_lag_ms": ("own send lag", "ms"),
    "client.loop_lag_ms": ("loop lag", "ms"),
    "client.read_lag_ms": ("read lag", "ms"),
}
"""Blocks of percentiles: (name, unit); a figure of one has its percentile between the two."""
FIGURES = {
    "throughput.requests_per_s": "requests/s",
    "throughput.output_tokens_per_s": "output tokens/s",
    "throughput.total_tokens_per_s": "tokens/s with prompts",
    "throughput.prefill_tokens_per_s": "prompt tokens/s",
    "throughput.goodput_rps": "goodput, requests/s",
    "throughput.slo_attainment": "SLO attainment",
    "run.duration_s": "duration, s",
    "deadline_misses": "deadline misses",
    "fluidity": "fluidity",
    "stalls.count": "stalls",
    "stalls.seconds": "stalled, s",
    "stalls.longest_ms": "longest gap, ms",
    "stalls.threshold_ms": "a stall is a gap over, ms",
    "steps.count": "steps",
    "steps.useful_token_fraction": "useful token fraction",
    "steps.padded_token_fraction": "padded token fraction",
    "steps.recomputed_tokens": "recomputed tokens",
    "steps.backend_pad_rows": "rows of backend padding",
    "steps.preemptions": "preemptions",
    "steps.batch_size_mean": "batch size mean",
    "steps.kv_live_mean": "KV blocks mean",
    "steps.kv_live_max": "KV blocks most",
    "steps.kv_live_end": "KV blocks at the end",
    "prefix_cache.hit_rate_tokens": "prefix cache hit rate",
    "utilization.device_busy": "device busy",
    "utilization.gpu_util_pct": "GPU utilization, %",
    "utilization.gpu_memory_gb": "GPU memory, GB",
    "utilization.mfu": "MFU",
    "utilization.mbu": "MBU",
    "utilization.cpu_pct": "CPU, %",
    "utilization.power_w": "power, W",
    "utilization.energy_j": "energy, J",
    "utilization.energy_j_per_token": "energy, J/token",
    "cancellations.count": "hang-ups",
    "cancellations.wasted_tokens": "tokens wasted on hang-ups",
    "cancellations.received_tokens": "tokens received before hang-ups",
    "arrivals.planned_rate": "planned requests/s",
    "arrivals.rate": "requests/s sent",
    "arrivals.rate_error": "off the drawn rate",
    "arrivals.cv": "CV of the gaps",
    "arrivals.planned_cv": "CV of the planned gaps",
    "arrivals.iod.0.2s": "dispersion at 0.2 s",
    "arrivals.iod.1s": "dispersion at 1 s",
    "arrivals.iod.5s": "dispersion at 5 s",
    "arrivals.planned_iod.0.2s": "planned dispersion at 0.2 s",
    "arrivals.planned_iod.1s": "planned dispersion at 1 s",
    "arrivals.planned_iod.5s": "planned dispersion at 5 s",
    "arrivals.most_in_1s": "most arrivals in 1 s",
    "arrivals.due": "due",
    "arrivals.sent_of_due": "sent of those due",
    "arrivals.sent": "sent",
    "arrivals.deferred": "deferred",
    "arrivals.shed": "shed",
    "arrivals.dropped": "dropped",
    "in_flight.mean": "in flight mean",
    "in_flight.peak": "in flight most",
    "client.processes": "client processes",
    "client.cpu_s_per_1k_tokens": "CPU s per 1,000 tokens",
    "client.retries": "retries",
    "client.gaps_under_0.1ms_share": "gaps under 0.1 ms",
    "client.tokens_per_chunk": "tokens a chunk",
    "client.coalesced_share": "chunks that shared a read",
    "attribution.client_wait": "waiting in the client, of E2E",
    "attribution.transport_in": "on the way in, of E2E",
    "attribution.queue": "queue, of E2E",
    "attribution.prefill": "own prefill, of E2E",
    "attribution.decode": "decode, of E2E",
    "attribution.stalled": "stalled, of E2E",
    "attribution.skipped": "not its turn, of E2E",
    "attribution.preempted": "preempted, of E2E",
    "attribution.recompute": "computed again, of E2E",
    "attribution.held": "held, of E2E",
    "attribution.host": "between passes, of E2E",
    "attribution.transport_out": "on the way out, of E2E",
    "queue_reasons.seat": "queued for a seat, of E2E",
    "queue_reasons.kv": "queued for KV, of E2E",
    "queue_reasons.budget": "queued for the token budget, of E2E",
    "queue_reasons.batch": "queued for its batch, of E2E",
    "queue_reasons.order": "queued behind others, of E2E",
    "queue_reasons.iteration": "queued for the iteration's end, of E2E",
    "queue_reasons.unknown": "queued for no known reason, of E2E",
    "token_source.usage": "answers counted by usage",
    "token_source.ids": "answers counted by token ids",
    "token_source.retokenised": "answers counted by retokenising",
    "token_source.mismatches": "answers whose token counts differ",
}
"""Whole paths. Behind a comma stands the unit, or of what it is a share."""
FAMILIES = (
    (r"counts\.(\w+)", "{}"),
    (r"refusals\.(\w+)", "refused: {}"),
    (r"(window|warmup|drain|steady\.window)\.start_s", "{} from, s"),
    (r"(window|warmup|drain|steady\.window)\.end_s", "{} to, s"),
    (r"(window|warmup|drain|steady\.window)\.requests", "requests in the {}"),
    (r"(window|warmup|drain|steady\.window)\.completed", "completed in the {}"),
    (r"(window|warmup|drain|steady\.window)\.output_tokens", "output tokens in the {}"),
    (r"prompt_tokens\.(\w+)", "prompt tokens {}"),
    (r"output_tokens\.(\w+)", "answer tokens {}"),
    (r"cancellations\.by_state\.(\w+)", "hang-ups while {}"),
    (r"cancellations\.release_ms_by_state\.(\w+)", "KV free after a hang-up while {}"),
    (r"cancellations\.reuse_ms_by_state\.(\w+)", "slot in use again after a hang-up while {}"),
    (r"server_metrics\.(\w+)\.mean", "{} mean, as the server says"),
    (r"server_metrics\.(\w+)\.max", "{} most, as the server says"),
    (r"server_metrics\.(\w+)", "{}, as the server says"),
)
"""Paths with a part of their own: that part as words."""
GROUP = re.compile(
    r"by_(class|tenant)\.(.+?)\.(?=(?:counts|latency_ms|throughput|stalls|fluidity|attribution|queue_reasons"
    r"|cancellations|deadline_misses)(?:\.|$))"
)
"""A class or tenant may have dots in its name."""
PERCENTILE = re.compile(r"(.+)\.(mean|max|n|zero_share|p\d+(?:\.\d+)?)")
LEAVES = {"max": "most", "n": "samples", "zero_share": "share of zeros"}


def label(path: str) -> str:
    """latency_ms.ttft.from_intended.p99 is "TTFT p99, ms": the name, behind the first comma its unit. A
    class, a tenant or the steady window is named as well; a path that nobody knows is its own words."""
    if group := GROUP.match(path):
        return _about(label(path[group.end() :]), f"of {group[1]} {group[2]}")
    if path.startswith("steady.") and not path.startswith("steady.window."):
        return _about(label(path.removeprefix("steady.")), "in the steady window")
    return known(path) or re.sub(r"[._]+", " ", path)


def name(path: str) -> str:
    """The label without its unit: ratios have none."""
    return label(path).partition(",")[0]


def known(path: str) -> str | None:
    """The label of a path without a group; None where the table has none."""
    if path in FIGURES:
        return FIGURES[path]
    found = PERCENTILE.fullmatch(path)
    if found and found[1] in BLOCKS:
        words, unit = BLOCKS[found[1]]
        leaf = LEAVES.get(found[2], found[2])
        return f"{words} {leaf}" + (f", {unit}" if found[2] not in ("n", "zero_share") else "")
    for pattern, words in FAMILIES:
        if match := re.fullmatch(pattern, path):
            return words.format(re.sub(r"[._]", " ", match[1]))
        if found and (match := re.fullmatch(pattern, found[1])):
            return f"{words.format(match[1])} {LEAVES.get(found[2], found[2])}, ms"
    return None


def _about(text: str, what: str) -> str:
    """What it is of, before the unit."""
    words, comma, unit = text.partition(",")
    return f"{words} {what}{comma}{unit}"
