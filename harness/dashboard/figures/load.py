"""What came out of the run over time, how its requests ended, and how tenants fared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.dashboard.figures.plot import MAX_POINTS, figure, floats, line, plain, spread, steady_band
from harness.dashboard.shown import Shown
from harness.metrics.throughput import output_series
from harness.metrics.windows import in_flight
from harness.table import lookup
from workloads.page.frame import COLOURS

OUTCOME_COLOURS = {
    "completed": "#91CAA8",
    "cancelled": "#56B4E9",
    "rejected": "#E69F00",
    "timed_out": "#CC79A7",
    "failed": "#BD0F55",
    "cut_off": "#999999",
}
MOST_TENANTS = 8


def throughput(runs: Sequence[Shown]) -> Any:
    """Output tokens per second, each token in the bin of its own stamp."""
    traces, widths = [], []
    for run in runs:
        at = run.chunks["t_ns"].to_numpy(dtype=np.float64) / 1e9
        if not len(at):
            continue
        width = _bin_width(max(float(at.max()), run.duration_s))
        series = output_series(run.chunks, width)
        hover = "%{x:.1f} s: %{y:.4g} tokens/s"
        traces.append(
            line(run, series["t_s"].to_numpy(), series["tokens_per_s"].to_numpy(), hover, shape="hv")
        )
        widths.append(width)
    notes = [f"Tokens by their own stamps in bins of {spread(widths, 'g')} s."] if widths else []
    return steady_band(
        runs,
        figure("Output throughput", traces, x=("time, s", "linear"), y=("tokens/s", "linear"), notes=notes),
    )


def concurrency(runs: Sequence[Shown]) -> Any:
    """Requests between send and end: the most at once in each part of the run."""
    traces, notes = [], []
    for run in runs:
        times, level = in_flight(run.frame)
        if len(times) < 2:
            continue
        if len(times) > MAX_POINTS:
            edges = np.linspace(times[0], times[-1], MAX_POINTS // 2 + 1)
            starts = np.clip(np.searchsorted(times, edges[:-1], side="right") - 1, 0, len(times) - 1)
            notes.append(
                f"The most at once in each of {MAX_POINTS // 2} bins of {edges[1] - edges[0]:.3g} s."
            )
            times, level = edges[:-1], np.maximum.reduceat(level, starts)
        traces.append(line(run, times, level, "%{x:.1f} s: %{y} in flight", shape="hv"))
    return steady_band(
        runs,
        figure("Requests in flight", traces, x=("time, s", "linear"), y=("requests", "linear"), notes=notes),
    )


def outcomes(runs: Sequence[Shown]) -> Any:
    """Every scheduled request by how it ended."""
    names = [plain(run.name) for run in runs]
    traces = []
    for outcome, colour in OUTCOME_COLOURS.items():
        counts = [run.counts.get(outcome, 0) for run in runs]
        if any(counts):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": outcome.replace("_", " "),
                    "y": names,
                    "x": counts,
                    "text": [str(n) if n else "" for n in counts],
                    "marker": {"color": colour},
                    "hovertemplate": "%{y}: %{x} " + outcome.replace("_", " ") + "<extra></extra>",
                }
            )
    drawn = figure("Outcomes", traces, x=("requests", "linear"), y=("", "category"))
    if drawn is not None:
        drawn["layout"].update(barmode="stack", height=110 + 44 * len(runs))
        drawn["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return drawn


def tenant_service(run: Shown) -> Any:
    """Output tokens that each tenant had received by a moment (the accumulated service of Sheng et al., VTC,
    OSDI 2024). None with fewer than two tenants."""
    tenants = run.run.requests["tenant"].to_numpy()
    names, sizes = np.unique(tenants.astype(str), return_counts=True)
    if len(names) < 2 or run.chunks.empty:
        return None
    kept = names[np.argsort(-sizes, kind="stable")][:MOST_TENANTS]
    owner = tenants[run.chunks["row"].to_numpy()].astype(str)
    at, tokens = run.chunks["t_ns"].to_numpy() * 1e-9, run.chunks["scaled"].to_numpy()
    edges = np.linspace(0, max(float(at.max()), run.duration_s), MAX_POINTS // 2)
    traces = []
    for i, name in enumerate(kept):
        mine = owner == name
        order = np.argsort(at[mine], kind="stable")
        total = np.append(0.0, np.cumsum(tokens[mine][order]))
        y = total[np.searchsorted(at[mine][order], edges, side="right")]
        look = {"color": COLOURS[i % len(COLOURS)], "dash": ("solid", "dash", "dot")[i % 3], "width": 2}
        label = plain(name or "(none)")
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "line": look,
                "x": floats(edges),
                "y": floats(y),
                "hovertemplate": f"%{{x:.1f}} s: %{{y:.5g}} tokens<extra>{label}</extra>",
            }
        )
    note = (
        "" if len(kept) == len(names) else f"The {len(kept)} tenants with the most requests, of {len(names)}."
    )
    title = f"Tokens received by each tenant, {run.name}"
    return figure(title, traces, x=("time, s", "linear"), y=("tokens", "linear"), notes=[note])


def tenant_latency(runs: Sequence[Shown], path: str, title: str) -> Any:
    """p50 and p99 of each tenant, a marker a run. None with fewer than two tenants."""
    tenants = list(dict.fromkeys(t for run in runs for t in run.summary.get("by_tenant") or {}))
    if len(tenants) < 2:
        return None
    kept = tenants[: 3 * MOST_TENANTS]
    traces = []
    for run in runs:
        for name, opened in (("p50", False), ("p99", True)):
            values = [
                lookup((run.summary.get("by_tenant") or {}).get(t) or {}, f"{path}.{name}") for t in kept
            ]
            if not any(value is not None for value in values):
                continue
            label = f"{run.name} {name}" if len(runs) > 1 else name
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": plain(label),
                    "x": floats([np.nan if v is None else v for v in values]),
                    "y": [plain(t or "(none)") for t in kept],
                    "marker": {
                        "color": run.style.colour,
                        "size": 9,
                        "symbol": run.style.symbol + ("-open" if opened else ""),
                    },
                    "hovertemplate": f"%{{y}}: {name} %{{x:.4g}} ms<extra>{plain(run.name)}</extra>",
                }
            )
    drawn = figure(title, traces, x=("ms", "log"), y=("", "category"))
    if drawn is not None:
        drawn["layout"]["height"] = 130 + 24 * len(kept)
        drawn["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return drawn


def _bin_width(duration_s: float) -> float:
    for width in (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0):
        if duration_s / width <= MAX_POINTS / 2:
            return width
    return duration_s / (MAX_POINTS / 2)
