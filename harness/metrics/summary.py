"""summary.json: every figure of a run, derived from its records alone. The contract is docs/metrics.md.

Building it twice gives the same bytes; a figure that was not measured is null and `null_reasons` says why.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.arrivals import arrivals
from harness.metrics.cancellations import cancellations
from harness.metrics.engine import attribution, engine_latency, load_steps, step_figures
from harness.metrics.latency import chunk_table, latency_blocks, per_request, why_no_pace
from harness.metrics.percentiles import describe
from harness.metrics.run import OUTCOMES, Run, load_run
from harness.metrics.stalls import fluidity, stalls
from harness.metrics.throughput import load_window, steady_window, throughput
from harness.metrics.utilization import utilization
from harness.metrics.validity import count_outcomes, invalid_reasons, scheduled

SCHEMA_VERSION = 1
DIGITS = 6  # significant digits of every float: far below the noise, and short to read
LATENCY_ORDER = (
    *("ttft", "tpot", "itl", "icl", "e2e", "normalized"),
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
    """The summary of a run directory. Raises FileNotFoundError when there is no such folder, and nothing
    else."""
    return summarize(load_run(run_dir))


def write_summary(run_dir: str | Path) -> dict[str, Any]:
    """Build the summary and write summary.json in one rename, so that a reader never sees half of it."""
    summary = build_summary(run_dir)
    path = Path(run_dir) / "summary.json"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_json(summary), encoding="utf-8")
    os.replace(partial, path)
    return summary


def to_json(summary: dict[str, Any]) -> str:
    """Strict JSON: NaN and infinity are errors."""
    return json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def summarize(run: Run) -> dict[str, Any]:
    """The summary of a loaded run, with every key of the contract."""
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
    invalid = invalid_reasons(run, counts, client)
    pace = why_no_pace(frame[frame["outcome"] == "completed"])
    rates = reasons.take("throughput", throughput(frame, chunks, steps, window))

    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "valid": not invalid,
        "invalid_reasons": invalid,
        "null_reasons": {},
        "run": reasons.take("run", run_facts(run)),
        **{name: reasons.one(name, fact(run, name)) for name in ("engine", "workload", "model", "device")},
        "setup": setup(run),
        "counts": counts,
        "refusals": refusals(run),
        "failures": failures(run),
        "deadline_misses": reasons.one("deadline_misses", deadline_misses(run, frame)),
        "window": window,
        "latency_ms": reasons.take("latency_ms", all_latency(run, frame)),
        "throughput": rates,
        "steady": reasons.take("steady", steady(run, frame, chunks, steps, window)),
        "by_class": reasons.take("by_class", groups(run, "request_class", slo, window)),
        "by_tenant": reasons.take("by_tenant", groups(run, "tenant", slo, window)),
        "arrivals": reasons.take("arrivals", arrivals(run)),
        "token_source": token_source(run),
        "prompt_tokens": prompt_tokens(run),
        "stalls": reasons.take("stalls", stalls(run.requests, pace)),
        "fluidity": reasons.one("fluidity", fluidity(run.requests, slo, pace)),
        "attribution": reasons.take("attribution", attribution(run, frame)),
        "steps": reasons.take("steps", step_figures(steps)),
        "prefix_cache": {"hit_rate_tokens": None},
        "utilization": reasons.take(
            "utilization", utilization(run, steps, window, rates["output_tokens_per_s"])
        ),
        "cancellations": reasons.take("cancellations", cancellations(run, frame)),
        "client": client,
    }
    reasons.null("prefix_cache.hit_rate_tokens", "the engines have no prefix cache in this version")
    summary["null_reasons"] = dict(sorted(reasons.found.items()))
    return clean(summary)


def all_latency(run: Run, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.latency_ms: the client's figures and the engine's, in the contract's order."""
    blocks, reasons = latency_blocks(run.requests, frame)
    engine, more = engine_latency(run.engine)
    blocks.update(engine)
    return {name: blocks[name] for name in LATENCY_ORDER}, {**reasons, **more}


def steady(
    run: Run, frame: pd.DataFrame, chunks: pd.DataFrame, steps: pd.DataFrame, window: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The same figures over the steady window: latency of the requests that arrived in it, rates inside
    it."""
    span = steady_window(frame, window)
    reason = span.pop("reason", None)
    if reason is not None:
        return (
            {"window": span, "latency_ms": None, "throughput": None},
            dict.fromkeys(("window", "latency_ms", "throughput"), reason),
        )
    reasons = Reasons()
    inside = ((frame["intended_s"] >= span["start_s"]) & (frame["intended_s"] < span["end_s"])).to_numpy()
    chosen = run.requests[inside].reset_index(drop=True)
    engine = run.engine[run.engine["id"].isin(set(chosen["id"]))].reset_index(drop=True)
    part = Run(run.path, run.meta, chosen, engine, run.steps, run.telemetry, run.schedule)
    value = {
        "window": span,
        "latency_ms": reasons.take("latency_ms", all_latency(part, frame[inside].reset_index(drop=True))),
        "throughput": reasons.take("throughput", throughput(frame, chunks, steps, span)),
    }
    return value, reasons.found


def groups(
    run: Run, column: str, slo: dict[str, Any], window: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """counts, latency_ms and throughput of each request class or tenant, over the load window of the whole
    run."""
    reasons = Reasons()
    out: dict[str, Any] = {}
    for name in sorted(set(run.requests[column])):
        part = run.subset(column, name)
        frame = per_request(part.requests, slo)
        outcome = part.requests["outcome"]
        ended = {kind: int((outcome == kind).sum()) for kind in OUTCOMES}
        whole = column in run.schedule and len(run.schedule) == scheduled(run)
        planned = int((run.schedule[column] == name).sum()) if whole else sum(ended.values())
        rates = throughput(frame, chunk_table(part.requests), None, window)
        out[name] = {
            "counts": {"scheduled": planned, **ended},
            "latency_ms": reasons.take(f"{name}.latency_ms", all_latency(part, frame)),
            "throughput": reasons.take(f"{name}.throughput", rates),
        }
    return out, reasons.found


def client_figures(run: Run, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """How the load generator itself did: lateness of its sends, lag of its event loop, CPU per 1,000
    tokens."""
    meta = run.meta.get("client") or {}
    reasons: dict[str, str] = {}
    figures: dict[str, Any] = {"backend": meta.get("backend")}
    if figures["backend"] is None:
        reasons["backend"] = "not recorded"
    figures["send_lag_ms"] = describe(frame["send_lag_ms"].to_numpy())
    lags = [v for v in meta.get("loop_lag_ms") or [] if isinstance(v, (int, float))]
    figures["loop_lag_ms"] = describe(np.asarray(lags, dtype=np.float64))
    for name, reason in (
        ("send_lag_ms", "nothing was sent"),
        ("loop_lag_ms", "no samples of the client's loop"),
    ):
        if figures[name]["n"] == 0:
            reasons[name] = reason
    tokens = float(np.nansum(frame["output_tokens"].to_numpy()))
    cpu = meta.get("cpu_s")
    figures["cpu_s_per_1k_tokens"] = (
        cpu / tokens * 1000 if isinstance(cpu, (int, float)) and tokens > 0 else None
    )
    if figures["cpu_s_per_1k_tokens"] is None:
        reasons["cpu_s_per_1k_tokens"] = (
            "no output token" if tokens <= 0 else "the client's CPU time was not recorded"
        )
    return figures, reasons


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


def endings(run: Run, outcome: str) -> dict[str, list[str]]:
    """The error of every request with this outcome, by its reason: the server's code, else http_<status>."""
    rows = run.requests[run.requests["outcome"] == outcome]
    found: dict[str, list[str]] = {}
    for reason, status, error in zip(rows["reason"], rows["status"], rows["error"], strict=True):
        name = f"http_{int(status)}" if np.isfinite(status) else "unknown"
        found.setdefault(reason if isinstance(reason, str) else name, []).append(
            error if isinstance(error, str) else ""
        )
    return dict(sorted(found.items()))


def refusals(run: Run) -> dict[str, int]:
    """Refused requests by reason."""
    return {reason: len(errors) for reason, errors in endings(run, "rejected").items()}


def failures(run: Run) -> dict[str, dict[str, Any]]:
    """Failed requests by reason, with the first error of each: enough to know what to mend."""
    found = endings(run, "failed")
    return {reason: {"count": len(errors), "example": errors[0]} for reason, errors in found.items()}


def deadline_misses(run: Run, frame: pd.DataFrame) -> tuple[int | None, str | None]:
    """Requests with a deadline that were not whole by then, from the intended arrival; hang-ups and
    cut-offs aside."""
    if "deadline_ms" not in run.schedule or not run.schedule["deadline_ms"].notna().any():
        return None, "the workload sets no deadlines"
    due = run.schedule.set_index("id")["deadline_ms"]
    limit = frame["id"].map(due).to_numpy(dtype=np.float64)
    return int((frame["issued"].to_numpy() & (frame["late_ms"].to_numpy() > limit)).sum()), None


def token_source(run: Run) -> dict[str, int]:
    """Where each request's token count came from, and how often two sources disagreed."""
    source = run.requests["token_source"]
    counts = {name: int((source == name).sum()) for name in ("usage", "ids", "retokenised")}
    return {**counts, "mismatches": int(run.requests["token_mismatch"].sum())}


def prompt_tokens(run: Run) -> dict[str, int]:
    """Tokens of the prompts that a server has counted: what was planned for them, and what it counted."""
    counted = run.requests[np.isfinite(run.requests["prompt_tokens"])]
    return {
        "planned": int(counted["planned_prompt_tokens"].fillna(0).sum()),
        "counted": int(counted["prompt_tokens"].sum()),
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
