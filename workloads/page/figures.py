"""The charts of traffic as plain Plotly JSON: each takes what is shown side by side, one colour each,
and returns one figure, None without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workloads.page.frame import COLOURS
from workloads.page.traffic import Traffic

MAX_POINTS = 300
BINS = 120  # of the time
CELLS = 26  # of a heat map, either way
DISSIMILAR = 4.0
"""Spans that differ by more share no axis in seconds: each is shown as a share of its own."""
UNITS = (("s", 1.0, 300.0), ("min", 60.0, 7200.0), ("h", 3600.0, 345_600.0), ("d", 86_400.0, np.inf))
NEUTRAL = "#5A6472"


def lengths(shown: Sequence[Traffic], which: str, title: str) -> Any:
    """CDF of the tokens of prompts or answers."""
    return _cdf(shown, [getattr(t, which) for t in shown], title, "tokens")


def turns(shown: Sequence[Traffic]) -> Any:
    return _cdf(shown, [t.turns for t in shown], "Requests of a session", "requests", of="sessions")


def think_times(shown: Sequence[Traffic]) -> Any:
    seconds = [None if t.think_s is None else t.think_s[t.think_s > 0] for t in shown]
    return _cdf(shown, seconds, "Think time before a later turn", "s", of="turns")


def joint(shown: Sequence[Traffic], index: int) -> Any:
    """Heat map of prompt and answer tokens of one of them, on the axes of all."""
    edges = [_edges([getattr(t, which) for t in shown]) for which in ("prompts", "answers")]
    one = shown[index]
    share = 100 * np.histogram2d(one.prompts, one.answers, bins=edges)[0].T / len(one)
    # The root of a share: what is rare stays visible beside what is frequent.
    z = [[None if s == 0 else _short(s**0.5) for s in row] for row in share]
    text = [[None if s == 0 else f"{s:.2g}" for s in row] for row in share]
    trace = {
        "type": "heatmap",
        "name": one.name,
        "ramp": _colour(index),
        "x": _shorts(edges[0]),
        "y": _shorts(edges[1]),
        "z": z,
        "customdata": text,
        "zmin": 0,
        "zmax": _short(float(share.max()) ** 0.5),
        "showscale": False,
        "hovertemplate": "%{customdata} % of requests: prompt of about %{x:.3~g}, answer of about "
        f"%{{y:.3~g}} tokens<extra>{one.name}</extra>",
    }
    title = "Prompt and answer" + (f", {one.name}" if len(shown) > 1 else "")
    return _figure(title, [trace], ("prompt, tokens", "log"), ("answer, tokens", "log"))


def arrivals(shown: Sequence[Traffic]) -> Any:
    """Requests/s in bins of time; of unlike spans, as shares of span and mean rate."""
    timed = [(i, t) for i, t in enumerate(shown) if t.times_s is not None and t.rate is not None]
    if not timed:
        return None
    spans = [t.span_s for _, t in timed]
    alike = max(spans) <= DISSIMILAR * min(spans)
    unit, size = next((name, size) for name, size, below in UNITS if max(spans) < below)
    traces = []
    for i, t in timed:
        assert t.times_s is not None
        assert t.rate is not None
        bins = max(10, min(BINS, len(t) // 8))
        counts, edges = np.histogram(t.times_s - t.times_s[0], bins=bins, range=(0, t.span_s))
        rate = counts / (t.span_s / bins)
        x = edges[:-1] / size if alike else 100 * edges[:-1] / t.span_s
        y = rate if alike else rate / t.rate
        at, value = (f"%{{x:.4~g}} {unit}", "requests/s") if alike else ("%{x:.3~g} %", "x its mean rate")
        hover = f"%{{y:.3~g}} {value} at {at}<extra>{t.name}</extra>"
        traces.append(_line(t.name, i, x, y, hover, shape="hv", width=1.4))
    if alike:
        return _figure("Arrivals over time", traces, (f"time, {unit}", "linear"), ("requests/s", "linear"))
    return _figure(
        "Arrivals over time", traces, ("% of its span", "linear"), ("rate over its mean", "linear")
    )


def dispersion(shown: Sequence[Traffic]) -> Any:
    """Index of dispersion of the counts against the window."""
    traces = []
    low, high = np.inf, 0.0
    for i, t in enumerate(shown):
        if t.rate is None:
            continue
        windows = np.geomspace(max(0.05, min(1.0, 0.5 / t.rate)), max(t.span_s / 8, 1.0), 32)
        found = [(w, d) for w in windows if (d := t.dispersion(float(w)))]
        if not found:
            continue
        x, y = np.array(found).T
        low, high = min(low, float(x[0])), max(high, float(x[-1]))
        hover = f"%{{y:.3~g}} in windows of %{{x:.3~g}} s<extra>{t.name}</extra>"
        traces.append(_line(t.name, i, x, y, hover))
    if not traces:
        return None
    poisson = _line("Poisson", 0, np.array([low, high]), np.ones(2), "Poisson: 1<extra></extra>", dash="dot")
    poisson["line"]["color"] = NEUTRAL
    return _figure(
        "Index of dispersion", [*traces, poisson], ("window, s", "log"), ("variance over mean", "log")
    )


def reuse(shown: Sequence[Traffic]) -> Any:
    """Share of prompt tokens that an earlier prompt began with, by the length of the prompt (tenths of the
    requests)."""
    traces = []
    for i, t in enumerate(shown):
        if t.reused is None:
            continue
        parts = [p for p in np.array_split(np.argsort(t.prompts, kind="stable"), 10) if len(p)]
        x = np.array([np.median(t.prompts[p]) for p in parts])
        y = np.array([100 * t.reused[p].sum() / t.prompts[p].sum() for p in parts])
        hover = f"%{{y:.3~g}} % of prompts of about %{{x:.4~g}} tokens<extra>{t.name}</extra>"
        traces.append({**_line(t.name, i, x, y, hover), "mode": "lines+markers"})
        traces[-1]["marker"] = {"color": _colour(i), "size": 6}
    figure = _figure(
        "Prompt tokens seen before", traces, ("prompt, tokens", "log"), ("% of its tokens", "linear")
    )
    if figure:
        figure["layout"]["yaxis"]["range"] = [0, 101]
    return figure


def shares(shown: Sequence[Traffic], which: str, title: str) -> Any:
    """One bar a traffic: endings, transports or classes as shares of its requests. At most 12 of them."""
    known = [t for t in shown if getattr(t, which)]
    labels = list(dict.fromkeys(label for t in known for label in getattr(t, which)))[:12]
    if not labels or (which == "classes" and len(labels) == 1):
        return None
    traces = []
    for k, label in enumerate(labels):
        values = [100 * getattr(t, which).get(label, 0) / len(t) for t in known]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "x": _shorts(np.array(values)),
                "y": [t.name for t in known],
                "marker": {"color": _colour(k)},
                "hovertemplate": f"%{{x:.3~g}} % {label}<extra>%{{y}}</extra>",
            }
        )
    figure = _figure(title, traces, ("% of requests", "linear"), ("", "category"))
    figure["layout"] |= {"barmode": "stack", "height": 90 + 34 * len(known)}
    figure["layout"]["xaxis"]["range"] = [0, 100]
    figure["layout"]["yaxis"]["autorange"] = "reversed"
    figure["key"] = [{"name": label, "colour": _colour(k)} for k, label in enumerate(labels)]
    return figure


def tenants(shown: Sequence[Traffic]) -> Any:
    """Share of the requests that the k largest tenants send."""
    if not any(t.tenants and len(t.tenants) > 1 for t in shown):
        return None
    traces = []
    for i, t in enumerate(shown):
        if not t.tenants:
            continue
        sums = 100 * np.cumsum(t.tenants) / sum(t.tenants)
        at = _thin(len(sums))
        hover = f"%{{y:.3~g}} % from the %{{x}} largest<extra>{t.name}</extra>"
        traces.append({**_line(t.name, i, at + 1.0, sums[at], hover), "mode": "lines+markers"})
        traces[-1]["marker"] = {"color": _colour(i), "size": 6}
    figure = _figure("Tenants", traces, ("largest tenants", "log"), ("% of requests", "linear"))
    figure["layout"]["yaxis"]["range"] = [0, 101]
    return figure


def _cdf(
    shown: Sequence[Traffic],
    columns: Sequence[np.ndarray | None],
    title: str,
    unit: str,
    of: str = "requests",
) -> Any:
    traces = []
    for i, (t, values) in enumerate(zip(shown, columns, strict=True)):
        if values is None or not len(values):
            continue
        x = np.sort(values)
        at = _thin(len(x))
        hover = f"%{{y:.3~g}} % of {of} at or below %{{x:.4~g}} {unit}<extra>{t.name}</extra>"
        traces.append(_line(t.name, i, x[at], 100.0 * (at + 1) / len(x), hover, shape="hv"))
    figure = _figure(title, traces, (unit, "log"), (f"% of {of} at or below", "linear"))
    if figure:
        figure["layout"]["yaxis"]["range"] = [0, 101]
    return figure


def _figure(title: str, traces: list[Any], x: tuple[str, str], y: tuple[str, str]) -> Any:
    if not traces:
        return None
    axes = {
        name: {"title": {"text": text}, "type": kind} for name, (text, kind) in (("xaxis", x), ("yaxis", y))
    }
    figure = {"title": title, "data": traces, "layout": {**axes, "showlegend": False}}
    if len(traces) > 1:  # above the chart, where it wraps: a legend would take a phone's whole chart
        figure["key"] = [{"name": t["name"], "colour": t["line"]["color"]} for t in traces if "line" in t]
    return figure


def _line(name: str, index: int, x: np.ndarray, y: np.ndarray, hover: str, **line: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": _shorts(x),
        "y": _shorts(y),
        "line": {"color": _colour(index), "width": 2, **line},
        "hovertemplate": hover,
    }


def _edges(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Of logarithmic cells that hold every value."""
    low = max(1, min(int(c.min()) for c in columns))
    high = max(int(c.max()) for c in columns)
    return np.geomspace(0.999 * low, max(1.001 * high, 2.0 * low), CELLS + 1)


def _thin(n: int) -> np.ndarray:
    """At most MAX_POINTS indices of range(n), with both ends."""
    return np.unique(np.linspace(0, n - 1, min(n, MAX_POINTS)).round().astype(np.int64))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _shorts(values: np.ndarray) -> list[float]:
    return [_short(v) for v in np.asarray(values, dtype=float).tolist()]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
