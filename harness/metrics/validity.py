"""Whether a run may be believed. A run that may not says why, and no gate uses it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from harness.metrics.percentiles import describe
from harness.metrics.run import OUTCOMES, Run

MAX_SEND_LAG_P99_MS = 50.0
MAX_LOOP_LAG_P99_MS = 50.0
MAX_ERROR_RATE = 0.01
CLOCK_STEP_NS = 5_000_000
CLOCK_SLEW = 1e-3
"""A clock that is being disciplined drifts (500 ppm at most, doubled here); one that jumps was stepped."""


def count_outcomes(run: Run) -> dict[str, int]:
    """scheduled, and how each request ended. scheduled comes from the schedule, the rest from the client's
    records."""
    outcome = run.requests["outcome"]
    counts = {name: int((outcome == name).sum()) for name in OUTCOMES}
    return {"scheduled": scheduled(run), **counts}


def scheduled(run: Run) -> int:
    """Requests that were due. A closed loop that ran out of time had fewer than its schedule holds; meta.json
    then has their number."""
    planned = (run.meta.get("planned") or {}).get("requests")
    if isinstance(planned, int):
        return planned
    return len(run.schedule) or len(run.requests)


def invalid_reasons(run: Run, counts: dict[str, int], client: dict[str, Any]) -> list[str]:
    """Every reason why this run's figures may not be compared; empty when it is valid."""
    reasons: list[str] = []
    if not run.meta.get("complete", False):
        why = run.meta.get("incomplete_reason") or "the run did not record its end"
        reasons.append(f"incomplete: {why}")
    reasons.extend(f"records: {problem}" for problem in run.problems if _matters(run, problem))
    if not run.closed and run.meta.get("complete", False):
        reasons.append("records: requests.jsonl has no footer")
    ended = sum(counts[name] for name in OUTCOMES)
    known = len(run.requests)
    if ended != known:
        reasons.append(f"conservation: {known - ended} of {known} records have no known outcome")
    if counts["scheduled"] != ended:
        reasons.append(f"conservation: {counts['scheduled']} requests were scheduled, {ended} ended")
    if counts["completed"] == 0:
        reasons.append("no request completed")
    issued = counts["scheduled"] - counts["cut_off"]
    errors = counts["failed"] + counts["timed_out"]
    if issued > 0 and errors / issued > MAX_ERROR_RATE:
        reasons.append(
            f"errors: {errors} of {issued} requests failed or timed out (limit {MAX_ERROR_RATE:.0%})"
        )
    lags = {
        "send_lag_ms": describe(own_lag_ms(run))["p99"],
        "loop_lag_ms": client["loop_lag_ms"]["p99"],
    }
    for name, limit in (("send_lag_ms", MAX_SEND_LAG_P99_MS), ("loop_lag_ms", MAX_LOOP_LAG_P99_MS)):
        p99 = lags[name]
        if p99 is not None and p99 > limit:
            reasons.append(f"client_bound: {name} p99 is {p99:.1f} ms (limit {limit:g} ms)")
    step = clock_step_ns(run.meta.get("clock_pairs") or [])
    if step is not None:
        reasons.append(f"clock: the wall clock was stepped by {step / 1e6:.1f} ms during the run")
    return reasons


def own_lag_ms(run: Run) -> np.ndarray:
    """By how much each send is late of the client's own doing. [sent requests]

    Requests that are due at one time (all at once, the start of a closed loop) can only leave one after the
    other: each counts from the one before it, so that a burst is no fault and a client that stalls in the
    middle of it is. Under an open loop with load.concurrency the wait for a place was asked for: only what
    follows the dispatch counts."""
    sent = run.requests[np.isfinite(run.requests["send_ns"])].sort_values(["intended_ns", "send_ns"])
    if capped(run):
        return (sent["send_ns"] - sent["dispatch_ns"]).to_numpy() * 1e-6
    before = sent.groupby("intended_ns")["send_ns"].shift(1)
    return (sent["send_ns"] - np.fmax(sent["intended_ns"], before)).to_numpy() * 1e-6


def capped(run: Run) -> bool:
    """An open loop with a bound on what is under way: arrivals wait for a place, and that is no fault."""
    load = run.config.get("load") or {}
    return load.get("kind") == "open" and load.get("concurrency") is not None


def _matters(run: Run, problem: str) -> bool:
    """A foreign server leaves no engine records, and that is no fault."""
    return "no such file" not in problem or problem.startswith(("meta", "requests"))


def clock_step_ns(pairs: list[Any]) -> int | None:
    """The largest jump of realtime against monotonic between two clock pairs, when it is more than
    slewing."""
    worst = 0
    known = [
        p
        for p in pairs
        if isinstance(p, (list, tuple)) and len(p) == 2 and all(isinstance(v, int) for v in p)
    ]
    for (m0, r0), (m1, r1) in pairwise(known):
        jump = abs((r1 - m1) - (r0 - m0))
        if jump > CLOCK_STEP_NS + CLOCK_SLEW * abs(m1 - m0):
            worst = max(worst, jump)
    return worst or None
