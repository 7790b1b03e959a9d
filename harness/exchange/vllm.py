"""`vllm bench serve --save-result`, flat, and with --save-detailed.

Source: vLLM 0.11, benchmarks/serve.py and lib/endpoint_request_func.py. Its TTFT is the first event with a
`choices` entry, on chat possibly a role event; its TPOT divides by n - 1; its ITL is the gap between events;
its E2E ends with the last event that has `choices`. All count from the send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.exchange.result import (
    Figure,
    Result,
    aggregate,
    count,
    needs,
    pooled,
    real,
    reals,
    samples,
    text,
)

TOOL = "vllm bench serve"
COMPLETIONS = ("vllm", "openai", "openai-completions")
MANY = "an event may hold several tokens, and vLLM divides by n - 1"


def is_mine(value: Mapping[str, Any]) -> bool:
    return {"completed", "request_throughput", "output_throughput", "total_token_throughput"} <= set(value)


def read(value: Mapping[str, Any], assumed: frozenset[str]) -> Result:
    api = text(value.get("endpoint_type")) or text(value.get("backend")) or ""
    completed, planned = count(value.get("completed")), count(value.get("num_prompts"))
    unserved = count(value.get("failed"))
    if unserved is None and planned is not None and completed is not None and planned >= completed:
        unserved = planned - completed
    rate = real(value.get("request_rate"))
    latency = detailed(value, assumed, api) or flat(value, assumed, api)
    refused = "judged from the send; ours is judged from the intended arrival"
    return Result(
        tool=TOOL,
        version=text(value.get("vllm_version")),
        engine=text(value.get("label")) or text(value.get("backend")),
        model=text(value.get("model_id")),
        started_at=text(value.get("date")),
        duration_s=real(value.get("duration")),
        completed=completed,
        unserved=unserved,
        prompt_tokens=count(value.get("total_input_tokens")),
        output_tokens=count(value.get("total_output_tokens")),
        planned_rate=rate,
        complete=None,
        latency=latency,
        throughput={
            "requests_per_s": real(value.get("request_throughput")),
            "output_tokens_per_s": real(value.get("output_throughput")),
            "total_tokens_per_s": real(value.get("total_token_throughput")),
            "goodput_rps": refused,
            "slo_attainment": refused,
        },
        doubts=("vllm bench serve does not say whether the run came to its end",),
    )


def first_event(first: Figure, api: str, assumed: frozenset[str]) -> dict[str, Figure]:
    """Which first event TTFT is of, by the endpoint that was asked."""
    if api in COMPLETIONS or "one_token" in assumed:
        return {"ttfc.from_send": first, "ttft.from_send": first}
    if "chat" in api or "openai" in api:
        why = "vLLM's TTFT on chat is of the first event, which may be a role without a token: see ttfc"
        return {"ttfc.from_send": first, "ttft.from_send": f"{why} (--assume one_token)"}
    why = f"the file does not say by which rule its backend {api or '(none)'} took the first token"
    return {"ttfc.from_send": why, "ttft.from_send": f"{why} (--assume one_token)"}


def flat(value: Mapping[str, Any], assumed: frozenset[str], api: str) -> dict[str, Figure]:
    n = count(value.get("completed"))
    blocks = {
        name: aggregate(named(value, name), n if name in ("ttft", "e2el") else None)
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    return {
        **first_event(blocks["ttft"], api, assumed),
        "e2e.from_send": blocks["e2el"],
        "tpot": needs(blocks["tpot"], MANY, assumed, "one_token"),
        "icl": blocks["itl"],
        "itl": needs(blocks["itl"], "vLLM's ITL is per event: see icl", assumed, "one_token"),
    }


def named(value: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """mean_ttft_ms, median_ttft_ms, p99_ttft_ms.. by our names."""
    found = {name: value.get(f"{name}_{metric}_ms") for name in ("mean", "p90", "p95", "p99", "max")}
    return {**found, "p50": value.get(f"median_{metric}_ms", value.get(f"p50_{metric}_ms"))}


def detailed(value: Mapping[str, Any], assumed: frozenset[str], api: str) -> dict[str, Figure] | None:
    """From the arrays of --save-detailed: per request, so that percentiles and intervals are ours."""
    firsts, lengths = reals(value.get("ttfts")), reals(value.get("output_lens"))
    lists = value.get("itls")
    if not firsts or not isinstance(lists, list) or not len(firsts) == len(lists) == len(lengths):
        return None
    errors = value.get("errors")
    failed = [bool(e) for e in errors] if isinstance(errors, list) and len(errors) == len(firsts) else None
    gaps = [reals(item) for item in lists]
    kept = [i for i, first in enumerate(firsts) if first > 0 and not (failed and failed[i])]
    if not kept:
        return None
    single = all(len(gaps[i]) + 1 == lengths[i] for i in kept)
    if single and api in COMPLETIONS:
        assumed = assumed | {"one_token"}  # shown by the file itself
    first = samples((firsts[i] for i in kept), 1e3)
    icl = pooled([gaps[i] for i in kept], 1e3)
    paced = [i for i in kept if lengths[i] > 1]
    tpot = samples((sum(gaps[i]) / (lengths[i] - 1) for i in paced), 1e3)
    return {
        **first_event(first, api, assumed),
        "e2e.from_send": samples((firsts[i] + sum(gaps[i]) for i in kept), 1e3),
        "tpot": needs(tpot, MANY, assumed, "one_token"),
        "icl": icl,
        "itl": needs(icl, "vLLM's ITL is per event: see icl", assumed, "one_token"),
    }
