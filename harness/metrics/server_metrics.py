"""What the server's own /metrics say of a run: means of gauges, differences of counters.

They are the server's word, in the server's definitions: shown beside the client's figures, never mixed with
them. Quantiles are not taken from buckets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

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
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("t_ns"), int):
            rows.append(row)
    return rows


def summarise_server_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Pure. start_s and end_s: the first and the last row with figures; counters are their difference, so a
    window gives rows of it alone.

    dialect, scrapes, failed, start_s, end_s, running{mean, max}, waiting{..}, kv_usage{..}, the names of
    COUNTS, prefix_cache_hit_rate, queue_time_ms{n, mean}, ttft_ms{n, mean}; null_reasons{path: reason}.
    A counter that appears only later began at 0; one that goes back is null: the server began anew.
    """
    everything = list(rows)
    good = [row for row in everything if not row.get("error")]
    errors = Counter(str(row["error"]) for row in everything if row.get("error"))
    dialects = [row["dialect"] for row in good if row.get("dialect")]
    reasons: dict[str, str] = {}
    if not everything:
        nothing = "the server's /metrics were not scraped"
    elif not good:
        nothing = errors.most_common(1)[0][0]
    elif not dialects:
        nothing = "the server's names are none of those that are known"
    else:
        nothing = f"no such figure on the /metrics of this server ({dialects[-1]})"

    def column(name: str) -> list[float | None]:
        return [row.get(name) for row in good]

    def gauge(name: str) -> dict[str, float | None]:
        values = [value for value in column(name) if value is not None]
        if not values:
            reasons[name] = nothing
            return {"mean": None, "max": None}
        return {"mean": sum(values) / len(values), "max": max(values)}

    def increase(name: str) -> tuple[float | None, str]:
        values = column(name)
        present = [value for value in values if value is not None]
        if not present:
            return None, nothing
        if any(later < earlier for earlier, later in pairwise(present)):
            return None, "a counter went back: the server began anew"
        if len(values) < 2:
            return None, "one scrape has no difference"
        return present[-1] - (0 if values[0] is None else present[0]), ""

    def count(path: str, name: str) -> float | None:
        value, why = increase(name)
        if value is None:
            reasons[path] = why
        return value

    def timed(path: str, name: str) -> dict[str, float | None]:
        (total, why), (n, _) = increase(f"{name}_sum"), increase(f"{name}_count")
        if total is not None and n:
            return {"n": n, "mean": 1e3 * total / n}
        reasons[path] = why or "no request went through it"
        return {"n": n, "mean": None}

    found: dict[str, Any] = {
        "dialect": dialects[-1] if dialects else None,
        "scrapes": len(everything),
        "failed": len(everything) - len(good),
        "start_s": good[0]["t_ns"] / 1e9 if good else None,
        "end_s": good[-1]["t_ns"] / 1e9 if good else None,
        **{name: gauge(name) for name in GAUGES},
        **{path: count(path, name) for path, name in COUNTS.items()},
    }
    queries, hits = found["prefix_cache_queries"], found["prefix_cache_hits"]
    found["prefix_cache_hit_rate"] = hits / queries if queries and hits is not None else None
    if found["prefix_cache_hit_rate"] is None:
        why = reasons.get("prefix_cache_queries") or reasons.get("prefix_cache_hits")
        reasons["prefix_cache_hit_rate"] = why or "no token was looked up"
    found |= {path: timed(path, name) for path, name in TIMES.items()}
    for name in ("dialect", "start_s", "end_s"):
        if found[name] is None:
            reasons[name] = nothing
    return {**found, "null_reasons": reasons}
