"""Pauses in the middle of an answer: what a mean TPOT hides and a reader notices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.latency import gap_table, per_request

MEDIANS = 5.0
FLOOR_MS = 100.0
NAMES = ("count", "seconds", "longest_ms", "threshold_ms")


def stall_threshold_ms(gap_ms: np.ndarray) -> float | None:
    """max(5 x the run's median gap between chunks, 100 ms); None without gaps."""
    gaps = gap_ms[np.isfinite(gap_ms)]
    return max(MEDIANS * float(np.median(gaps)), FLOOR_MS) if gaps.size else None


def stalls(
    requests: pd.DataFrame, reason: str, threshold_ms: float | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Gaps over the threshold, in every answer that began to stream, however it ended.

    count, seconds (their sum), longest_ms (the longest gap of all, a stall or not), threshold_ms.
    `threshold_ms` replaces the run's own, so that runs can be held to one."""
    gaps = gap_table(requests)["gap_ms"].dropna().to_numpy()
    limit = stall_threshold_ms(gaps) if threshold_ms is None else threshold_ms
    if limit is None or not gaps.size:
        return dict.fromkeys(NAMES), dict.fromkeys(NAMES, reason)
    over = gaps[gaps > limit]
    return {
        "count": int(over.size),
        "seconds": float(over.sum() * 1e-3),
        "longest_ms": float(gaps.max()),
        "threshold_ms": float(limit),
    }, {}


def deadlines(
    first_ms: float, gaps_ms: np.ndarray, tokens: np.ndarray, ttft_ms: float, tbt_ms: float
) -> tuple[int, int]:
    """(missed, all) token deadlines of one answer (Agrawal et al., Etalon, 2024: fluidity index).

    The first token is due after ttft_ms, each later one tbt_ms after the last. What comes early leaves
    slack to those that follow; what comes late misses every deadline that passed meanwhile, and the count
    starts anew. gaps_ms[k] is the gap before chunk k + 1, tokens[k] the tokens of chunk k: those behind a
    chunk's first are early by all of tbt_ms."""
    missed = total = 0
    slack = 0.0
    for k, count in enumerate(tokens):
        wait, due = (first_ms, ttft_ms) if k == 0 else (float(gaps_ms[k - 1]), tbt_ms)
        if wait <= due + slack:
            slack += due - wait
            total += 1
        else:
            passed = (
                (1 + math.floor((wait - slack - due) / tbt_ms))
                if k == 0
                else math.floor((wait - slack) / tbt_ms)
            )
            missed += passed
            total += passed
            slack = 0.0
        more = max(0, round(float(count)) - 1)
        slack += more * tbt_ms
        total += more
    return missed, total


def fluidity(requests: pd.DataFrame, slo: dict[str, Any], reason: str) -> tuple[float | None, str | None]:
    """1 - missed / all token deadlines, pooled over every streamed answer with a pace; limits from the
    SLO."""
    ttft, tbt = slo.get("ttft_ms"), slo.get("tpot_ms")
    if ttft is None or not tbt:
        return None, "no SLO for TTFT and TPOT"
    frame = per_request(requests, slo)
    missed = total = 0
    chosen = frame["stream"].to_numpy(bool) & (frame["chunks"].to_numpy() > 1)
    rows = zip(chosen, frame["ttft_ms"], requests["chunk_ns"], requests["chunk_tokens"], strict=True)
    for use, first_ms, stamps, tokens in rows:
        if use and math.isfinite(first_ms):
            one = deadlines(first_ms, np.diff(stamps) * 1e-6, tokens, float(ttft), float(tbt))
            missed, total = missed + one[0], total + one[1]
    return (1.0 - missed / total, None) if total else (None, reason)
