"""What the server's own /metrics say of a run: means of gauges, differences of counters.

They are the server's word, in the server's definitions: shown beside the client's figures, never mixed with
them. Quantiles are not taken from buckets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from harness.prometheus import GAUGES

COUNTS = {
    "preemptions": "preemptions_total",
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "prefix_cache_queries": "prefix_cache_queries_total",
    "prefix_cache_hits": "prefix_cache_hits_total",
}
TIMES = {"queue_time_ms": "queue_time_s", "ttft_ms": "ttft_s"}


def read_server_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of server_metrics.jsonl in order; without the file none. A line that was cut off is left out."""
    rows = []
    try:
        lines = (run_dir / "server_metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("t_ns"), int):
            rows.append(row)
    return rows


def summarise_server_metrics(
    rows: Iterable[Mapping[str, Any]], start_s: float | None = None, end_s: float | None = None
) -> dict[str, Any]:
    """Pure. Inside start_s to end_s (seconds from t0; None: from the first row, to the last): gauges by the
    rows inside, counters by their rise, with straight lines between rows. The start_s and end_s that come
    back are what the rows cover of the window.

    dialect, scrapes, failed, start_s, end_s, running{mean, max}, waiting{..}, kv_usage{..}, the names of
    COUNTS, prefix_cache_hit_rate, queue_time_ms{n, mean}, ttft_ms{n, mean}; null_reasons{path: reason}.
    A counter that appears only later began at 0; one that goes back is null: the server began anew.
    """
    stamped = [(t_ns / 1e9, row) for row in rows if (t_ns := _number(row.get("t_ns"))) is not None]
    timed = sorted(stamped, key=lambda pair: pair[0])
    answered = [(t, row) for t, row in timed if not row.get("error")]  # also before and after the window
    low, high = -inf if start_s is None else start_s, inf if end_s is None else end_s
    inside = [row for t, row in timed if low <= t <= high]
    good = [row for row in inside if not row.get("error")]
    if answered:
        low, high = max(low, answered[0][0]), min(high, answered[-1][0])
    dialects = [str(row["dialect"]) for _, row in answered if row.get("dialect")]
    nothing = _nothing(inside, dialects)
    reasons: dict[str, str] = {}

    found: dict[str, Any] = {
        "dialect": dialects[-1] if dialects else None,
        "scrapes": len(inside),
        "failed": len(inside) - len(good),
        "start_s": low if good else None,
        "end_s": high if good else None,
    }
    reasons.update((name, nothing) for name, value in found.items() if value is None)
    for name in GAUGES:
        values = [value for row in good if (value := _number(row.get(name))) is not None]
        found[name] = {"mean": fmean(values), "max": max(values)} if values else {"mean": None, "max": None}
        if not values:
            reasons[name] = nothing

    def increase(path: str, name: str) -> float | None:
        points = [(t, _number(row.get(name))) for t, row in answered] if good else []
        value, why = _increase(points, low, high)
        if value is None:
            reasons[path] = why or nothing
        return value

    found |= {path: increase(path, name) for path, name in COUNTS.items()}
    queries, hits = found["prefix_cache_queries"], found["prefix_cache_hits"]
    found["prefix_cache_hit_rate"] = hits / queries if queries and hits is not None else None
    if found["prefix_cache_hit_rate"] is None:
        why = reasons.get("prefix_cache_queries") or reasons.get("prefix_cache_hits")
        reasons["prefix_cache_hit_rate"] = why or "no token was looked up"
    for path, name in TIMES.items():
        total, n = increase(path, f"{name}_sum"), increase(path, f"{name}_count")
        found[path] = {"n": n, "mean": 1e3 * total / n if n and total is not None else None}
        if found[path]["mean"] is None:
            reasons.setdefault(path, "no request came so far")
    return {**found, "null_reasons": reasons}


def _nothing(rows: list[Mapping[str, Any]], dialects: list[str]) -> str:
    """Why a figure that no row has is not there."""
    if not rows:
        return "the server's /metrics were not scraped"
    errors = Counter(str(row["error"]) for row in rows if row.get("error"))
    if len(rows) == errors.total():
        return errors.most_common(1)[0][0]
    if not dialects:
        return "the server's names are none of those that are known"
    return f"no such figure on the /metrics of this server ({dialects[-1]})"


def _increase(points: list[tuple[float, float | None]], low: float, high: float) -> tuple[float | None, str]:
    """(rise of a counter from low to high, or None; why it is None, empty if it was never there)."""
    born = next((i for i, (_, value) in enumerate(points) if value is not None), None)
    if born is None:
        return None, ""
    known = [(t, 0.0 if i < born else value) for i, (t, value) in enumerate(points)]
    pairs = [(t, value) for t, value in known if value is not None]
    if any(later < earlier for (_, earlier), (_, later) in pairwise(pairs)):
        return None, "a counter went back: the server began anew"
    if len(pairs) < 2 or high <= low:
        return None, "one scrape has no difference"
    first, last = np.interp((low, high), [t for t, _ in pairs], [value for _, value in pairs])
    return float(last - first), ""


def _number(value: Any) -> float | None:
    """None for what is no number that a server can mean, as a file that somebody has edited may have it."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if ok else None
