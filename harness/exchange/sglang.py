"""`python -m sglang.bench_serving --output-file`: one JSON object a line.

Source: SGLang 0.5, bench_serving.py. Its TTFT is the first event with text; its latency ends with [DONE];
its TPOT is (latency - TTFT)/(n - 1); on its native endpoint ITL spreads a gap evenly over the tokens that
came with it, elsewhere it is the gap between events. It counts no failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.exchange.result import Result, aggregate, count, needs, real, reals, samples, text
from harness.exchange.vllm import named

TOOL = "sglang.bench_serving"


def is_mine(value: Mapping[str, Any]) -> bool:
    return {"completed", "request_throughput", "total_throughput", "mean_e2e_latency_ms"} <= set(value)


def read(value: Mapping[str, Any], assumed: frozenset[str]) -> Result:
    n = count(value.get("completed"))
    backend = text(value.get("backend")) or ""
    errors = value.get("errors")
    unserved = sum(1 for e in errors if e) if isinstance(errors, list) and errors else None
    info = value.get("server_info")
    info = info if isinstance(info, dict) else {}
    blocks = {
        "ttft": aggregate(named(value, "ttft"), n),
        **{name: aggregate(named(value, name), None) for name in ("tpot", "itl")},
        "e2e": aggregate(named(value, "e2e_latency"), n),
    }
    firsts = reals(value.get("ttfts"))
    if len(firsts) == n or (unserved is not None and len(firsts) == (n or 0) + unserved):
        blocks["ttft"] = samples(firsts, 1e3)
    spread = "SGLang spreads a gap evenly over the tokens that came with it"
    icl = blocks["itl"] if "oai" in backend or backend == "vllm" else spread
    if icl is spread:
        icl = needs(blocks["itl"], spread, assumed, "one_token")
    return Result(
        tool=TOOL,
        version=text(info.get("version")),
        engine=text(value.get("tag")) or backend or None,
        model=text(info.get("served_model_name")) or text(info.get("model_path")),
        duration_s=real(value.get("duration")),
        completed=n,
        unserved=unserved,
        prompt_tokens=count(value.get("total_input_tokens")),
        output_tokens=count(value.get("total_output_tokens")),
        planned_rate=real(value.get("request_rate")),
        latency={
            "ttft.from_send": blocks["ttft"],
            "e2e.from_send": needs(
                blocks["e2e"],
                "SGLang's latency ends with [DONE], ours with the last token",
                assumed,
                "no_trailer",
            ),
            "tpot": needs(
                blocks["tpot"],
                "SGLang's TPOT ends with [DONE] and divides by n - 1, whatever the first event held",
                assumed,
                *("one_token", "no_trailer"),
            ),
            "icl": icl,
            "itl": needs(blocks["itl"], "not expanded to tokens as ours is", assumed, "one_token"),
        },
        throughput={
            "requests_per_s": real(value.get("request_throughput")),
            "output_tokens_per_s": real(value.get("output_throughput")),
            "total_tokens_per_s": real(value.get("total_throughput")),
        },
        doubts=("sglang.bench_serving does not say how many requests failed",) if unserved is None else (),
    )
