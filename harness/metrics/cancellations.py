"""Users who hung up: how many, where their request was, how soon the engine let go, and who got the room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.engine import NO_ENGINE, joined
from harness.metrics.percentiles import Floats, describe, empty_block
from harness.metrics.run import Run

STATES = ("queued", "prefill", "decode", "preempted", "held")
HOLDING = ("prefill", "decode", "held")
"""States in which a request has a slot that another one can get."""


def cancellations(run: Run, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """count and received_tokens (client); by_state, wasted_tokens, release_ms (the client's hang-up to the
    blocks being free) and reuse_ms (to the next admission of someone who was waiting when they came free), of
    the engine, whole and by state."""
    hung_up = (run.requests["outcome"] == "cancelled").to_numpy()
    count = int(hung_up.sum())
    figures: dict[str, Any] = {
        "count": count,
        "by_state": dict.fromkeys(STATES),
        "wasted_tokens": None,
        "received_tokens": received_tokens(run.requests[hung_up]),
        "release_ms": empty_block(),
        "release_ms_by_state": {state: empty_block() for state in STATES},
        "reuse_ms": empty_block(),
        "reuse_ms_by_state": {state: empty_block() for state in HOLDING},
    }
    if run.engine.empty:
        names = ("by_state", "wasted_tokens", "release_ms", "release_ms_by_state", "reuse_ms")
        return figures, dict.fromkeys((*names, "reuse_ms_by_state"), NO_ENGINE)
    gone = joined(run, frame)
    gone = gone[gone["outcome"] == "cancelled"]
    figures["by_state"] = {state: int((gone["abort_state"] == state).sum()) for state in STATES}
    figures["wasted_tokens"] = int(np.nansum(gone["wasted_tokens"].to_numpy()))
    # Only what the engine aborted: a request that had finished by then held nothing any more.
    aborted = gone[gone["finish_reason"] == "abort"]
    state = aborted["abort_state"].to_numpy()
    release = (aborted["finish_ns"] - aborted["end_ns"]).to_numpy() * 1e-6
    admitted = next_admission_ns(run.engine, aborted["finish_ns"].to_numpy())
    reuse = np.where(np.isin(state, HOLDING), (admitted - aborted["end_ns"].to_numpy()) * 1e-6, np.nan)
    reasons: dict[str, str] = {}
    none = "no request was cancelled" if not count else "the engine aborted none"
    for name, values, states, why in (
        ("release_ms", release, STATES, "the hang-up's time is not known"),
        ("reuse_ms", reuse, HOLDING, "nobody was waiting when a slot came free"),
    ):
        figures[name] = describe(values)
        if figures[name]["n"] == 0:
            reasons[name] = none if aborted.empty else why
        for one in states:
            block = figures[f"{name}_by_state"][one] = describe(values[state == one])
            if block["n"] == 0:
                absent = none if aborted.empty else f"none was aborted in state {one}"
                reasons[f"{name}_by_state.{one}"] = why if (state == one).any() else absent
    return figures, reasons


def received_tokens(hung_up: pd.DataFrame) -> int:
    """Output tokens that had reached users when they hung up: the part of the waste that every server's
    client can see."""
    held = np.array([float(np.sum(tokens)) for tokens in hung_up["chunk_tokens"]])
    return int(held.sum()) if held.size else 0


def next_admission_ns(engine: pd.DataFrame, free_ns: Floats) -> Floats:
    """For each time at which blocks came free: when the next of those who were waiting then was admitted
    (arrival <= free <= admission); NaN where nobody was, or none of them ever was."""
    known = engine.dropna(subset=["arrival_ns", "admitted_ns"]).sort_values("admitted_ns", kind="stable")
    arrival, admitted = known["arrival_ns"].to_numpy(), known["admitted_ns"].to_numpy()
    earliest = np.minimum.accumulate(arrival[::-1])[::-1] if arrival.size else arrival
    found = np.full(free_ns.size, np.nan)
    for i, free in enumerate(free_ns):
        at = int(np.searchsorted(admitted, free, side="left")) if np.isfinite(free) else admitted.size
        while at < admitted.size and earliest[at] <= free:
            if arrival[at] <= free:
                found[i] = admitted[at]
                break
            at += 1
    return found
