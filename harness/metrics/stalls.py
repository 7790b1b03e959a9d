"""Pauses in the middle of an answer: what a mean TPOT hides and a reader notices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.latency import gap_table
from harness.metrics.run import Run
from harness.slo import limit

STALL_FACTOR = 5.0
"""A stall is a gap of more than this many of the run's median gaps; slo.stall_factor overrides it."""
FLOOR_MS = 100.0
"""and more than this: what a reader notices at all."""
NAMES = ("count", "seconds", "longest_ms", "threshold_ms")


def stall_factor(run: Run) -> float:
    """slo.stall_factor of the run, else STALL_FACTOR."""
    value = run.slo_setting("stall_factor")
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return float(value) if usable else STALL_FACTOR


def stall_threshold_ms(gap_ms: np.ndarray, factor: float = STALL_FACTOR) -> float | None:
    """max(factor x the run's median gap between chunks, 100 ms); None without gaps."""
    gaps = gap_ms[np.isfinite(gap_ms)]
    return max(factor * float(np.median(gaps)), FLOOR_MS) if gaps.size else None


def stalls(
    requests: pd.DataFrame,
    reason: str,
    threshold_ms: float | None = None,
    factor: float = STALL_FACTOR,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Gaps over the threshold, in every answer that began to stream, however it ended.

    count, seconds (their sum), longest_ms (the longest gap of all, a stall or not), threshold_ms.
    `threshold_ms` replaces the requests' own, so that runs, or the classes of one, are held to one."""
    gaps = gap_table(requests)["gap_ms"].dropna().to_numpy()
    limit = stall_threshold_ms(gaps, factor) if threshold_ms is None else threshold_ms
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


def deadline_table(requests: pd.DataFrame, frame: pd.DataFrame, slo: dict[str, Any]) -> np.ndarray | None:
    """(missed, all) token deadlines of every request with a pace, zeros for the others. [requests, 2]
    frame: per_request(requests). None without limits for TTFT and TPOT."""
    ttft, tbt = (limit(slo, frame["request_class"], name) for name in ("ttft_ms", "tpot_ms"))
    limited = np.isfinite(ttft) & np.isfinite(tbt)
    if len(frame) and not limited.any():
        return None
    found = np.zeros((len(requests), 2), dtype=np.int64)
    paced = limited & frame["stream"].to_numpy(bool) & (frame["chunks"].to_numpy() > 1)
    rows = zip(paced, frame["ttft_ms"], requests["chunk_ns"], requests["chunk_tokens"], strict=True)
    for row, (use, first_ms, stamps, tokens) in enumerate(rows):
        if use and math.isfinite(first_ms):
            found[row] = deadlines(first_ms, np.diff(stamps) * 1e-6, tokens, ttft[row], tbt[row])
    return found


def fluidity(table: np.ndarray | None, reason: str) -> tuple[float | None, str | None]:
    """1 - missed / all token deadlines, pooled over the answers of deadline_table; reason: why none has a
    pace."""
    if table is None:
        return None, "no SLO for TTFT and TPOT"
    missed, total = table.sum(axis=0)
    return (1.0 - float(missed / total), None) if total else (None, reason)
