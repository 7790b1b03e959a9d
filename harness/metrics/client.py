"""How the load generator itself did: when it sent, how it read, and what that cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.latency import gap_table
from harness.metrics.percentiles import Floats, describe
from harness.metrics.run import Run

TINY_GAP_MS = 0.1
"""Chunks this close together were one write of the server or one wake-up of the network, not two tokens'
time."""


def client_figures(run: Run, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.client. frame: per_request(run.requests)."""
    recorded = run.meta.get("client") or {}
    reasons: dict[str, str] = {}
    figures: dict[str, Any] = {name: recorded.get(name) for name in ("backend", "stamps", "processes")}
    reasons.update({name: "not recorded" for name, value in figures.items() if value is None})

    no_reads = "the reader stamps: what it reads late, it stamps late"
    for name, values, reason in (
        ("send_lag_ms", frame["send_lag_ms"].to_numpy(), "nothing was sent"),
        ("own_lag_ms", own_lag_ms(run), "nothing was sent"),
        ("loop_lag_ms", samples(recorded, "loop_lag_ms"), "no samples of the client's loop"),
        (
            "read_lag_ms",
            samples(recorded, "read_lag_ms"),
            no_reads if figures["stamps"] == "reader" else "no samples of the client's reads",
        ),
    ):
        figures[name] = describe(values)
        if figures[name]["n"] == 0:
            reasons[name] = reason

    tokens = float(np.nansum(frame["output_tokens"].to_numpy()))
    cpu = recorded.get("cpu_s")
    figures["cpu_s_per_1k_tokens"] = None
    if isinstance(cpu, (int, float)) and tokens > 0:
        figures["cpu_s_per_1k_tokens"] = cpu / tokens * 1000
    else:
        reasons["cpu_s_per_1k_tokens"] = (
            "no output token" if tokens <= 0 else "the client's CPU time was not recorded"
        )
    figures["retries"] = run.retries
    chunks, why = chunk_figures(run.requests)
    figures["calibration"] = recorded.get("calibration")
    if figures["calibration"] is None:
        reasons["calibration"] = "not calibrated"
    return {**figures, **chunks}, {**reasons, **why}


def samples(recorded: dict[str, Any], name: str) -> Floats:
    values = recorded.get(name)
    kept = [v for v in values if isinstance(v, (int, float))] if isinstance(values, (list, tuple)) else []
    return np.asarray(kept, dtype=np.float64)


def chunk_figures(requests: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """How tokens came, over answers of more than one chunk: share of gaps under TINY_GAP_MS, tokens a chunk,
    and share of the chunks that shared a read with an earlier one."""
    names = ("gaps_under_0.1ms_share", "tokens_per_chunk", "coalesced_share")
    figures: dict[str, Any] = dict.fromkeys(names)
    gaps = gap_table(requests)
    later = gaps[gaps["k"] > 0]
    if later.empty:
        return figures, dict.fromkeys(names, "no answer of more than one chunk")
    reasons: dict[str, str] = {}
    figures["gaps_under_0.1ms_share"] = float((later["gap_ms"] < TINY_GAP_MS).mean())
    figures["tokens_per_chunk"] = float(gaps["scaled"].sum() / len(gaps))
    counted = requests.iloc[np.unique(gaps["row"])]
    counted = counted[counted["reads"] > 0]
    chunks = sum(len(c) for c in counted["chunk_ns"])
    if chunks:
        figures["coalesced_share"] = float(counted["coalesced"].sum() / chunks)
    else:
        reasons["coalesced_share"] = "reads were not counted"
    return figures, reasons


def own_lag_ms(run: Run) -> Floats:
    """By how much each send is late of the client's own doing. [first attempts that were sent]

    Requests that are due at one time (all at once, the start of a closed loop) can only leave one after the
    other: each counts from the one before it, so that a burst is no fault and a client that stalls in the
    middle of it is. Under an open loop with load.concurrency the wait for a place was asked for: only what
    follows the dispatch counts. A retry waits for its turn too, and is left out."""
    sent = run.requests[np.isfinite(run.requests["send_ns"]) & ~(run.requests["attempt"] > 1)]
    sent = sent.sort_values(["intended_ns", "send_ns"])
    if capped(run):
        return (sent["send_ns"] - sent["dispatch_ns"]).to_numpy() * 1e-6
    before = sent.groupby("intended_ns")["send_ns"].shift(1)
    return (sent["send_ns"] - np.fmax(sent["intended_ns"], before)).to_numpy() * 1e-6


def lag_samples(run: Run) -> dict[str, Floats]:
    """What harness.validity holds the client to, ms."""
    recorded = run.meta.get("client") or {}
    return {"send lag": own_lag_ms(run), "loop lag": samples(recorded, "loop_lag_ms")}


def capped(run: Run) -> bool:
    """An open loop with a bound on what is under way: arrivals wait for a place, and that is no fault."""
    load = run.config.get("load")
    return isinstance(load, dict) and load.get("kind") == "open" and load.get("concurrency") is not None
