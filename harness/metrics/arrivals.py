"""How the load really arrived: rate, burstiness and what the client held back."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.metrics.percentiles import Floats
from harness.metrics.run import Run
from harness.metrics.throughput import planned_rate

LATE_MS = 100.0
"""An arrival that leaves this much after its time counts as deferred."""
IOD_WINDOWS_S = (0.2, 1.0, 5.0)
MIN_WINDOWS = 10
"""Fewer windows than this say nothing about dispersion."""


def index_of_dispersion(times_s: Floats, width_s: float) -> float | None:
    """Variance over mean of the arrivals in windows of width_s: 1 for Poisson at every width, more when
    bursty (Fano factor; Cox & Lewis 1966). None with fewer than MIN_WINDOWS whole windows."""
    if times_s.size < 2:
        return None
    start = float(times_s.min())
    windows = int((float(times_s.max()) - start) / width_s)
    if windows < MIN_WINDOWS:
        return None
    index = np.floor((times_s - start) / width_s).astype(np.int64)
    counts = np.bincount(index[index < windows], minlength=windows)
    mean = counts.mean()
    return float(counts.var(ddof=1) / mean) if mean > 0 else None


def arrivals(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """Realised rate (1/s) and gap CV of the sends, index of dispersion, deferred and shed arrivals."""
    sends = np.sort(run.requests["send_ns"].dropna().to_numpy()) * 1e-9
    figures: dict[str, Any] = {"planned_rate": planned_rate(run), "rate": None, "cv": None}
    reasons: dict[str, str] = {}
    if figures["planned_rate"] is None:
        reasons["planned_rate"] = "the workload has no planned rate"
    gaps = np.diff(sends)
    if gaps.size and gaps.sum() > 0:
        figures["rate"] = float(gaps.size / gaps.sum())
    else:
        reasons["rate"] = "fewer than two sends"
    if gaps.size > 1 and gaps.mean() > 0:
        figures["cv"] = float(gaps.std(ddof=1) / gaps.mean())
    else:
        reasons["cv"] = "fewer than three sends"
    figures["iod"] = {}
    for width in IOD_WINDOWS_S:
        name = f"{width:g}s"
        figures["iod"][name] = index_of_dispersion(sends, width)
        if figures["iod"][name] is None:
            reasons[f"iod.{name}"] = f"fewer than {MIN_WINDOWS} windows of {name}"
    lag_ms = (run.requests["send_ns"] - run.requests["intended_ns"]) * 1e-6
    figures["deferred"] = int((lag_ms > LATE_MS).sum())
    cut = run.requests[run.requests["outcome"] == "cut_off"]
    figures["shed"] = int((cut["reason"] == "shed").sum())
    return figures, reasons
