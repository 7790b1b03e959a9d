"""The charts of the dashboard as plain Plotly JSON: every function takes runs and returns one figure.

Time is in seconds from the start of the load, latency in milliseconds. A chart without data is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.metrics.throughput import output_series
from harness.metrics.windows import in_flight
from workloads.page.frame import COLOURS

OUTCOME_COLOURS = {
    "completed": "#009E73",
    "cancelled": "#56B4E9",
    "rejected": "#E69F00",
    "timed_out": "#CC79A7",
    "failed": "#D55E00",
    "cut_off": "#999999",
}
# What a request wants to spend its time on is green and blue; what others cost it is warm. Neighbours differ
# in lightness as well, and the parts stack in the order of a request's life.
PART_COLOURS = {
    "client and network": ("#C4C9CF", ("client_wait", "transport_in", "transport_out")),
    "queue: seat": ("#E69F00", ("queue_seat",)),
    "queue: KV": ("#7A4B00", ("queue_kv",)),
    "queue: batch": ("#F5CF73", ("queue_batch",)),
    "queue: other": ("#B8860B", ("queue_budget", "queue_order", "queue_iteration", "queue_unknown")),
    "own prefill": ("#009E73", ("prefill",)),
    "decode": ("#0072B2", ("decode",)),
    "stalled by others' prefill": ("#D55E00", ("stalled",)),
    "not its turn": ("#F0A78A", ("skipped",)),
    "preempted, recomputed": ("#CC79A7", ("preempted", "recompute")),
    "held by its batch": ("#8A6FDF", ("held",)),
    "between passes": ("#5A6472", ("host",)),
}
MAX_POINTS = 400
"""Points of a line: what a screen can show. A curve of more is thinned evenly and keeps both ends."""
MAX_MARKERS = 3000


@dataclass(frozen=True)
class Series:
    """One run as the charts need it. Arrays are float64 and may hold NaN where a figure was not measured."""

    name: str
    frame: pd.DataFrame  # harness.metrics.latency.per_request
    chunks: pd.DataFrame  # harness.metrics.latency.chunk_table
    steps: pd.DataFrame  # the step log; start_ns counts from the start of the load
    counts: dict[str, int]
    duration_s: float
    steady: tuple[float, float] | None = None  # seconds; None where no steady state was found
    spent: tuple[tuple[str, dict[str, float]], ...] = ()  # by class: ms of the mean request, by part

    def completed(self, column: str) -> NDArray[np.float64]:
        """A column of the completed requests; "gap_ms" is every gap between two chunks of them."""
        done = (self.frame["outcome"] == "completed").to_numpy(dtype=bool)
        if column == "gap_ms":
            return self.chunks.loc[done[self.chunks["row"]], "gap_ms"].to_numpy(dtype=np.float64)
        return self.frame.loc[done, column].to_numpy(dtype=np.float64)

    def step(self, column: str) -> NDArray[np.float64]:
        return self.steps[column].to_numpy(dtype=np.float64)


def cdf(runs: Sequence[Series], column: str, title: str, unit: str = "ms") -> Any:
    """Share of completed requests (or of their gaps) at or below each value, on a logarithmic axis."""
    traces = []
    for index, run in enumerate(runs):
        x = np.sort(_finite(run.completed(column)))
        x = x[x > 0]
        if not len(x):
            continue
        at = _thin(len(x))
        traces.append(
            _line(
                run.name,
                index,
                x[at],
                100.0 * (at + 1) / len(x),
                hovertemplate=f"%{{y:.1f}} % at or below %{{x:.4g}} {unit}<extra>{run.name}</extra>",
                shape="hv",
            )
        )
    return _figure(title, traces, x=(unit, "log"), y=("% at or below", "linear"), y_range=[0, 101])


def over_time(runs: Sequence[Series], column: str, title: str, unit: str = "ms") -> Any:
    """One marker per completed request at its intended arrival."""
    traces = []
    for index, run in enumerate(runs):
        x, y = run.completed("intended_s"), run.completed(column)
        keep = np.flatnonzero(np.isfinite(y) & np.isfinite(x) & (y > 0))
        if not len(keep):
            continue
        if len(keep) > MAX_MARKERS:
            keep = keep[_thin(len(keep), MAX_MARKERS)]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": run.name,
                "x": _floats(x[keep]),
                "y": _floats(y[keep]),
                "marker": {"color": _colour(index), "size": 5, "opacity": 0.65},
                "hovertemplate": f"arrived %{{x:.1f}} s: %{{y:.4g}} {unit}<extra>{run.name}</extra>",
            }
        )
    return _steady(runs, _figure(title, traces, x=("arrival, s", "linear"), y=(unit, "log")))


def throughput(runs: Sequence[Series]) -> Any:
    """Output tokens per second, each token in the bin of its own stamp."""
    traces = []
    for index, run in enumerate(runs):
        at = run.chunks["t_ns"].to_numpy(dtype=np.float64) / 1e9
        if not len(at):
            continue
        width = _bin_width(max(float(at.max()), run.duration_s))
        series = output_series(run.chunks, width)
        traces.append(
            _line(
                run.name,
                index,
                series["t_s"].to_numpy(),
                series["tokens_per_s"].to_numpy(),
                hovertemplate="%{x:.1f} s: %{y:.4g} tokens/s<extra>" + run.name + "</extra>",
                shape="hv",
            )
        )
    return _steady(
        runs, _figure("Output throughput", traces, x=("time, s", "linear"), y=("tokens/s", "linear"))
    )


def concurrency(runs: Sequence[Series]) -> Any:
    """Requests between send and end: the most at once in each of MAX_POINTS parts of the run."""
    traces = []
    for index, run in enumerate(runs):
        times, level = in_flight(run.frame)
        if len(times) < 2:
            continue
        if len(times) > MAX_POINTS:
            edges = np.linspace(times[0], times[-1], MAX_POINTS // 2 + 1)
            starts = np.clip(np.searchsorted(times, edges[:-1], side="right") - 1, 0, len(times) - 1)
            times, level = edges[:-1], np.maximum.reduceat(level, starts)
        hover = "%{x:.1f} s: %{y} in flight<extra>" + run.name + "</extra>"
        traces.append(_line(run.name, index, times, level, hovertemplate=hover, shape="hv"))
    return _steady(
        runs, _figure("Requests in flight", traces, x=("time, s", "linear"), y=("requests", "linear"))
    )


def occupancy(runs: Sequence[Series]) -> Any:
    """Sequences in the batch, time-weighted. One run alone also shows what its rows were spent on."""
    traces = []
    for index, run in enumerate(runs):
        binned = _binned(run, run.step("num_seqs"))
        if binned is not None:
            hover = "%{x:.1f} s: %{y:.3g} sequences<extra>" + run.name + "</extra>"
            traces.append(_line(run.name, index, *binned, hovertemplate=hover))
    if len(runs) == 1 and traces:
        ended = _binned(runs[0], runs[0].step("ended_rows"))
        waiting = _binned(runs[0], runs[0].step("waiting"))
        for label, colour, binned in (("waiting", 4, waiting), ("ended rows", 1, ended)):
            if binned is not None and binned[1].max() > 0:
                hover = f"%{{x:.1f}} s: %{{y:.3g}} {label}<extra></extra>"
                traces.append(_line(label, colour, *binned, hovertemplate=hover, dash="dot"))
        traces[0]["name"] = "in the batch"
    return _figure("Batch occupancy", traces, x=("time, s", "linear"), y=("sequences", "linear"))


def kv_use(runs: Sequence[Series]) -> Any:
    """Live KV blocks as a share of the pool, time-weighted."""
    traces = []
    for index, run in enumerate(runs):
        live = run.step("kv_live")
        total = live + run.step("kv_cached") + run.step("kv_free")
        binned = _binned(run, 100.0 * live / np.where(total > 0, total, np.nan))
        if binned is not None:
            hover = "%{x:.1f} s: %{y:.3g} %<extra>" + run.name + "</extra>"
            traces.append(_line(run.name, index, *binned, hovertemplate=hover))
    return _figure("KV cache in use", traces, x=("time, s", "linear"), y=("% of blocks", "linear"))


def step_times(runs: Sequence[Series]) -> Any:
    """How long an iteration took over how many tokens it computed: where stalls come from."""
    traces = []
    for index, run in enumerate(runs):
        ms = run.step("duration_ns")
        tokens = run.step("prefill_tokens") + run.step("decode_tokens")
        keep = np.flatnonzero(np.isfinite(ms) & (tokens > 0))
        if len(keep) > MAX_MARKERS:
            keep = keep[_thin(len(keep), MAX_MARKERS)]
        if not len(keep):
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": run.name,
                "x": _floats(tokens[keep]),
                "y": _floats(ms[keep] / 1e6),
                "marker": {"color": _colour(index), "size": 4, "opacity": 0.45},
                "hovertemplate": "%{x} tokens: %{y:.3g} ms<extra>" + run.name + "</extra>",
            }
        )
    return _figure("Iteration time", traces, x=("tokens in the iteration", "log"), y=("ms", "log"))


def outcomes(runs: Sequence[Series]) -> Any:
    """Every scheduled request by how it ended."""
    names = [run.name for run in runs]
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
    figure = _figure("Outcomes", traces, x=("requests", "linear"), y=("", "category"))
    if figure is not None:
        figure["layout"].update(barmode="stack", height=110 + 44 * len(runs))
        figure["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return figure


def time_spent(runs: Sequence[Series]) -> Any:
    """Where the E2E of the mean completed request went: a bar for each run and class."""
    bars = [
        (f"{label}, {run.name}" if len(runs) > 1 else label, spent)
        for run in runs
        for label, spent in run.spent
    ]
    if len(runs) > 1:
        bars.sort(
            key=lambda bar: bar[0].partition(", ")[0] != "all"
        )  # runs side by side, then class by class
        classes = list(dict.fromkeys(label.partition(", ")[0] for label, _ in bars))
        bars.sort(key=lambda bar: classes.index(bar[0].partition(", ")[0]))
    traces: list[dict[str, Any]] = []
    for name, (colour, parts) in PART_COLOURS.items():
        values = [max(0.0, sum(spent[part] for part in parts)) for _, spent in bars]
        totals = [sum(spent[part] for part in spent if not part.startswith("queue_")) for _, spent in bars]
        if not any(value > 0.002 * total for value, total in zip(values, totals, strict=True)):
            continue  # nothing that a screen could show
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [label for label, _ in bars],
                "x": _floats(np.array(values)),
                "customdata": _floats(100 * np.array(values) / np.maximum(totals, 1e-9)),
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": f"{name}: %{{x:.4g}} ms, %{{customdata:.3g}} %<extra>%{{y}}</extra>",
            }
        )
    figure = _figure(
        "Where the time went", traces, x=("ms of the mean request", "linear"), y=("", "category")
    )
    if figure is not None:
        figure["layout"].update(barmode="stack", height=70 + 34 * len(bars), bargap=0.25, showlegend=False)
        # A legend of its own, above the chart: Plotly's would have to scroll on a phone.
        figure["key"] = [{"name": t["name"], "colour": PART_COLOURS[t["name"]][0]} for t in traces]
        figure["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return figure


def _figure(
    title: str,
    traces: list[dict[str, Any]],
    *,
    x: tuple[str, str],
    y: tuple[str, str],
    y_range: list[float] | None = None,
) -> Any:
    if not traces:
        return None
    axis: dict[str, Any] = {"title": {"text": y[0]}, "type": y[1], "rangemode": "tozero"}
    if y_range:
        axis["range"] = y_range
    return {
        "title": title,
        "data": traces,
        "layout": {"xaxis": {"title": {"text": x[0]}, "type": x[1]}, "yaxis": axis},
    }


def _steady(runs: Sequence[Series], figure: Any) -> Any:
    """The steady window as a shaded band, where one run is alone on the page."""
    if figure is not None and len(runs) == 1 and runs[0].steady is not None:
        start, end = runs[0].steady
        band = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
        band |= {"fillcolor": "rgba(128,128,128,0.13)", "line": {"width": 0}, "layer": "below"}
        figure["layout"]["shapes"] = [band]
    return figure


def _line(
    name: str, index: int, x: NDArray[np.float64], y: NDArray[np.float64], *, hovertemplate: str, **line: Any
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": _floats(x),
        "y": _floats(y),
        "line": {"color": _colour(index), "width": 2, **line},
        "hovertemplate": hovertemplate,
    }


def _binned(
    run: Series, values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Mean of a step column per bin of time, each step weighted by its length; a bin without a step is 0."""
    start = run.step("start_ns") / 1e9
    length = np.maximum(run.step("duration_ns") / 1e9, 1e-9)
    keep = np.isfinite(start) & np.isfinite(values) & (start >= 0)
    if not keep.any():
        return None
    start, length, values = start[keep], length[keep], values[keep]
    end = max(float((start + length).max()), run.duration_s)
    edges = np.linspace(0.0, end, min(MAX_POINTS, max(10, len(start))) + 1)
    # The step that is under way at each edge counts: a long prefill fills several bins.
    at = np.clip(np.searchsorted(start, edges[:-1], side="right") - 1, 0, len(start) - 1)
    inside = (start[at] <= edges[:-1]) & (edges[:-1] <= start[at] + length[at])
    held = np.where(inside, values[at], 0.0)
    which = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, len(edges) - 2)
    weight = np.bincount(which, weights=length, minlength=len(edges) - 1)
    total = np.bincount(which, weights=length * values, minlength=len(edges) - 1)
    return edges[:-1], np.where(weight > 0, total / np.maximum(weight, 1e-12), held)


def _bin_width(duration_s: float) -> float:
    for width in (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0):
        if duration_s / width <= MAX_POINTS / 2:
            return width
    return duration_s / (MAX_POINTS / 2)


def _thin(n: int, most: int = MAX_POINTS) -> NDArray[np.int64]:
    """At most `most` indices of range(n): both ends, and each of the last 40: the tail is what is read."""
    if n <= most:
        return np.arange(n)
    even = np.linspace(0, n - 1, most - 40).round().astype(np.int64)
    return np.unique(np.concatenate([even, np.arange(n - 40, n)]))


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _floats(values: NDArray[np.float64]) -> list[float | None]:
    """Four significant digits are more than a screen shows, and keep the page small."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
