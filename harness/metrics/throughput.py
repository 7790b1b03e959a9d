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
