"""What the charts are made of: a figure is plain Plotly JSON with a title and, where something was left out,
a note that says what and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.dashboard.shown import Floats, Shown

MAX_POINTS = 400
"""Points of a line: what a screen can show."""
TAIL = 40
"""Of a curve that is thinned, so many at its upper end are all kept: the tail is what is read."""
MAX_MARKERS = 3000


def figure(
    title: str,
    traces: list[dict[str, Any]],
    *,
    x: tuple[str, str],
    y: tuple[str, str],
    y_range: list[float] | None = None,
    notes: Sequence[str] = (),
) -> Any:
    """x and y: the title of the axis with its unit, and its type. None without a trace."""
    if not traces:
        return None
    axis: dict[str, Any] = {"title": {"text": y[0]}, "type": y[1], "rangemode": "tozero"}
    if y_range:
        axis["range"] = y_range
    return {
        "title": title,
        "note": " ".join(dict.fromkeys(filter(None, notes))),
        "data": traces,
        "layout": {"xaxis": {"title": {"text": x[0]}, "type": x[1]}, "yaxis": axis},
    }


def line(run: Shown, x: Any, y: Any, hover: str, *, name: str | None = None, **look: Any) -> dict[str, Any]:
    """A line in the run's own colour and dash. hover: a template of Plotly's without the name."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(name or run.name),
        "x": floats(x),
        "y": floats(y),
        "line": {"color": run.style.colour, "width": 2, "dash": run.style.dash, **look},
        "hovertemplate": f"{hover}<extra>{plain(name or run.name)}</extra>",
    }


def markers(run: Shown, x: Any, y: Any, hover: str, rows: Any = None, **look: Any) -> dict[str, Any]:
    """A marker a point. rows: positions of the requests in the run, for a click to find them."""
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": plain(run.name),
        "x": floats(x),
        "y": floats(y),
        "marker": {"color": run.style.colour, "symbol": run.style.symbol, "size": 5, "opacity": 0.65, **look},
        "hovertemplate": f"{hover}<extra>{plain(run.name)}</extra>",
    }
    if rows is not None:
        trace["customdata"] = run.run.requests["id"].to_numpy()[np.asarray(rows, np.int64)].tolist()
        trace["meta"] = {"run": run.name}
    return trace


def plain(text: str) -> str:
    """A name as Plotly shows it as it is: its own markup and templates are taken from it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def steady_band(runs: Sequence[Shown], drawn: Any) -> Any:
    """The steady window as a shaded band, where one run is alone on the page."""
    if drawn is not None and len(runs) == 1 and runs[0].steady is not None:
        start, end = runs[0].steady
        band = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
        band |= {"fillcolor": "rgba(128,128,128,0.13)", "line": {"width": 0}, "layer": "below"}
        drawn["layout"]["shapes"] = [band]
    return drawn


@dataclass(frozen=True)
class Bins:
    """Bins of equal width over the whole run, and which step lies in which. All arrays are [bins] but
    `which` and `weight` [steps]."""

    left: Floats  # seconds
    width: float
    which: np.ndarray
    weight: Floats  # seconds
    under_way: np.ndarray  # the step that runs at each left edge, -1 where none does

    def mean(self, values: Floats) -> Floats:
        """Weighted by the length of each step; the step under way counts where none begins; else 0."""
        known = np.isfinite(values)
        weight = np.bincount(self.which, np.where(known, self.weight, 0.0), len(self.left))
        total = np.bincount(self.which, np.where(known, self.weight * values, 0.0), len(self.left))
        held = np.where(self.under_way >= 0, np.nan_to_num(values)[self.under_way], 0.0)
        return np.where(weight > 0, total / np.maximum(weight, 1e-12), held)

    def most(self, values: Floats) -> Floats:
        """The largest in each bin."""
        held = np.where(self.under_way >= 0, np.nan_to_num(values)[self.under_way], 0.0)
        np.maximum.at(held, self.which, np.nan_to_num(values))
        return held

    def least(self, values: Floats) -> Floats:
        low = np.full(len(self.left), np.inf)
        np.minimum.at(low, self.which, np.nan_to_num(values))
        return np.where(np.isfinite(low), low, self.mean(values))

    def note(self, what: str = "means") -> str:
        return binned([self], what)


def binned(found: Sequence[Bins], what: str) -> str:
    """What the drawn values are; empty where every iteration is drawn."""
    kept = [one for one in found if len(one.which) > len(one.left)]
    if not kept:
        return ""
    widths = spread([one.width for one in kept], ".3g")
    steps = spread([len(one.which) for one in kept], ",")
    return f"{what} of {spread([len(one.left) for one in kept])} bins of {widths} s ({steps} iterations)."


def spread(values: Sequence[float], form: str = "") -> str:
    """What the runs of a chart have in common, or from what to what they go: one or more values."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def bins(run: Shown, most: int = MAX_POINTS) -> Bins | None:
    """None without a step."""
    start, length = run.step("start_ns") * 1e-9, run.step("duration_ns") * 1e-9
    if not len(start):
        return None
    start, length = np.maximum(start, 0.0), np.maximum(np.nan_to_num(length), 1e-9)
    end = max(float((start + length).max()), run.duration_s)
    edges = np.linspace(0.0, end, min(most, max(10, len(start))) + 1)
    at = np.searchsorted(start, edges[:-1], side="right") - 1
    inside = (at >= 0) & (edges[:-1] <= (start + length)[np.maximum(at, 0)])
    which = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, len(edges) - 2)
    return Bins(edges[:-1], float(edges[1]), which, length, np.where(inside, at, -1))


def thin(n: int, most: int = MAX_POINTS) -> np.ndarray:
    """At most `most` indices of range(n): both ends, and each of the last TAIL."""
    if n <= most:
        return np.arange(n)
    even = np.linspace(0, n - 1, most - TAIL).round().astype(np.int64)
    return np.unique(np.concatenate([even, np.arange(n - TAIL, n)]))


def chosen(x: Floats, y: Floats, most: int = MAX_MARKERS) -> np.ndarray:
    """Indices of at most `most` points, in order of x: the highest and the lowest of each of most/6 bins of
    x, and of the others every k-th."""
    if len(x) <= most:
        return np.argsort(x, kind="stable")
    edges = np.linspace(x.min(), x.max(), most // 6 + 1)
    which = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, most // 6 - 1)
    by_height = np.lexsort((y, which))
    first = np.flatnonzero(np.append(True, np.diff(which[by_height]) > 0))
    extremes = np.unique(np.concatenate([by_height[first], by_height[np.append(first[1:], len(x)) - 1]]))
    others = np.setdiff1d(np.argsort(x, kind="stable"), extremes, assume_unique=True)
    even = others[np.linspace(0, len(others) - 1, most - len(extremes)).round().astype(np.int64)]
    keep = np.union1d(extremes, even)
    return keep[np.argsort(x[keep], kind="stable")]


def shown_of(kept: Sequence[tuple[Shown, int, int]], what: str, how: str) -> str:
    """kept: of each run, how many are drawn and how many there are. Empty where nothing was left out."""
    told = [
        f"{drawn:,} of {whole:,}" + (f" ({run.name})" if len(kept) > 1 else "")
        for run, drawn, whole in kept
        if drawn < whole
    ]
    return f"{', '.join(told)} {what} shown: {how}." if told else ""


def finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def floats(values: Any) -> list[float | None]:
    """Five significant digits are more than a screen shows, and keep the page small."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]
