"""GuideLLM's benchmarks.json: one benchmark of it, with or without its lists of requests.

Source: GuideLLM 0.4, schemas/request_stats.py and benchmark/schemas. TTFT is the first event with a token;
`time_per_output_token_ms` is (last token - send)/n, which is not TPOT; `inter_token_latency_ms` is
(last - first)/(n - 1) per request; `request_latency` (s) ends with the stream. Stamps are the wall clock's.
The requests hold their stamps and when each was due: from these every figure is derived by our rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.exchange.result import Figure, Result, aggregate, count, needs, real, samples, text

TOOL = "guidellm"
CLOCK = "guidellm stamps with the wall clock: a step of it cannot be told from latency"
RULE = "percentiles are guidellm's own (an order statistic, not interpolated)"
STAMPS = (
    *("targeted_start", "request_start", "request_end", "first_token_iteration", "last_token_iteration"),
    *("first_output_token_iteration", "token_iterations"),
)


def is_mine(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("metrics"), dict) and ("scheduler_metrics" in value or "requests" in value)


def part(value: Any, *names: str) -> dict[str, Any]:
    """value[a][b].. where each is an object; else an empty one."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def read(value: Mapping[str, Any], assumed: frozenset[str]) -> Result:
    made = part(value, "scheduler_metrics", "requests_made")
    totals = made or part(value, "metrics", "request_totals")
    done = value.get("requests")
    rows = done.get("successful") if isinstance(done, dict) else None
    table = [stamped(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    usable = bool(table) and all(not math.isnan(row["request_start"]) for row in table)
    config = part(value, "config")
    backend = part(config, "backend")
    unserved, cut_off = count(totals.get("errored")), count(totals.get("incomplete"))
    every = usable and unserved == 0 and cut_off == 0
    return Result(
        tool=TOOL,
        version=text(value.get("guidellm_version")),
        model=text(backend.get("model")),
        duration_s=real(value.get("duration")),
        completed=count(totals.get("successful")),
        unserved=unserved,
        cut_off=cut_off,
        latency=derived(table) if usable else aggregates(value, assumed),
        throughput=rates(table, every),
        doubts=(CLOCK,),
        warnings=() if usable else (RULE,),
    )


def stamped(row: Mapping[str, Any]) -> dict[str, float]:
    """A request's stamps (s) and tokens; NaN where it has none."""
    timings = {**part(row, "info", "timings")}
    found = {name: number(timings.get(name)) for name in STAMPS}
    tokens = row.get("output_tokens", part(row, "output_metrics").get("total_tokens"))
    prompt = row.get("prompt_tokens", part(row, "input_metrics").get("total_tokens"))
    return {**found, "n": number(tokens), "prompt": number(prompt)}


def number(value: Any) -> float:
    found = real(value)
    return math.nan if found is None else found


def derived(table: list[dict[str, float]]) -> dict[str, Figure]:
    """Every figure by our rules, from the stamps."""

    def gap(end: str, start: str) -> Figure:
        return samples((row[end] - row[start] for row in table), 1e3)

    found: dict[str, Figure] = {}
    for ref, start in (("from_intended", "targeted_start"), ("from_send", "request_start")):
        found[f"ttft.{ref}"] = gap("first_token_iteration", start)
        found[f"ttfo.{ref}"] = gap("first_output_token_iteration", start)
        found[f"e2e.{ref}"] = gap("last_token_iteration", start)
    counted = [row for row in table if row["n"] > 0]
    found["normalized"] = samples(
        ((row["last_token_iteration"] - row["targeted_start"]) / row["n"] for row in counted), 1e3
    )
    paced = [row for row in counted if row["n"] > 1]
    if all(row["token_iterations"] == row["n"] for row in paced):
        spans = (row["last_token_iteration"] - row["first_token_iteration"] for row in paced)
        found["tpot"] = samples((s / (row["n"] - 1) for s, row in zip(spans, paced, strict=True)), 1e3)
    else:
        found["tpot"] = "events held several tokens, and how many the first one held is not in the file"
    return found | gaps()


def gaps() -> dict[str, Figure]:
    return dict.fromkeys(("itl", "icl"), "guidellm keeps the first and the last stamp, and no gaps")


def aggregates(value: Mapping[str, Any], assumed: frozenset[str]) -> dict[str, Figure]:
    def block(name: str, scale: float = 1.0) -> Figure:
        found = part(value, "metrics", name, "successful")
        told = {**part(found, "percentiles"), "mean": found.get("mean"), "max": found.get("max")}
        return aggregate(told, count(found.get("count")), scale)

    pace = "guidellm's inter_token_latency_ms divides by n - 1, and an event may hold several tokens"
    end = "guidellm's request_latency ends with the stream, ours with the last token"
    return {
        "ttft.from_send": block("time_to_first_token_ms"),
        "ttfo.from_send": block("time_to_first_output_token_ms"),
        "e2e.from_send": needs(block("request_latency", 1e3), end, assumed, "no_trailer"),
        "tpot": needs(block("inter_token_latency_ms"), pace, assumed, "one_token"),
        **gaps(),
    }


def rates(table: list[dict[str, float]], every: bool) -> dict[str, float | str | None]:
    """Ours, from the first due time to the last answer's end."""
    starts = [row["targeted_start"] for row in table]
    ends = [row["request_end"] for row in table]
    span = max(ends, default=math.nan) - min(starts, default=math.nan)
    if not every or not span > 0 or any(map(math.isnan, (*starts, *ends))):
        why = "guidellm's rates are weighted by time, and the requests to derive ours from are not all there"
        return dict.fromkeys(("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"), why)
    output, prompt = (sum(row[name] for row in table) for name in ("n", "prompt"))
    unsaid = "the requests do not all say how many tokens they had"
    return {
        "requests_per_s": len(table) / span,
        "output_tokens_per_s": unsaid if math.isnan(output) else output / span,
        "total_tokens_per_s": unsaid if math.isnan(output + prompt) else (output + prompt) / span,
    }
