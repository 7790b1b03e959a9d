"""A crossover on a terminal and as a page."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import names
from harness.capacity.page import render, subtitle
from harness.capacity.prober import path_of
from harness.dashboard.colours import styles
from harness.table import console_for, grid, number

AXES = {
    "rate": "offered, requests/s",
    "prompt_mix": "share of the class with the longest prompts",
    "length_scale": "workload.length_scale",
}


def print_crossover(value: dict[str, Any], console: Console | None = None) -> None:
    """value: capacity.json of kind crossover."""
    console = console_for(console)
    reference, arm = (each["name"] for each in value["arms"])
    table = grid(value["over"], reference, arm, f"{arm} / {reference}", "interval", "rounds")
    for point in value["points"]:
        table.add_row(*row_of(point, reference, arm))
    console.print()
    console.print(table)
    console.print(f"\n{value['text']}", soft_wrap=True)


def row_of(point: dict[str, Any], reference: str, arm: str) -> list[str]:
    interval = "-" if point["low"] is None else f"{point['low']:.3f} to {point['high']:.3f}"
    return [
        number(point["x"]),
        number(middle(point[reference])),
        number(middle(point[arm])),
        "-" if point["ratio"] is None else f"{point['ratio']:.3f}",
        interval,
        str(point["rounds"]),
    ]


def said(value: dict[str, Any]) -> str:
    """What people call the metric."""
    return names.label(path_of(value["metric"]) or value["metric"])


def middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def write_crossover(value: dict[str, Any], out: Path) -> None:
    """Raises OSError."""
    from workloads.page import frame

    reference, arm = (each["name"] for each in value["arms"])
    looks = styles([each["engine"] for each in value["arms"]])
    rows = [row_of(point, reference, arm) for point in value["points"]]
    columns = [
        *(value["over"], f"{said(value)}, {reference}", arm),
        *(f"{arm} / {reference}", f"{value['confidence']:.0%} interval", "rounds"),
    ]
    content = {
        "title": f"Crossover: {value['workload']}, {reference} and {arm}",
        "subtitle": subtitle(value),
        "verdict_title": "Who overtakes whom",
        "verdict": value["text"],
        "arms": [
            {"name": each["name"], "colour": look.colour}
            for each, look in zip(value["arms"], looks, strict=True)
        ],
        "verdict_rows": [
            {
                "label": f"{said(value)} at {number(point['x'])}",
                "cells": [number(middle(point[name])) for name in (reference, arm)],
            }
            for point in value["points"]
        ],
        "notes": [],
        "figures_title": f"Over {value['over']}",
        "figures_note": "A marker a run; the line joins the medians of the rounds. Shaded: where the engines "
        "change places. The ratio's bars are its interval over the rounds.",
        "figures": [_metric(value, looks), _ratio(value)],
        "tables": [{"title": "Places", "columns": columns, "rows": rows}],
    }
    frame.write_page(render(content), out)


def _metric(value: dict[str, Any], looks: list[Any]) -> dict[str, Any]:
    traces = []
    for each, look in zip(value["arms"], looks, strict=True):
        name, points = each["name"], value["points"]
        pairs = [(point["x"], y) for point in points for y in point[name] if y is not None]
        medians = [middle(point[name]) for point in points]
        traces += [
            {
                "type": "scatter", "mode": "lines", "name": name, "hoverinfo": "skip",
                "x": [point["x"] for point in points], "y": medians,
                "line": {"color": look.colour, "width": 2, "dash": look.dash},
            },
            {
                "type": "scatter", "mode": "markers", "name": name, "showlegend": False,
                "x": [x for x, _ in pairs], "y": [y for _, y in pairs],
                "marker": {"color": look.colour, "size": 7, "symbol": look.symbol},
            },
        ]  # fmt: skip
    layout = {"xaxis": _axis(value), "yaxis": {"title": {"text": said(value)}, "type": "log"}}
    return {"title": said(value), "data": traces, "layout": {**layout, "shapes": _band(value)}}


def _ratio(value: dict[str, Any]) -> dict[str, Any]:
    reference, arm = (each["name"] for each in value["arms"])
    known = [point for point in value["points"] if point["ratio"] is not None]
    bars = {
        "type": "data", "symmetric": False,
        "array": [(point["high"] or point["ratio"]) - point["ratio"] for point in known],
        "arrayminus": [point["ratio"] - (point["low"] or point["ratio"]) for point in known],
    }  # fmt: skip
    trace = {
        "type": "scatter", "mode": "lines+markers", "name": f"{arm} / {reference}", "error_y": bars,
        "x": [point["x"] for point in known], "y": [point["ratio"] for point in known],
        "line": {"color": "#5A6472", "width": 2},
    }  # fmt: skip
    one = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    one |= {"line": {"color": "#808080", "width": 1, "dash": "dot"}}
    layout = {"xaxis": _axis(value), "yaxis": {"title": {"text": "ratio"}, "type": "log"}}
    title = f"{said(value)}: {arm} over {reference}"
    return {"title": title, "data": [trace], "layout": {**layout, "shapes": [one, *_band(value)]}}


def _axis(value: dict[str, Any]) -> dict[str, Any]:
    kind = "linear" if value["over"] == "prompt_mix" else "log"
    return {"title": {"text": AXES[value["over"]]}, "type": kind}


def _band(value: dict[str, Any]) -> list[dict[str, Any]]:
    found = value["crossover"]
    if found["low"] is None:
        return []
    band = {"type": "rect", "xref": "x", "yref": "paper", "x0": found["low"], "x1": found["high"]}
    look = {"fillcolor": "rgba(128,128,128,0.18)", "line": {"width": 0}, "layer": "below"}
    return [{**band, "y0": 0, "y1": 1, **look}]
