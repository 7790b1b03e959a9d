"""What the figures of the experiments have in common: one look, light, and one colour for each engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from harness.dashboard.colours import METRICS, colour
from harness.experiments.experiment import number

WIDTH, HEIGHT = 840, 400
DASHES = ("solid", "dash", "dot", "dashdot")


def chart(title: str, x: str, y: str, *, x_type: str = "linear", y_type: str = "linear") -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "font": {"size": 19}, "x": 0.01, "xanchor": "left"},
        font={"size": 15, "family": "DejaVu Sans, Arial, sans-serif"},
        legend={"orientation": "h", "y": -0.2, "x": 0},
        margin={"l": 80, "r": 30, "t": 60, "b": 70},
        width=WIDTH,
        height=HEIGHT,
        bargap=0.25,
    )
    figure.update_xaxes(title=x, type=x_type)
    figure.update_yaxes(title=y, type=y_type)
    return figure


def ink(who: str) -> str:
    """Of an engine or a metric of METRICS; a hex colour is its own."""
    return who if who.startswith("#") else METRICS.get(who) or colour(who)


def line(
    figure: go.Figure,
    engine: str,
    x: Sequence[float],
    y: Sequence[float],
    name: str | None = None,
    *,
    style: int = 0,
    mode: str = "lines+markers",
    **more: object,
) -> None:
    """style: 0, 1, ... tells lines of one engine apart. engine: see `ink`."""
    figure.add_scatter(
        x=_round(x),
        y=_round(y),
        name=name or engine,
        mode=mode,
        line={
            "color": ink(engine),
            "dash": DASHES[style % len(DASHES)],
            "width": 2.5,
        },
        marker={"size": 8},
        **more,
    )


def bars(
    figure: go.Figure,
    engine: str,
    x: Sequence[str],
    y: Sequence[float],
    name: str | None = None,
) -> None:
    """engine: see `ink`."""
    figure.add_bar(
        x=list(x),
        y=_round(y),
        name=name or engine,
        marker={"color": ink(engine)},
        text=[number(value) for value in y],
        textposition="outside",
        cliponaxis=False,
    )
    figure.update_xaxes(type="category")


def level(figure: go.Figure, y: float, text: str, color: str = "#777777") -> None:
    """A dotted line across, with its name above its left end; y in the axis' own unit, logarithmic or not."""
    figure.add_hline(y=y, line_dash="dot", line_color=color)
    at = math.log10(y) if figure.layout.yaxis.type == "log" else y
    figure.add_annotation(
        x=0, xref="x domain", y=at, text=text, showarrow=False, xanchor="left", yanchor="bottom"
    )


def moment(figure: go.Figure, x: float, text: str) -> None:
    """A dotted line from top to bottom, with its name beside it."""
    figure.add_vline(x=x, line_dash="dot", line_color="#777777")
    at = math.log10(x) if figure.layout.xaxis.type == "log" else x
    figure.add_annotation(
        x=at, y=1, yref="y domain", text=text, showarrow=False, xanchor="left", yanchor="top", xshift=4
    )


def _round(values: Sequence[float]) -> list[float | None]:
    return [None if v != v else float(f"{v:.6g}") for v in values]
