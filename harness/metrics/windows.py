"""Where in time a run's figures come from: the load window, and warm-up, steady state and drain inside it.

The steady window runs from the first to the last moment at which as many requests were in flight as at the
median moment between the first arrival and the last send: before it the load builds up (or a ramp climbs),
after it, at the last send at the latest, the last answers drain. It is the crossing rule of simulation output
analysis (Fishman 1973) with the median in the place of the mean, applied at both ends. A share of the peak,
as other tools use, keeps half of a ramp at 0.5; near 1 it falls apart into the bursts of Poisson arrivals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

LOAD_RULE = "first intended arrival to last answer's end"
STEADY_RULE = "first to last moment with in-flight at its median, up to the last send"
WARMUP_RULE = "load window before the steady window"
DRAIN_RULE = "load window after the steady window"
TREND = 1.4
"""A steady window whose last third holds this many times the requests in flight of its first third (and
TREND_REQUESTS more) is not steady. A load that grows from nothing to the end gives 1.57."""
TREND_REQUESTS = 2.0

Span = dict[str, Any]


def span(start_s: float | None, end_s: float | None, rule: str) -> Span:
    return {"start_s": start_s, "end_s": end_s, "rule": rule}


def load_window(requests: pd.DataFrame) -> Span:
    """From the first intended arrival to the last answer's end (seconds); ramp and drain are inside."""
    sent = requests[np.isfinite(requests["send_ns"])]
    start, end = requests["intended_ns"].min(), sent["end_ns"].max()
    if not (np.isfinite(start) and np.isfinite(end) and end > start):
        return span(None, None, LOAD_RULE)
    return span(float(start) * 1e-9, float(end) * 1e-9, LOAD_RULE)


def in_flight(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Sweep line over half-open intervals [send, end): (times in seconds, requests in flight from that time
    to the next). frame: per_request."""
    sent = frame[np.isfinite(frame["send_s"]) & np.isfinite(frame["end_s"])]
    if sent.empty:
        return np.array([]), np.array([], dtype=np.int64)
    times = np.concatenate([sent["send_s"].to_numpy(), sent["end_s"].to_numpy()])
    delta = np.concatenate([np.ones(len(sent), dtype=np.int64), -np.ones(len(sent), dtype=np.int64)])
    unique, index = np.unique(times, return_inverse=True)
    return unique, np.cumsum(np.bincount(index, weights=delta, minlength=unique.size)).astype(np.int64)


def concurrency(frame: pd.DataFrame, window: Span) -> tuple[dict[str, Any], dict[str, str]]:
    """Requests in flight: the most at once, and the mean over the load window."""
    times, level = in_flight(frame)
    if not times.size or window["start_s"] is None:
        return dict.fromkeys(("peak", "mean")), dict.fromkeys(("peak", "mean"), "nothing was sent and ended")
    held = float((np.diff(times) * level[:-1]).sum())
    return {"peak": int(level.max()), "mean": held / (window["end_s"] - window["start_s"])}, {}


def steady_window(frame: pd.DataFrame, window: Span) -> Span:
    """The steady window; bounds are null, with a `reason`, where there is none."""
    none = span(None, None, STEADY_RULE)
    times, level = in_flight(frame)
    if window["start_s"] is None or not times.size:
        return {**none, "reason": "no load window: nothing was sent and ended"}
    # Each level holds to the next time; before the first send nothing is in flight.
    last_send = float(np.nanmax(frame["send_s"].to_numpy()))
    edges = np.concatenate([[min(window["start_s"], times[0])], times, [max(window["end_s"], times[-1])]])
    edges = np.minimum(edges, last_send)
    levels = np.concatenate([[0], level])
    widths = np.diff(edges)
    usual = max(1, _median(levels, widths))
    high = np.flatnonzero((levels >= usual) & (widths > 0))
    if not high.size:
        return {**none, "reason": "no steady state: all requests were sent at one time"}
    start, end = float(edges[high[0]]), float(edges[high[-1] + 1])
    thirds = [_mean(edges, levels, start + (end - start) * i / 3, (end - start) / 3) for i in (0, 2)]
    for before, after, verb in ((thirds[0], thirds[1], "grows"), (thirds[1], thirds[0], "falls")):
        if after > TREND * before + TREND_REQUESTS:
            return {
                **none,
                "reason": f"no steady state: in-flight {verb} from {thirds[0]:.3g} to {thirds[1]:.3g} "
                "requests between the first and the last third",
            }
    return span(start, end, STEADY_RULE)


def around(window: Span, steady: Span) -> tuple[Span, Span]:
    """(warm-up, drain): what of the load window lies before and after the steady one; null without one."""
    if window["start_s"] is None or steady["start_s"] is None:
        return span(None, None, WARMUP_RULE), span(None, None, DRAIN_RULE)
    return (
        span(window["start_s"], steady["start_s"], WARMUP_RULE),
        span(steady["end_s"], window["end_s"], DRAIN_RULE),
    )


def counted(part: Span, frame: pd.DataFrame, chunks: pd.DataFrame, *, last: bool = False) -> Span:
    """The span with its sample: requests that were meant to arrive in [start, end), completed ones that ended
    in it, and output tokens stamped in it. last: the end belongs to it."""
    if part["start_s"] is None:
        return {**part, **dict.fromkeys(("requests", "completed", "output_tokens"))}
    start, end = part["start_s"], part["end_s"] + (2e-9 if last else 0.0)

    def inside(values: pd.Series) -> np.ndarray:
        data = values.to_numpy(dtype=np.float64)
        return (data >= start) & (data < end)

    done = frame[frame["outcome"] == "completed"]
    whole = done[done["chunks"] == 0]
    tokens = float(chunks.loc[inside(chunks["t_ns"] * 1e-9), "scaled"].sum())
    tokens += float(whole.loc[inside(whole["last_s"]), "output_tokens"].sum())
    return {
        **part,
        "requests": int(inside(frame["intended_s"]).sum()),
        "completed": int(inside(done["end_s"].fillna(done["last_s"])).sum()),
        "output_tokens": round(tokens),
    }


def _median(levels: np.ndarray, widths: np.ndarray) -> int:
    """The level of the median moment: each level weighs as long as it held."""
    order = np.argsort(levels, kind="stable")
    held = np.cumsum(widths[order])
    return int(levels[order][np.searchsorted(held, held[-1] / 2)])


def _mean(edges: np.ndarray, levels: np.ndarray, start: float, length: float) -> float:
    """Time-weighted mean level over [start, start + length]."""
    clipped = np.clip(edges, start, start + length)
    return float((np.diff(clipped) * levels).sum() / length) if length > 0 else 0.0
