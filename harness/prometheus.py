"""What an inference server says of itself on /metrics, under names that are the same for all of them.

The text is Prometheus' exposition format 0.0.4. Names: vLLM 0.32 (`v1/metrics/loggers.py`) and, as further
alternatives, those of its v0 engine; SGLang's "Production Metrics" page; text-generation-inference v3
(`router/src`). The reference server uses vLLM's names. TGI counts a request's tokens when it ends, and its
KV usage is what the batch may grow to, not what it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

GAUGES = ("running", "waiting", "kv_usage")
COUNTERS = (
    "preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "queue_time_s_sum",
    "queue_time_s_count",
    "ttft_s_sum",
    "ttft_s_count",
)
FIGURES = (*GAUGES, *COUNTERS)
"""Requests (twice), share of the KV cache (0 to 1); sequences, tokens (the next four);
then sums of seconds and counts of requests."""

VLLM = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions_total": ("vllm:num_preemptions_total",),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    "prefix_cache_queries_total": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_cache_hits_total": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "queue_time_s_sum": ("vllm:request_queue_time_seconds_sum",),
    "queue_time_s_count": ("vllm:request_queue_time_seconds_count",),
    "ttft_s_sum": ("vllm:time_to_first_token_seconds_sum",),
    "ttft_s_count": ("vllm:time_to_first_token_seconds_count",),
}
SGLANG = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "kv_usage": ("sglang:token_usage",),
    "preemptions_total": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
    "prompt_tokens_total": ("sglang:prompt_tokens_total",),
    "generation_tokens_total": ("sglang:generation_tokens_total",),
    "prefix_cache_queries_total": ("sglang:prompt_tokens_total",),
    "prefix_cache_hits_total": ("sglang:cached_tokens_total",),
    "queue_time_s_sum": ("sglang:queue_time_seconds_sum",),
    "queue_time_s_count": ("sglang:queue_time_seconds_count",),
    "ttft_s_sum": ("sglang:time_to_first_token_seconds_sum",),
    "ttft_s_count": ("sglang:time_to_first_token_seconds_count",),
}
TGI = {
    "running": ("tgi_batch_current_size",),
    "waiting": ("tgi_queue_size",),
    "kv_usage": ("tgi_batch_current_max_tokens / tgi_batch_max_total_tokens",),
    "prompt_tokens_total": ("tgi_request_input_length_sum",),
    "generation_tokens_total": ("tgi_request_generated_tokens_sum",),
    "queue_time_s_sum": ("tgi_request_queue_duration_sum",),
    "queue_time_s_count": ("tgi_request_queue_duration_count",),
}
DIALECTS: dict[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "batchmark": ("batchmark:", VLLM),
    "vllm": ("vllm:", VLLM),
    "sglang": ("sglang:", SGLANG),
    "tgi": ("tgi_", TGI),
}
"""dialect: (what its names begin with, figure: names of which the first that is there counts)."""

RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of workers that compute the same requests together: one of them counts, they are not added up."""
MAX_NAMES = 100

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t{]")
_WANTED = {
    name
    for _, names in DIALECTS.values()
    for alternatives in names.values()
    for alternative in alternatives
    for name in alternative.split(" / ")
}


class MetricsError(ValueError):
    """There is nothing to read; the message says why, in a few words, and repeats nothing of the answer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look. values has every figure; a null one has its reason. names: an unknown server's, a few."""

    dialect: str | None
    values: dict[str, float | None]
    reasons: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def parse(body: bytes) -> Reading:
    """Raises MetricsError for what is not Prometheus text. Only lines that are wanted are parsed in full: a
    large server shows thousands, and most are buckets."""
    kept: list[str] = []
    names: dict[str, None] = {}
    try:
        lines = body.decode().split("\n")
    except UnicodeDecodeError:
        raise MetricsError("not Prometheus text: it is not UTF-8") from None
    for line in lines:
        line = line.strip(" \t\r")
        if not line or line.startswith(("#", '{"')):  # a comment; a name in quotes, which is none of ours
            continue
        match = _SAMPLE.match(line)
        if match is None:
            raise MetricsError("not Prometheus text")
        if match[1] in _WANTED or not names:  # the first one always: is it a sample at all?
            kept.append(line)
        names[match[1]] = None
    if not names:
        raise MetricsError("holds no sample")
    samples = _samples(kept)
    for dialect, (prefix, alternatives) in DIALECTS.items():
        if any(name.startswith(prefix) for name in names):
            return _read(dialect, alternatives, samples)
    shown = tuple(name[:100] for name in list(names)[:MAX_NAMES])
    reason = f"an unknown server: none of its names begins like those of {', '.join(DIALECTS)}"
    return Reading(None, dict.fromkeys(FIGURES), dict.fromkeys(FIGURES, reason), shown)


def _samples(lines: list[str]) -> dict[str, list[float]]:
    """name: a value for each set of labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                labels = frozenset(item for item in sample.labels.items() if item[0] not in RANKS)
                found.setdefault(sample.name, {}).setdefault(labels, float(sample.value))
    except Exception:  # the parser meets broken lines with errors of many kinds
        raise MetricsError("not Prometheus text: a line is broken") from None
    return {name: list(values.values()) for name, values in found.items()}


def _read(
    dialect: str, alternatives: Mapping[str, tuple[str, ...]], samples: Mapping[str, list[float]]
) -> Reading:
    values: dict[str, float | None] = dict.fromkeys(FIGURES)
    reasons: dict[str, str] = {}
    for figure in FIGURES:
        for source in alternatives.get(figure, ()):
            parts = [samples.get(name) for name in source.split(" / ")]
            if any(not part for part in parts):
                continue
            value = _value(figure, [part or [] for part in parts])
            if not math.isfinite(value):
                reasons[figure] = f"{source} is not a number"
            elif figure == "kv_usage" and not 0 <= value <= 1.01:
                reasons[figure] = f"{source} is outside 0 to 1"
            else:
                values[figure] = value
            break
        else:
            wanted = " or ".join(alternatives.get(figure, ()))
            reasons[figure] = f"the server shows no {wanted}" if wanted else f"{dialect} has no such figure"
    return Reading(dialect, values, reasons)


def _value(figure: str, parts: list[list[float]]) -> float:
    """Summed over engines and models; shares are averaged. NaN for a share of nothing."""
    if len(parts) == 1 and figure != "kv_usage":
        return math.fsum(parts[0])
    whole = math.fsum(parts[1]) if len(parts) > 1 else len(parts[0])
    return math.fsum(parts[0]) / whole if whole else math.nan
