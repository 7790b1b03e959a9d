"""summary.json: every figure of a run, derived from its records alone. The contract is docs/metrics.md.

Building it twice gives the same bytes; a figure that was not measured is null and `null_reasons` says why.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.arrivals import arrivals
from harness.metrics.attribution import attribution, lives, queue_reasons
from harness.metrics.cancellations import cancellations
from harness.metrics.client import client_figures, lag_samples
from harness.metrics.counts import (
    count_outcomes,
    deadline_misses,
    failures,
    output_tokens,
    prompt_tokens,
    refusals,
    scheduled,
    token_source,
)
from harness.metrics.ending import kv_live_end
from harness.metrics.engine import engine_latency, load_steps, prefix_cache, step_figures, thrashing
from harness.metrics.latency import chunk_table, latency_blocks, per_request, why_no_pace
from harness.metrics.percentiles import FLOOR_RULES, hold_to_floor
from harness.metrics.run import OUTCOMES, Run, load_run
from harness.metrics.stalls import deadline_table, fluidity, stall_factor, stalls
from harness.metrics.throughput import throughput
from harness.metrics.utilization import server_metrics, utilization
from harness.metrics.windows import around, concurrency, counted, load_window, steady_window
from harness.request_log import RecordsWriteError
from harness.validity import judge
from workloads import output

SCHEMA_VERSION = 1
DIGITS = 6  # significant digits of every float: far below the noise, and short to read
LATENCY_ORDER = (
    *("ttft", "ttfc", "ttfo", "tpot", "itl", "icl", "e2e", "normalized"),
    *("queue_delay", "prefill", "decode", "adj_ttft", "adj_e2e"),
)


class Reasons:
    """Collects null_reasons under their full path."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def take(self, path: str, result: tuple[Any, dict[str, str]]) -> Any:
        """The figures of a part; its reasons go under path."""
        value, reasons = result
        for name, reason in reasons.items():
            self.found[f"{path}.{name}" if path else name] = reason
        return value

    def one(self, path: str, result: tuple[Any, str | None]) -> Any:
        value, reason = result
        if reason is not None:
            self.found[path] = reason
        return value

    def null(self, path: str, reason: str) -> None:
        self.found[path] = reason


def build_summary(run_dir: str | Path) -> dict[str, Any]:
    """The summary of a run directory. Raises FileNotFoundError when there is none, and nothing else."""
    return summarize(load_run(run_dir))


def write_summary(run_dir: str | Path) -> dict[str, Any]:
    """Build the summary and save it. Raises what both raise."""
    summary = build_summary(run_dir)
    save_summary(summary, run_dir)
    return summary


def save_summary(summary: dict[str, Any], run_dir: str | Path) -> None:
    """Write summary.json in one rename, so that a reader never sees half of it. Raises RecordsWriteError."""
    path = Path(run_dir) / "summary.json"
    try:
        output.whole(path, to_json(summary).encode("utf-8"))
    except OSError as error:
        raise RecordsWriteError(path, error) from error


def to_json(summary: dict[str, Any]) -> str:
    """Strict JSON: NaN and infinity are errors."""
    return json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def summarize(run: Run) -> dict[str, Any]:
    """The summary of a loaded run, with every key of the contract; an imported one has its own."""
    if run.imported is not None:
        return run.imported
    reasons = Reasons()
    slo = run.meta.get("slo") or {}
    frame = per_request(run.requests, slo)
    chunks = chunk_table(run.requests)
    window = load_window(run.requests)
    if window["start_s"] is None:
        reasons.null("window", "nothing was sent and ended")
    steps = load_steps(run, window)
    counts = count_outcomes(run)
    client = reasons.take("client", client_figures(run, frame))
    pace = why_no_pace(frame[frame["outcome"] == "completed"])
    rates = reasons.take("throughput", throughput(frame, chunks, steps, window))
    pauses = reasons.take("stalls", stalls(run.requests, pace, factor=stall_factor(run)))
    missed = deadline_table(run.requests, frame, slo)
    spent = lives(run, frame)
    steady_span = steady_window(frame, window)
    for name in ("warmup", "drain"):
        if steady_span["start_s"] is None:
            reasons.null(name, steady_span["reason"])
    before, after = around(window, steady_span)

    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "valid": True,
        "invalid_reasons": [],
        "warnings": [],
        "null_reasons": {},
        "run": reasons.take("run", run_facts(run)),
        **{name: reasons.one(name, fact(run, name)) for name in ("engine", "workload", "model", "device")},
        "setup": setup(run),
        "counts": counts,
        "refusals": refusals(run),
        "failures": failures(run),
        "deadline_misses": reasons.one("deadline_misses", deadline_misses(run, frame)),
        "window": counted(window, frame, chunks, last=True),
        "warmup": counted(before, frame, chunks),
        "drain": counted(after, frame, chunks, last=True),
        "latency_ms": reasons.take("latency_ms", all_latency(run, frame)),
        "throughput": rates,
        "steady": reasons.take("steady", steady(run, frame, chunks, steps, window, steady_span)),
        "by_class": reasons.take(
            "by_class", groups(run, "request_class", frame, window, pauses["threshold_ms"], missed, spent)
        ),
        "by_tenant": reasons.take(
            "by_tenant", groups(run, "tenant", frame, window, pauses["threshold_ms"], missed, spent)
        ),
        "arrivals": reasons.take("arrivals", arrivals(run)),
        "in_flight": reasons.take("in_flight", concurrency(frame, window)),
        "token_source": token_source(run),
        "prompt_tokens": prompt_tokens(run),
        "output_tokens": reasons.take("output_tokens", output_tokens(run)),
        "stalls": pauses,
        "fluidity": reasons.one("fluidity", fluidity(missed, pace)),
        "attribution": reasons.take("attribution", attribution(spent, run)),
        "queue_reasons": reasons.take("queue_reasons", queue_reasons(spent, run)),
        "steps": {
            **reasons.take("steps", step_figures(steps)),
            "kv_live_end": reasons.one("steps.kv_live_end", kv_live_end(run.ending)),
        },
        "prefix_cache": reasons.take("prefix_cache", prefix_cache(run, steps)),
        "utilization": reasons.take(
            "utilization", utilization(run, steps, window, rates["output_tokens_per_s"])
        ),
        "server_metrics": reasons.take("server_metrics", server_metrics(run, window)),
        "cancellations": reasons.take("cancellations", cancellations(run, frame)),
        "client": client,
    }
    hold_to_floor(summary, percentile_floor(run))
    summary["invalid_reasons"], summary["warnings"] = judge(run, summary, lag_samples(run))
    if (thrash := thrashing(steps)) is not None:
        summary["warnings"].append(thrash)
    summary["valid"] = not summary["invalid_reasons"]
    summary["null_reasons"] = dict(sorted(reasons.found.items()))
    return clean(summary)


def percentile_floor(run: Run) -> str:
    """slo.percentile_floor of the run; interval where it is not set."""
    rule = run.slo_setting("percentile_floor")
    return rule if rule in FLOOR_RULES else FLOOR_RULES[0]


def all_latency(run: Run, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.latency_ms: the client's figures and the engine's, in the contract's order."""
    blocks, reasons = latency_blocks(run.requests, frame)
    engine, more = engine_latency(run.engine)
    blocks.update(engine)
    return {name: blocks[name] for name in LATENCY_ORDER}, {**reasons, **more}


def steady(
    run: Run,
    frame: pd.DataFrame,
    chunks: pd.DataFrame,
    steps: pd.DataFrame,
    whole: dict[str, Any],
    span: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The same figures over the steady window: latency of the requests that arrived in it, rates inside
    it."""
    reason = span.pop("reason", None)
    last = span["end_s"] is not None and span["end_s"] >= whole["end_s"]
    window = counted(span, frame, chunks, last=last)
    if reason is not None:
        return (
            {"window": window, "latency_ms": None, "throughput": None},
            dict.fromkeys(("window", "latency_ms", "throughput"), reason),
        )
    reasons = Reasons()
    inside = ((frame["intended_s"] >= span["start_s"]) & (frame["intended_s"] < span["end_s"])).to_numpy()
    latency = all_latency(run.choose(inside), frame[inside].reset_index(drop=True))
    value = {
        "window": window,
        "latency_ms": reasons.take("latency_ms", latency),
        "throughput": reasons.take("throughput", throughput(frame, chunks, steps, span)),
    }
    return value, reasons.found


def groups(
    run: Run,
    column: str,
    frame: pd.DataFrame,
    window: dict[str, Any],
    stall_ms: float | None,
    missed: np.ndarray | None,
    spent: pd.DataFrame,
) -> tuple[dict[str, Any], dict[str, str]]:
    """counts, latency_ms, throughput, stalls, fluidity and attribution of each request class or tenant, over
    the load window and with the stall threshold of the whole run. spent: lives(run)."""
    reasons = Reasons()
    out: dict[str, Any] = {}
    for name in sorted(set(run.requests[column])):
        chosen = (run.requests[column] == name).to_numpy()
        part = run.subset(column, name)
        own = frame[chosen].reset_index(drop=True)
        outcome = part.requests["outcome"]
        ended = {kind: int((outcome == kind).sum()) for kind in OUTCOMES}
        whole = column in run.schedule and len(run.schedule) == scheduled(run)
        planned = int((run.schedule[column] == name).sum()) if whole else sum(ended.values())
        rates = throughput(own, chunk_table(part.requests), None, window)
        pace = why_no_pace(own[own["outcome"] == "completed"])
        theirs = spent[spent[column] == name]
        share = fluidity(None if missed is None else missed[chosen], pace)
        out[name] = {
            "counts": {"scheduled": planned, **ended},
            "latency_ms": reasons.take(f"{name}.latency_ms", all_latency(part, own)),
            "throughput": reasons.take(f"{name}.throughput", rates),
            "stalls": reasons.take(f"{name}.stalls", stalls(part.requests, pace, stall_ms)),
            "fluidity": reasons.one(f"{name}.fluidity", share),
            "attribution": reasons.take(f"{name}.attribution", attribution(theirs, part)),
            "queue_reasons": reasons.take(f"{name}.queue_reasons", queue_reasons(theirs, part)),
        }
    return out, reasons.found


def run_facts(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.run: who, when, and the fingerprints that say what may be compared."""
    meta = run.meta
    names = ("started_at", "duration_s", "complete", "incomplete_reason", "seed", "length_mode")
    facts: dict[str, Any] = {"id": meta.get("run"), **{name: meta.get(name) for name in names}}
    facts["complete"] = bool(meta.get("complete", False))
    prints = meta.get("fingerprint") or {}
    facts["fingerprint"] = {name: prints.get(name) for name in ("schedule", "config", "host", "device")}
    reasons = {name: "not recorded" for name, value in facts.items() if value is None}
    if facts["complete"]:
        reasons["incomplete_reason"] = "the run is complete"
    reasons.update({f"fingerprint.{k}": "not recorded" for k, v in facts["fingerprint"].items() if v is None})
    return facts, reasons


def fact(run: Run, name: str) -> tuple[Any, str | None]:
    """What the run calls its engine, workload, model or device."""
    value = run.meta.get(name)
    if isinstance(value, dict):
        value = value.get("name")
    return value, None if value is not None else "not recorded"


def setup(run: Run) -> dict[str, Any]:
    """What the run was asked for: SLO, plan and the engine's settings (resolved ones of a ready server
    win)."""
    config = run.config.get("engine")
    settings = dict(config) if isinstance(config, dict) else {}
    server = run.meta.get("server") or {}
    settings.update({name: value for name, value in server.items() if name in settings and value is not None})
    runner = {name: server.get(name) for name in ("dtype", "attention", "determinism", "parameters")}
    return {
        "slo": run.meta.get("slo") or {},
        "planned": run.meta.get("planned") or {},
        "engine": settings,
        "runner": runner if server else {},
    }


def clean(value: Any) -> Any:
    """Floats to DIGITS significant digits, numpy to plain Python, non-finite to null."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None
    return value
