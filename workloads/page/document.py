"""The page: the table and the charts of traffic side by side, in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from workloads import output
from workloads.page import figures, frame
from workloads.page.traffic import Traffic, table

PLOT_HEIGHT = 300


def write(shown: Sequence[Traffic], out: Path) -> None:
    """Raises WorkloadError."""
    output.write_text("--page", out, render(shown), replace=True)


def render(shown: Sequence[Traffic]) -> str:
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    sections, drawn = _sections(shown)
    template = Environment(loader=PackageLoader("workloads.page", "."), autoescape=True).get_template(
        "page.html.j2"
    )
    return template.render(
        title=", ".join(t.name for t in shown),
        shown=[
            {"name": t.name, "colour": frame.COLOURS[i % len(frame.COLOURS)]} for i, t in enumerate(shown)
        ],
        groups=[(group, list(rows)) for group, rows in groupby(table(shown), key=lambda row: row.group)],
        notes=[f"{t.name}: {note}" for t in shown for note in t.notes],
        sections=sections,
        css=Markup(frame.style()),
        js=Markup(frame.script()),
        plotly=Markup(frame.plotly()),
        figures_json=Markup(frame.script_json(drawn)),
    )


def _sections(shown: Sequence[Traffic]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The sections of the page, and every figure in the order in which it is drawn."""
    plan: list[tuple[str, str, bool, list[Any]]] = [
        (
            "Lengths",
            "Tokens of prompts and of answers. A cell is the stronger the more of the requests fall into it.",
            False,
            [
                figures.lengths(shown, "prompts", "Prompt"),
                figures.lengths(shown, "answers", "Answer"),
                *(figures.joint(shown, i) for i in range(len(shown))),
            ],
        ),
        (
            "Arrivals",
            "Index of dispersion: variance over mean of the counts in windows of one length; 1 for Poisson "
            "arrivals, more for bursts.",
            False,
            [figures.arrivals(shown), figures.dispersion(shown)],
        ),
        (
            "Prefix reuse and sessions",
            "Seen before: the prompt begins as an earlier one did, for so many of its tokens. It is what a "
            "prefix cache without limits could reuse.",
            False,
            [figures.reuse(shown), figures.turns(shown), figures.think_times(shown)],
        ),
        (
            "Users",
            "",
            False,
            [
                figures.shares(shown, "endings", "When users give up"),
                figures.shares(shown, "transports", "Transport"),
                figures.shares(shown, "classes", "Classes"),
                figures.tenants(shown),
            ],
        ),
    ]
    sections: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    for title, note, wide, candidates in plan:
        placed = []
        for figure in filter(None, candidates):
            figure["id"] = f"plot{len(drawn)}"
            height = figure["layout"].setdefault("height", PLOT_HEIGHT)
            key = figure.pop("key", [])
            drawn.append(figure)
            placed.append({"id": figure["id"], "title": figure["title"], "height": height, "key": key})
        if placed:
            sections.append({"title": title, "note": note, "wide": wide, "figures": placed})
    return sections, drawn
