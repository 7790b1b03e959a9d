"""How the load really arrived: rate, burstiness, and what the client held back or never sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.percentiles import Floats
from harness.metrics.run import Run
from harness.metrics.throughput import planned_rate

LATE_MS = 100.0
"""An arrival that leaves this much after its time counts as deferred."""
IOD_WINDOWS_S = (0.2, 1.0, 5.0)
MIN_WINDOWS = 10
"""Fewer windows than this say nothing about dispersion."""
MOST_IDS = 20
"""Ids listed in the summary; requests.parquet has all of them, by reason."""


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


def most_within(times_s: Floats, width_s: float) -> int:
    """The most arrivals in any half-open window [t, t + width_s). times_s is sorted."""
    if not times_s.size:
        return 0
    return int((np.searchsorted(times_s, times_s + width_s, side="left") - np.arange(times_s.size)).max())


def arrivals(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """Realised rate (1/s), gap CV and index of dispersion of the sends, the rate against the schedule's own,
    and the requests that left late (deferred), were shed, or were never sent (dropped), with their ids."""
    requests = run.requests
    sends = np.sort(requests["send_ns"].dropna().to_numpy()) * 1e-9
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
    figures["most_in_1s"] = most_within(sends, 1.0)
    figures["planned_cv"], figures["planned_iod"], more = drawn(run)
    reasons.update(more)
    figures["due"], figures["sent_of_due"], figures["rate_error"], why = rate_error(run)
    if why is not None:
        reasons.update(dict.fromkeys(("due", "sent_of_due", "rate_error"), why))

    left = np.isfinite(requests["dispatch_ns"]) | np.isfinite(requests["send_ns"])
    cut = (requests["outcome"] == "cut_off") & ~left
    shed = cut & (requests["reason"] == "shed")
    lag_ms = (requests["send_ns"] - requests["intended_ns"]) * 1e-6
    figures["sent"] = int(left.sum())
    for name, rows in (("deferred", lag_ms > LATE_MS), ("shed", shed), ("dropped", cut & ~shed)):
        figures[name] = int(rows.sum())
        figures[f"{name}_ids"] = requests.loc[rows, "id"].head(MOST_IDS).tolist()
    return figures, reasons


def drawn(run: Run) -> tuple[float | None, dict[str, float | None], dict[str, str]]:
    """(gap CV, index of dispersion, reasons) of the arrivals as the schedule holds them: what the workload
    asked for, before any client had a hand in it."""
    iod: dict[str, float | None] = {f"{width:g}s": None for width in IOD_WINDOWS_S}
    times = first_turns(run)
    if times is None:
        why = "a closed loop has no planned arrivals" if run.load_kind == "closed" else "no schedule"
        return None, iod, {"planned_cv": why, **{f"planned_iod.{name}": why for name in iod}}
    at = np.sort(times["arrival_s"].to_numpy(dtype=np.float64))
    gaps = np.diff(at)
    reasons: dict[str, str] = {}
    cv = float(gaps.std(ddof=1) / gaps.mean()) if gaps.size > 1 and gaps.mean() > 0 else None
    if cv is None:
        reasons["planned_cv"] = "fewer than three arrivals, or all at one time"
    for width in IOD_WINDOWS_S:
        name = f"{width:g}s"
        iod[name] = index_of_dispersion(at, width)
        if iod[name] is None:
            reasons[f"planned_iod.{name}"] = f"fewer than {MIN_WINDOWS} windows of {name}"
    return cv, iod, reasons


def first_turns(run: Run) -> pd.DataFrame | None:
    """Rows of the schedule whose arrival it times itself; None for a closed loop and without a schedule."""
    plan = run.schedule
    if run.load_kind == "closed" or not {"id", "arrival_s"} <= set(plan):
        return None
    return plan[plan["turn"].fillna(0) == 0] if "turn" in plan else plan


def rate_error(run: Run) -> tuple[int | None, int | None, float | None, str | None]:
    """(requests that were due until the last send, how many of them were sent, realised rate over drawn rate
    - 1, why null).

    Both rates are of the arrivals that the schedule itself times (first turns of an open loop) and end with
    the last send: neither the sampling error of the drawn times nor what the run's end cut off is in it."""
    plan = first_turns(run)
    if plan is None:
        why = "a closed loop has no planned arrivals" if run.load_kind == "closed" else "no schedule"
        return None, None, None, why
    sends = run.requests.set_index("id")["send_ns"] * 1e-9
    times = plan["arrival_s"].to_numpy(dtype=np.float64)
    sent = plan["id"].map(sends).to_numpy(dtype=np.float64)
    gone = np.isfinite(sent) & np.isfinite(times)
    if gone.sum() < 2:
        return None, None, None, "fewer than two sends"
    due = times <= times[gone].max()
    planned, realised = np.ptp(times[due]), np.ptp(sent[gone])
    if planned <= 0 or realised <= 0:
        return None, None, None, "all arrivals were due at one time"
    drawn, found = (int(due.sum()) - 1) / planned, (int(gone.sum()) - 1) / realised
    return int(due.sum()), int(gone.sum()), float(found / drawn - 1), None
