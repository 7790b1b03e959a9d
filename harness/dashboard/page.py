"""The page: verdict, slot timeline, charts, settings and raw tables of one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from harness.comparison import Comparison, compare, flatten, null_notes, reading_notes
from harness.dashboard.data import pack, run_data
from harness.dashboard.figures import phases
from harness.dashboard.figures.plot import plain
from harness.dashboard.inputs import DashboardError, Inputs, read_inputs
from harness.dashboard.sections import numbered, parts
from harness.dashboard.shown import Shown, shown_runs
from harness.dashboard.stalls import find_stalls
from harness.dashboard.table import figure_table
from harness.dashboard.verdict import verdict
from harness.exchange.result import ResultError
from harness.explain import PART_NAMES, WAITED_FOR
from harness.slo import shown as shown_slo
from workloads.page import frame

__all__ = ["DashboardError", "render", "write_dashboard"]

SCRIPTS = ("columns.js", "seats.js", "life.js", "table.js", "tabs.js", "start.js")


def write_dashboard(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page for these run directories; the first is the reference. A folder with a compare.json
    stands for its runs, one with a capacity.json for its points. Raises DashboardError."""
    html = render([Path(path) for path in run_dirs])
    try:
        frame.write_page(html, out)
    except OSError as exc:
        raise DashboardError(f"cannot write {out}: {exc.strerror or exc}") from exc
    return out


def render(run_dirs: Sequence[Path]) -> str:
    """The page as text. Raises DashboardError for a folder that holds no run."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    inputs = read_inputs(run_dirs)
    comparison, shown = _read(inputs)
    stalls = [find_stalls(run) for run in shown]
    sections, drawn = numbered(parts(shown, stalls, inputs.capacity), [plain(s.name) for s in shown])
    data = {
        "figures": drawn,
        "runs": [run_data(run, found, len(shown)) for run, found in zip(shown, stalls, strict=True)],
        "parts": [[name, colour, list(of)] for name, (colour, of) in phases.PARTS.items()],
        "part_names": PART_NAMES,
        "waited_for": WAITED_FOR,
    }
    shared, differing = _settings(shown)
    page = Environment(loader=PackageLoader("harness.dashboard", "."), autoescape=True).get_template(
        "page.html.j2"
    )
    return page.render(
        title=_title(shown),
        subtitle=_subtitle(shown),
        banners=_banners(shown, comparison.mismatches),
        verdict=verdict(shown, comparison, inputs.compared),
        runs=[
            {"name": s.name, "colour": s.style.colour, "valid": bool(s.summary.get("valid"))} for s in shown
        ],
        seated=[s.name for s in shown if s.seats.count],
        table=figure_table(comparison),
        notes=[n.removeprefix("- ") for n in (*null_notes(comparison), *reading_notes(comparison))],
        sections=sections,
        shared=shared,
        differing=differing,
        host=_host(shown[0]),
        css=Markup(frame.style() + _file("page.css")),
        boot=Markup(_file("boot.js")),
        js=Markup("\n".join([frame.script(), *(_file(name) for name in SCRIPTS)])),
        plotly=Markup(_plotly()),
        data=Markup(pack(frame.script_json(data))),
    )


def _read(inputs: Inputs) -> tuple[Comparison, list[Shown]]:
    try:
        comparison = compare(inputs.runs)
        if inputs.names is not None and not comparison.mismatches:
            comparison = replace(comparison, names=inputs.names)
        return comparison, shown_runs(comparison)
    except ResultError as exc:
        raise DashboardError(str(exc)) from exc


@cache
def _plotly() -> str:
    return pack(frame.plotly())


def _file(name: str) -> str:
    folder = resources.files("harness.dashboard")
    return (folder / ("script" if name.endswith(".js") else "") / name).read_text(encoding="utf-8")


def _title(shown: Sequence[Shown]) -> str:
    workloads = list(dict.fromkeys(str(s.summary.get("workload") or "?") for s in shown))
    engines = list(dict.fromkeys(s.engine for s in shown))
    return f"{', '.join(workloads)} on {', '.join(engines)}"


def _subtitle(shown: Sequence[Shown]) -> str:
    first = shown[0]
    planned = first.run.meta.get("planned") or {}
    parts = [f"model {first.summary.get('model')}", f"device {first.summary.get('device')}"]
    if planned.get("rate"):
        parts.append(f"{planned['rate']:.4g} requests/s")
    if planned.get("length_scale") is not None:
        parts.append(f"workload.length_scale {planned['length_scale']:g}")
    slo = first.run.meta.get("slo") or {}
    if limits := shown_slo(slo):
        parts.append(f"SLO {limits}")
    started = str(first.run.meta.get("started_at") or "")
    parts += [
        f"seed {first.run.meta.get('seed')}",
        started[:16].replace("T", " ") + (" UTC" if started else ""),
    ]
    return " · ".join(p for p in parts if p)


def _banners(shown: Sequence[Shown], mismatches: Sequence[str]) -> list[dict[str, Any]]:
    banners = []
    for s in shown:
        if not s.summary.get("valid", False):
            lines = list(s.summary.get("invalid_reasons") or ["no reason given"])
            banners.append({"kind": "bad", "title": f"{s.name}: this run is not valid", "lines": lines})
    for s in shown:
        if s.summary.get("warnings"):
            title = f"{s.name}: read with care" if len(shown) > 1 else "Read with care"
            banners.append({"kind": "warn", "title": title, "lines": list(s.summary["warnings"])})
    if mismatches:
        banners.append({"kind": "warn", "title": "Not comparable", "lines": list(mismatches)})
    return banners


def _settings(shown: Sequence[Shown]) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Settings that all runs share, and those that differ."""
    keys = list(dict.fromkeys(key for s in shown for key in s.config))
    shared, differing = [], []
    for key in keys:
        values = [s.config.get(key, "–") for s in shown]
        if len(set(values)) == 1:
            shared.append({"key": key, "value": values[0]})
        else:
            differing.append({"key": key, "cells": values})
    return shared, differing


def _host(shown: Shown) -> list[dict[str, str]]:
    flat = flatten({"host": shown.run.meta.get("host") or {}, "server": shown.run.meta.get("server") or {}})
    return [{"key": key, "value": value} for key, value in flat.items()]
