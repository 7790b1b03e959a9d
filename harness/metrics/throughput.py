"""Work per second inside a window: a token counts where its own stamp lies, a request where it ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.run import Run

NAMES = (
    *("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "prefill_tokens_per_s"),
    *("goodput_rps", "slo_attainment"),
)


def load_window(requests: pd.DataFrame) -> dict[str, Any]:
    """From the first intended arrival to the last answer's end (seconds); ramp and drain are inside."""
    rule = "first intended arrival to last answer's end"
    sent = requests[np.isfinite(requests["send_ns"])]
    start, end = requests["intended_ns"].min(), sent["end_ns"].max()
    if not (np.isfinite(start) and np.isfinite(end) and end > start):
        return {"start_s": None, "end_s": None, "rule": rule}
    return {"start_s": float(start) * 1e-9, "end_s": float(end) * 1e-9, "rule": rule}


def throughput(
    frame: pd.DataFrame, chunks: pd.DataFrame, steps: pd.DataFrame | None, window: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Rates in [start_s, end_s] (the last stamp counts). frame: per_request; chunks: chunk_table of the
    same rows."""
    figures: dict[str, Any] = dict.fromkeys(NAMES)
    start, end = window["start_s"], window["end_s"]
    if start is None or end is None:
        return figures, dict.fromkeys(NAMES, "no load window: nothing was sent and ended")
    reasons: dict[str, str] = {}
    length = end - start
    completed = frame[frame["outcome"] == "completed"]
    ended = completed[_inside(completed["end_s"].fillna(completed["last_s"]), start, end)]
    figures["requests_per_s"] = len(ended) / length
    t = chunks["t_ns"] * 1e-9
    output = float(chunks.loc[_inside(t, start, end), "scaled"].sum())
    whole = completed[(completed["chunks"] == 0) & _inside(completed["last_s"], start, end)]
    output += float(whole["output_tokens"].sum())  # bodies that were not streamed
    figures["output_tokens_per_s"] = output / length
    arrived = frame["first_s"].fillna(frame["last_s"])
    figures["total_tokens_per_s"] = (
        output + float(frame.loc[_inside(arrived, start, end), "prompt_tokens"].sum())
    ) / length
    if steps is None or steps.empty:
        reasons["prefill_tokens_per_s"] = (
            "no step records" if steps is not None else "steps are not per request"
        )
    else:
        chosen = steps[_inside(steps["start_ns"] * 1e-9, start, end)]
        figures["prefill_tokens_per_s"] = float(chosen["prefill_tokens"].sum()) / length
    judged = frame[frame["judged"]]
    met = int(judged["met"].sum())
    figures["goodput_rps"] = met / length
    if len(judged):
        figures["slo_attainment"] = met / len(judged)
    else:
        reasons["slo_attainment"] = "no request was served, failed or refused"
    return figures, reasons


def steady_window(
    frame: pd.DataFrame, window: dict[str, Any], share: float = 0.5, least: float = 0.2
) -> dict[str, Any]:
    """Longest contiguous span with in-flight >= share x peak; bounds are null with a reason where it is
    shorter than `least` of the load window. In-flight is a sweep over half-open intervals [send, end)."""
    rule = f"longest span with in-flight >= {share:g} x peak"
    none = {"start_s": None, "end_s": None, "rule": rule}
    if window["start_s"] is None:
        return {**none, "reason": "no load window"}
    times, level = in_flight(frame)
    if not times.size:
        return {**none, "reason": "nothing was sent"}
    high = level >= share * level.max()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], high.astype(np.int8), [0]])))
    begins, stops = edges[::2], edges[1::2]
    stops = np.minimum(stops, times.size - 1)
    spans = times[stops] - times[begins]
    best = int(np.argmax(spans))
    if spans[best] < least * (window["end_s"] - window["start_s"]):
        return {**none, "reason": f"no such span reaches {least:.0%} of the load window"}
    return {"start_s": float(times[begins[best]]), "end_s": float(times[stops[best]]), "rule": rule}


def in_flight(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Sweep line: (times in seconds, requests in flight from that time to the next). frame: per_request."""
    sent = frame[np.isfinite(frame["send_s"]) & np.isfinite(frame["end_s"])]
    if sent.empty:
        return np.array([]), np.array([], dtype=np.int64)
    times = np.concatenate([sent["send_s"].to_numpy(), sent["end_s"].to_numpy()])
    delta = np.concatenate([np.ones(len(sent), dtype=np.int64), -np.ones(len(sent), dtype=np.int64)])
    unique, index = np.unique(times, return_inverse=True)
    return unique, np.cumsum(np.bincount(index, weights=delta, minlength=unique.size)).astype(np.int64)


def output_series(chunks: pd.DataFrame, bin_s: float = 1.0) -> pd.DataFrame:
    """Output tokens per second over time: t_s (start of the bin), tokens_per_s."""
    if chunks.empty:
        return pd.DataFrame({"t_s": np.array([]), "tokens_per_s": np.array([])})
    bins = np.floor(chunks["t_ns"].to_numpy() * 1e-9 / bin_s).astype(np.int64)
    low = int(bins.min())
    sums = np.bincount(bins - low, weights=chunks["scaled"].to_numpy())
    return pd.DataFrame({"t_s": (low + np.arange(sums.size)) * bin_s, "tokens_per_s": sums / bin_s})


def planned_rate(run: Run) -> float | None:
    rate = (run.meta.get("planned") or {}).get("rate")
    return float(rate) if isinstance(rate, (int, float)) else None


def _inside(values: pd.Series, start: float, end: float) -> np.ndarray:
    data = values.to_numpy(dtype=np.float64)
    # Stamps and bounds went through the same float: a nanosecond of slack keeps the last stamp in.
    return (data >= start - 1e-9) & (data <= end + 1e-9)
