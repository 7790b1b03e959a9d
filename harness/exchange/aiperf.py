"""AIPerf's profile_export_aiperf.json and profile_export.jsonl (a line per request).

Source: AIPerf 0.13, metrics/types and the JSON export schema 1.4. TTFT is the first response with content,
TTFO the first that is no reasoning; `inter_token_latency` is (latency - TTFT)/(n - tokens in the first
response), in older versions n - 1; `request_latency` ends with the last response; all from the send, which
under a cap comes after the wait for a place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.exchange.guidellm import number, part
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

TOOL = "aiperf"
TO_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}
END = "AIPerf's latency ends with the last response, ours with the last token"
PACE = "AIPerf's ITL ends with the last response, and versions differ in what they divide by"


class VersionError(ValueError):
    """Fields of another version may mean something else."""


def is_mine(value: Mapping[str, Any]) -> bool:
    if "aiperf_version" in value:
        return True
    return any(
        isinstance(value.get(n), dict) and "unit" in value[n] for n in ("request_latency", "request_count")
    )


def is_record(value: Mapping[str, Any]) -> bool:
    metadata = value.get("metadata")
    known = ("benchmark_phase", "x_request_id", "request_start_ns")
    return isinstance(metadata, dict) and "metrics" in value and any(name in metadata for name in known)


def read(value: Mapping[str, Any], assumed: frozenset[str]) -> Result:
    schema = text(value.get("schema_version"))
    if schema is not None and schema.partition(".")[0] != "1":
        raise VersionError(f"aiperf's schema_version {schema}; 1.x is read")

    def block(name: str) -> Figure:
        found = part(value, name)
        unit = found.get("unit")
        scale = TO_MS.get(unit) if isinstance(unit, str) else None
        if found and scale is None:
            return f"its unit is {text(unit) or 'missing'}, not a time"
        return aggregate({**found, "mean": found.get("avg")}, count(found.get("count")), scale or 1.0)

    def one(name: str) -> float | None:
        return real(part(value, name).get("avg"))

    failed = part(value, "error_request_count")
    icl = block("inter_chunk_latency")
    names = part(value, "input_config", "endpoint").get("model_names")
    cancelled = value.get("was_cancelled") is True
    ended = value.get("is_complete")
    doubts = (f"aiperf: {text(value.get('incomplete_reason')) or 'not complete'}",) if ended is False else ()
    return Result(
        tool=TOOL,
        version=text(value.get("aiperf_version")) or text(value.get("exported_by")),
        model=text(names[0]) if isinstance(names, list) and names else None,
        started_at=text(value.get("start_time")),
        duration_s=one("benchmark_duration"),
        completed=count(one("request_count")),
        unserved=count(failed.get("avg")) if failed else (0 if ended is True and not cancelled else None),
        prompt_tokens=count(one("total_isl")),
        output_tokens=count(one("total_output_tokens")),
        complete=ended is True,
        latency={
            "ttft.from_send": block("time_to_first_token"),
            "ttfo.from_send": block("time_to_first_output_token"),
            "e2e.from_send": needs(block("request_latency"), END, assumed, "no_trailer"),
            "tpot": needs(block("inter_token_latency"), PACE, assumed, "one_token", "no_trailer"),
            "icl": icl,
            "itl": needs(icl, "AIPerf has gaps between responses: see icl", assumed, "one_token"),
        },
        throughput={
            "requests_per_s": one("request_throughput"),
            "output_tokens_per_s": one("output_token_throughput"),
            "total_tokens_per_s": one("total_token_throughput"),
            "goodput_rps": "judged from the send; ours is judged from the intended arrival",
        },
        doubts=(*doubts, *(("aiperf: the run was cancelled",) if cancelled else ())),
    )


def read_records(lines: Sequence[Mapping[str, Any]], assumed: frozenset[str]) -> Result:
    """profile_export.jsonl: percentiles, intervals and TPOT are ours."""
    lines = [r for r in lines if part(r, "metadata").get("benchmark_phase") in (None, "profiling")]
    hung_up = [part(r, "metadata").get("was_cancelled") is True for r in lines]
    failed = [bool(r.get("error")) and not gone for r, gone in zip(lines, hung_up, strict=True)]
    done = [r for r, gone, bad in zip(lines, hung_up, failed, strict=True) if not gone and not bad]

    def value(record: Mapping[str, Any], name: str) -> Any:
        metric = part(record, "metrics", name)
        scale = TO_MS.get(str(metric.get("unit")), 1.0)
        found = metric.get("value")
        return [v * scale for v in reals(found)] if isinstance(found, list) else number(found) * scale

    def each(name: str) -> list[float]:
        found = (value(r, name) for r in done)
        return [v if isinstance(v, float) else float("nan") for v in found]

    gaps = [v if isinstance(v := value(r, "inter_chunk_latency"), list) else [] for r in done]
    firsts, lengths = each("time_to_first_token"), each("output_sequence_length")
    single = bool(done) and all(len(g) + 1 == n for g, n in zip(gaps, lengths, strict=True))
    if single:
        assumed = assumed | {"one_token"}  # shown by the file itself
    rows = list(zip(firsts, gaps, lengths, strict=True))
    icl = pooled(gaps)
    tpot = samples(sum(g) / (n - 1) for _, g, n in rows if g and n > 1)
    starts = [number(part(r, "metadata").get("request_start_ns")) for r in lines]
    ends = [number(part(r, "metadata").get("request_end_ns")) for r in lines]
    return Result(
        tool=TOOL,
        duration_s=real((max(ends) - min(starts)) * 1e-9) if lines else None,
        completed=len(done),
        unserved=sum(failed),
        cancelled=sum(hung_up),
        latency={
            "ttft.from_send": samples(firsts),
            "ttfo.from_send": samples(each("time_to_first_output_token")),
            "e2e.from_send": samples(f + sum(g) for f, g, _ in rows),
            "tpot": needs(tpot, "responses held several tokens", assumed, "one_token"),
            "icl": icl,
            "itl": needs(icl, "AIPerf has gaps between responses: see icl", assumed, "one_token"),
        },
        doubts=("profile_export.jsonl does not say whether the run came to its end",),
    )
