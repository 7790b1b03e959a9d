"""A run's summary as vLLM's flat JSON or AIPerf's profile export: only what has the same definition there.

What has none is left out: latency from the intended arrival, goodput, normalized latency, engine figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.table import lookup

QUANTILES = (("median", "p50"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
RATES = {
    "requests_per_s": ("request_throughput", "requests/sec"),
    "output_tokens_per_s": ("output_throughput", "tokens/sec"),
    "total_tokens_per_s": ("total_token_throughput", "tokens/sec"),
}


def to_vllm(summary: Mapping[str, Any], api: str | None) -> dict[str, Any]:
    """api: chat | completions, the endpoint that was asked; None where it is not known."""
    counts, whole = summary["counts"], dict(summary)
    out: dict[str, Any] = {
        "date": summary["run"]["started_at"],
        "endpoint_type": {"chat": "openai-chat", "completions": "openai"}.get(api or ""),
        "backend": summary["engine"],
        "model_id": summary["model"],
        "request_rate": lookup(whole, "arrivals.planned_rate"),
        "duration": duration(summary),
        "completed": counts["completed"],
        "failed": unserved(counts),
        "num_prompts": counts["scheduled"] if ended(counts) else None,
        "total_output_tokens": lookup(whole, "output_tokens.counted"),
        **{vllm: value for name, (vllm, _) in RATES.items() if (value := rate(summary, name)) is not None},
    }
    latency = summary["latency_ms"]
    blocks = {
        "ttft": latency["ttfc"]["from_send"],
        "tpot": latency["tpot"] if one_token(summary) else None,
        "itl": latency["icl"],
        "e2el": latency["e2e"]["from_send"],
    }
    for metric, block in blocks.items():
        if block is not None:
            out[f"mean_{metric}_ms"] = block["mean"]
            out |= {f"{theirs}_{metric}_ms": block[ours] for theirs, ours in QUANTILES}
    return {key: value for key, value in out.items() if value is not None}


def to_aiperf(summary: Mapping[str, Any], api: str | None) -> dict[str, Any]:
    latency, counts = summary["latency_ms"], summary["counts"]
    out: dict[str, Any] = {"schema_version": "1.4", "exported_by": "batchmark"}
    blocks = {
        "time_to_first_token": latency["ttft"]["from_send"],
        "time_to_first_output_token": latency["ttfo"]["from_send"],
        "request_latency": latency["e2e"]["from_send"],
        "inter_token_latency": latency["tpot"],
        "inter_chunk_latency": latency["icl"],
    }
    for metric, block in blocks.items():
        told = {name: block[name] for name in ("p50", "p90", "p95", "p99", "max")}
        figures = {"avg": block["mean"], **told, "count": block["n"]}
        if block["mean"] is not None:
            out[metric] = {"unit": "ms", **{k: v for k, v in figures.items() if v is not None}}
    scalars = {
        "request_count": (counts["completed"], "requests"),
        "error_request_count": (unserved(counts), "requests"),
        "benchmark_duration": (duration(summary), "sec"),
        "request_throughput": (rate(summary, "requests_per_s"), "requests/sec"),
        "output_token_throughput": (rate(summary, "output_tokens_per_s"), "tokens/sec"),
        "total_token_throughput": (rate(summary, "total_tokens_per_s"), "tokens/sec"),
        "total_output_tokens": (lookup(dict(summary), "output_tokens.counted"), "tokens"),
    }
    out |= {name: {"unit": unit, "avg": v} for name, (v, unit) in scalars.items() if v is not None}
    if summary["model"] is not None:
        out["input_config"] = {"endpoint": {"model_names": [summary["model"]]}}
    run = summary["run"]
    out |= {"start_time": run["started_at"], "is_complete": bool(run["complete"])}
    if not run["complete"]:
        out["incomplete_reason"] = run["incomplete_reason"]
    return {key: value for key, value in out.items() if value is not None}


FORMATS: dict[str, Callable[[Mapping[str, Any], str | None], dict[str, Any]]] = {
    "vllm": to_vllm,
    "aiperf": to_aiperf,
}


def ended(counts: Mapping[str, Any]) -> bool:
    """No request was hung up on or cut off: kinds of end that these formats do not have."""
    return counts["cancelled"] in (0, None) and counts["cut_off"] in (0, None)


def unserved(counts: Mapping[str, Any]) -> int | None:
    three = [counts[name] for name in ("failed", "timed_out", "rejected")]
    return None if None in three else sum(three)


def rate(summary: Mapping[str, Any], name: str) -> float | None:
    """Token rates are of completed answers there, of all tokens here: the same where all completed."""
    counts = summary["counts"]
    if name != "requests_per_s" and (not ended(counts) or unserved(counts) != 0):
        return None
    value = summary["throughput"][name]
    return float(value) if value is not None else None


def duration(summary: Mapping[str, Any]) -> float | None:
    window = summary["window"]
    if window["start_s"] is None:
        return summary["run"]["duration_s"] if "source" in summary["run"] else None
    return float(window["end_s"] - window["start_s"])


def one_token(summary: Mapping[str, Any]) -> bool:
    """The first event carried the first token and each held one: TPOT divides by n - 1 as vLLM's does."""
    if "source" in summary["run"]:
        return "one_token" in summary["run"]["source"]["assumed"]
    latency = summary["latency_ms"]
    same = latency["ttfc"]["from_send"] == latency["ttft"]["from_send"]
    return bool(same and lookup(dict(summary), "client.tokens_per_chunk") == 1)
