"""The page of capacities: the verdict, the curves over the rate, and every point. It opens from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.capacity.result import CRITERIA, shown
from harness.dashboard.colours import Style, styles
from harness.table import number, percent

POINT_COLUMNS = {
    "goodput, requests/s": "goodput_rps",
    "attained": "attainment",
    "TTFT p50, ms": "ttft_p50",
    "TTFT p99, ms": "ttft_p99",
    "TPOT p99, ms": "tpot_p99",
    "gap p99, ms": "itl_p99",
    "queue delay p50, ms": "queue_delay_p50",
    "output tokens/s": "output_tokens_per_s",
    "pressure": "pressure",
}
FIGURES_NOTE = (
    "A marker a probe: filled where the rate held, open where it was over a limit. Dotted: the limit. "
    "The line joins the means of the repeats. Pressure is the largest figure over its limit: up to 1 it held."
)


def write_page(value: dict[str, Any], out: Path) -> None:
    """value: capacity.json. Raises OSError."""
    from workloads.page import frame

    frame.write_page(render(page_of(value)), out)


def render(content: dict[str, Any]) -> str:
    """content: what the template names; figures: Plotly JSON without ids."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    from workloads.page import frame

    drawn = [{"id": f"plot{i}", **figure} for i, figure in enumerate(content["figures"])]
    template = Environment(loader=PackageLoader("harness.capacity", "."), autoescape=True).get_template(
        "page.html.j2"
    )
    return template.render(
        **{**content, "figures": drawn},
        css=Markup(frame.style()),
        js=Markup(frame.script()),
        plotly=Markup(frame.plotly()),
        figures_json=Markup(frame.script_json(drawn)),
    )


def page_of(value: dict[str, Any]) -> dict[str, Any]:
    arms = value["arms"]
    looks = styles([arm["engine"] for arm in arms])
    price = value.get("cost_device_hour")
    rows = [
        ("held, with the SLO, requests/s", [number(arm["capacity"]["rps"]) for arm in arms]),
        ("lies within", [shown(arm["capacity"]) for arm in arms]),
        ("breaks by", [_criteria(arm["limited_by"]) for arm in arms]),
        ("serves when full, requests/s", [number(arm["saturated_rps"]) for arm in arms]),
        ("output tokens/s at the capacity", [number(arm["cost"]["output_tokens_per_s"]) for arm in arms]),
    ]
    if price is not None:
        rows += [
            (f"cost of a million {what} tokens", [number(arm["cost"][f"per_million_{what}"]) for arm in arms])
            for what in ("output", "total")
        ]
    return {
        "title": f"Capacity: {value['workload']} on {', '.join(arm['name'] for arm in arms)}",
        "subtitle": subtitle(value),
        "verdict_title": "The highest rate that holds",
        "verdict": "",
        "verdict_rows": [{"label": label, "cells": cells} for label, cells in rows],
        "arms": [{"name": arm["name"], "colour": look.colour} for arm, look in zip(arms, looks, strict=True)],
        "notes": [f"{arm['name']}: {note}" for arm in arms for note in arm["notes"]],
        "figures_title": "Over the rate",
        "figures_note": FIGURES_NOTE,
        "figures": curves(value, looks),
        "tables": [_table(arm, price) for arm in arms],
    }


def subtitle(value: dict[str, Any]) -> str:
    parts = [f"model {value['model']}", f"SLO {value['slo_text']}", f"seed {value['seed']}"]
    parts += ["virtual time: no server was measured"] if value["virtual"] else []
    return " · ".join([*parts, value["started_at"][:16].replace("T", " ") + " UTC"])


def curves(value: dict[str, Any], looks: Sequence[Style]) -> list[dict[str, Any]]:
    """Goodput, attainment, latencies, pressure and cost over the rate."""
    slo = value["limits"]
    plan = [
        ("Goodput", "goodput_rps", "requests/s within the SLO", "linear", None),
        ("Attainment", "attainment", "share of requests within the SLO", "linear", slo["attainment"]),
        ("TTFT, p99", "ttft_p99", "ms", "log", slo["ttft_ms"]),
        ("TPOT, p99", "tpot_p99", "ms", "log", slo["tpot_ms"]),
        ("Gap between tokens, p99", "itl_p99", "ms", "log", slo["itl_p99_ms"]),
        ("Queue delay, median", "queue_delay_p50", "ms", "log", slo["queue_delay_p50_ms"]),
        ("Pressure", "pressure", "figure over its limit", "log", 1.0),
        ("Cost of a million output tokens", "cost", "price of the device", "linear", None),
    ]
    figures = (_curve(value, looks, *part) for part in plan)
    return [figure for figure in figures if figure is not None]


def _curve(
    value: dict[str, Any],
    looks: Sequence[Style],
    title: str,
    key: str,
    unit: str,
    kind: str,
    limit: float | None,
) -> dict[str, Any] | None:
    traces: list[dict[str, Any]] = []
    for arm, look in zip(value["arms"], looks, strict=True):
        known = [(p["rate"], _figure(p, key), p["ok"]) for p in arm["points"]]
        points = [(rate, y, ok) for rate, y, ok in known if y is not None and (y > 0 or kind == "linear")]
        if points:
            traces += _arm_traces(arm["name"], look, points, unit)
    if not traces:
        return None
    top = max(p["rate"] for arm in value["arms"] for p in arm["points"])
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "offered, requests/s"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": unit}, "type": kind},
    }
    if kind == "linear":
        layout["yaxis"]["rangemode"] = "tozero"
    grey = {"color": "#808080", "width": 1, "dash": "dot"}
    if limit is not None:
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": grey}
        ]
    if key == "goodput_rps":  # all that is offered
        layout["shapes"] = [{"type": "line", "x0": 0, "x1": top, "y0": 0, "y1": top, "line": grey}]
    return {"title": title, "data": traces, "layout": layout}


def _arm_traces(
    name: str, look: Style, points: list[tuple[float, float, bool]], unit: str
) -> list[dict[str, Any]]:
    rates = sorted({rate for rate, _, _ in points})
    means = [sum(ys) / len(ys) for ys in ([y for r, y, _ in points if r == rate] for rate in rates)]
    line = {
        "type": "scatter", "mode": "lines", "name": name, "x": rates, "y": means, "hoverinfo": "skip",
        "line": {"color": look.colour, "width": 2, "dash": look.dash},
    }  # fmt: skip
    markers = {
        "type": "scatter", "mode": "markers", "name": name, "showlegend": False,
        "x": [rate for rate, _, _ in points], "y": [y for _, y, _ in points],
        "marker": {
            "color": look.colour, "size": 8,
            "symbol": [look.symbol if ok else f"{look.symbol}-open" for _, _, ok in points],
        },
        "text": ["held" if ok else "over" for _, _, ok in points],
        "hovertemplate": f"%{{x:.4g}} requests/s: %{{y:.4g}} {unit}, %{{text}}<extra>{name}</extra>",
    }  # fmt: skip
    return [line, markers]


def _figure(point: dict[str, Any], key: str) -> float | None:
    found = point["cost"]["per_million_output"] if key == "cost" else point[key]
    return None if found is None else float(f"{found:.5g}")


def _table(arm: dict[str, Any], price: float | None) -> dict[str, Any]:
    columns = dict(POINT_COLUMNS)
    rows = [
        [
            number(point["rate"]),
            *(percent(point[key]) if key == "attainment" else number(point[key]) for key in columns.values()),
            *([number(point["cost"]["per_million_output"])] if price is not None else []),
            "held" if point["ok"] else _criteria(point["over"]),
            point["run"] or "–",
        ]
        for point in arm["points"]
    ]
    cost = ["cost/M output"] if price is not None else []
    return {
        "title": arm["name"],
        "columns": ["rate, requests/s", *columns, *cost, "verdict", "run"],
        "rows": rows,
    }


def _criteria(names: list[str]) -> str:
    return ", ".join(CRITERIA[name] for name in names) or "–"
