"""Latency: its distribution, over the run, and against the rate of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.dashboard.figures.plot import (
    MAX_POINTS,
    TAIL,
    chosen,
    figure,
    finite,
    floats,
    line,
    markers,
    plain,
    shown_of,
    steady_band,
    thin,
)
from harness.dashboard.shown import Floats, Shown
from harness.table import lookup


def cdf(runs: Sequence[Shown], column: str, title: str, unit: str = "ms") -> Any:
    """Share of completed requests (or of their gaps) at or below each value, on a logarithmic axis."""
    curves = [(run, finite(run.completed(column)), 0) for run in runs]
    return _distribution(curves, title, unit)


def itl(runs: Sequence[Shown]) -> Any:
    """The gaps between tokens: those of one chunk came together, with gaps of 0 (docs/metrics.md)."""
    curves = []
    for run in runs:
        done = (run.frame["outcome"] == "completed").to_numpy(dtype=bool)
        chunks = run.chunks[done[run.chunks["row"]] & (run.frame["chunks"].to_numpy() > 1)[run.chunks["row"]]]
        together = int(np.maximum(0, chunks["tokens"].to_numpy() - 1).sum())
        curves.append((run, finite(chunks["gap_ms"].to_numpy(np.float64)), together))
    return _distribution(curves, "Inter-token latency", "ms")


def _distribution(curves: Sequence[tuple[Shown, Floats, int]], title: str, unit: str) -> Any:
    """curves: run, values, and how many zeros there are beside them. What is 0 lies left of a logarithmic
    axis and is in the share all the same."""
    traces, notes = [], []
    for run, values, zeros in curves:
        x = np.sort(values)
        whole, zeros = len(x) + zeros, zeros + int((x <= 0).sum())
        x = x[x > 0]
        if not len(x):
            continue
        at = thin(len(x))
        share = 100.0 * (zeros + at + 1) / whole
        hover = f"%{{y:.1f}} % at or below %{{x:.4g}} {unit}"
        traces.append(line(run, x[at], share, hover, shape="hv"))
        if len(x) > len(at):
            notes.append(
                f"Curves of more than {MAX_POINTS} values: {MAX_POINTS - TAIL} evenly spaced ranks and the "
                f"{TAIL} largest."
            )
        if zeros > 0.001 * whole:
            notes.append(f"{100 * zeros / whole:.1f} % of {run.name} are 0, left of the axis.")
    return figure(
        title, traces, x=(unit, "log"), y=("% at or below", "linear"), y_range=[0, 101], notes=notes
    )


def over_time(runs: Sequence[Shown], column: str, title: str, unit: str = "ms") -> Any:
    """One marker per completed request at its intended arrival."""
    traces, kept = [], []
    for run in runs:
        done = (run.frame["outcome"] == "completed").to_numpy(dtype=bool)
        x = run.frame["intended_s"].to_numpy(np.float64)
        y = run.frame[column].to_numpy(np.float64)
        rows = np.flatnonzero(done & np.isfinite(x) & np.isfinite(y) & (y > 0))
        if not len(rows):
            continue
        keep = rows[chosen(x[rows], y[rows], max(600, 6000 // len(runs)))]
        hover = f"%{{customdata}} arrived %{{x:.1f}} s: %{{y:.4g}} {unit}"
        traces.append(markers(run, x[keep], y[keep], hover, keep))
        kept.append((run, len(keep), len(rows)))
    how = "the slowest and the fastest of each stretch, and every k-th of the others"
    note = shown_of(kept, "requests", how)
    return steady_band(runs, figure(title, traces, x=("arrival, s", "linear"), y=(unit, "log"), notes=[note]))


def against_rate(runs: Sequence[Shown], path: str, title: str, unit: str = "ms") -> Any:
    """p50 and p99 with their 95 % intervals against the planned rate, a pair of lines an engine. None unless
    some engine was run at two rates or more."""
    by_engine: dict[str, list[tuple[float, Shown]]] = {}
    for run in runs:
        rate = lookup(run.summary, "setup.planned.rate")
        if isinstance(rate, (int, float)) and rate > 0 and lookup(run.summary, f"{path}.p50") is not None:
            by_engine.setdefault(run.engine, []).append((float(rate), run))
    if not any(len({rate for rate, _ in points}) > 1 for points in by_engine.values()):
        return None
    traces = []
    for engine, points in by_engine.items():
        points.sort(key=lambda point: point[0])
        for name, dash in (("p50", "solid"), ("p99", "dot")):
            rates = [rate for rate, run in points if lookup(run.summary, f"{path}.{name}") is not None]
            kept = [run for _, run in points if lookup(run.summary, f"{path}.{name}") is not None]
            values = np.array([lookup(run.summary, f"{path}.{name}") for run in kept], np.float64)
            ends = [
                lookup(run.summary, f"{path}.ci95.{name}") or (v, v)
                for run, v in zip(kept, values, strict=True)
            ]
            hover = f"%{{x:.4g}} requests/s: {name} %{{y:.4g}} {unit}"
            trace = line(kept[0], rates, values, hover, name=f"{engine} {name}", dash=dash)
            trace["mode"] = "lines+markers"
            trace["marker"] = {"color": kept[0].style.colour, "symbol": kept[0].style.symbol, "size": 7}
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": floats(
                    [(end[1] if end[1] is not None else v) - v for end, v in zip(ends, values, strict=True)]
                ),
                "arrayminus": floats(
                    [v - (end[0] if end[0] is not None else v) for end, v in zip(ends, values, strict=True)]
                ),
                "thickness": 1,
                "width": 3,
            }
            traces.append(trace)
    note = "Bars: the 95 % interval of the percentile within its run, where the sample allows one."
    return figure(title, traces, x=("planned requests/s", "linear"), y=(unit, "log"), notes=[note])


def capacity(found: dict[str, Any], path: tuple[str, ...], title: str, y: str, scale: float = 1.0) -> Any:
    """Points of a capacity.json against the rate, an arm a line. path: keys of a point, the first it has."""
    from harness.dashboard.colours import style

    traces = []
    for name, arm in (found.get("arms") or {}).items():
        points = sorted((arm or {}).get("points") or [], key=lambda p: p.get("rate") or 0.0)
        pairs = [
            (p["rate"], next((p[k] for k in path if p.get(k) is not None), None))
            for p in points
            if p.get("rate")
        ]
        pairs = [(x, scale * v) for x, v in pairs if isinstance(v, (int, float))]
        if not pairs:
            continue
        look = style(str(name))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(str(name)),
                "x": floats([x for x, _ in pairs]),
                "y": floats([v for _, v in pairs]),
                "line": {"color": look.colour, "dash": look.dash, "width": 2},
                "marker": {"color": look.colour, "symbol": look.symbol, "size": 7},
                "hovertemplate": f"%{{x:.4g}} requests/s: %{{y:.4g}}<extra>{plain(str(name))}</extra>",
            }
        )
    return figure(title, traces, x=("requests/s", "linear"), y=(y, "linear"))
