"""The page: figures, charts, outcomes and configuration of one run or several, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.comparison import compare, flatten, null_notes, reading_notes
from harness.dashboard import figures
from harness.dashboard.figures import COLOURS, Series
from harness.dashboard.table import figure_table
from harness.exchange.reading import is_result
from harness.exchange.result import ResultError
from harness.metrics.latency import chunk_table, per_request
from harness.metrics.run import Run, load_run
from harness.slo import shown as shown_slo
from harness.table import lookup
from workloads.page import frame

PLOT_HEIGHT = 300


class DashboardError(Exception):
    """A run cannot be read or the page cannot be written. The message is one line."""


@dataclass(frozen=True)
class Shown:
    """One run on the page."""

    name: str
    run: Run
    summary: dict[str, Any]
    config: dict[str, str]  # flat: "engine.max_num_seqs" -> "16"
    series: Series


def write_dashboard(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page for these run directories; the first is the reference. Raises DashboardError."""
    if not run_dirs:
        raise DashboardError("no run directory given")
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

    for path in run_dirs:
        if not (path / "meta.json").is_file() and not is_result(path):
            raise DashboardError(f"{path} is not a run directory: it has no meta.json")
    try:
        comparison = compare(run_dirs)
    except ResultError as exc:
        raise DashboardError(str(exc)) from exc
    shown = [
        _shown(name, path, summary)
        for name, path, summary in zip(comparison.names, run_dirs, comparison.summaries, strict=True)
    ]
    sections, drawn = _sections([s.series for s in shown])
    shared, differing = _settings(shown)
    page = Environment(loader=PackageLoader("harness.dashboard", "."), autoescape=True).get_template(
        "page.html.j2"
    )
    return page.render(
        title=_title(shown),
        subtitle=_subtitle(shown),
        banners=_banners(shown, comparison.mismatches),
        runs=[
            {"name": s.name, "colour": COLOURS[i % len(COLOURS)], "valid": bool(s.summary.get("valid"))}
            for i, s in enumerate(shown)
        ],
        table=figure_table(comparison),
        notes=[n.removeprefix("- ") for n in (*null_notes(comparison), *reading_notes(comparison))],
        sections=sections,
        shared=shared,
        differing=differing,
        host=_host(shown[0]),
        css=Markup(frame.style()),
        js=Markup(frame.script()),
        plotly=Markup(frame.plotly()),
        figures_json=Markup(frame.script_json(drawn)),
    )


def _shown(name: str, path: Path, summary: dict[str, Any]) -> Shown:
    run = load_run(path)
    return Shown(name, run, summary, flatten(run.config), _series(name, run, summary))


def _series(name: str, run: Run, summary: dict[str, Any]) -> Series:
    duration = (summary.get("run") or {}).get("duration_s")
    span = summary["steady"]["window"]
    steady = None if span["start_s"] is None else (span["start_s"], span["end_s"])
    return Series(
        name=name,
        frame=per_request(run.requests, run.meta.get("slo")),
        chunks=chunk_table(run.requests),
        steps=run.steps,
        counts={k: int(v) for k, v in (summary.get("counts") or {}).items() if isinstance(v, int)},
        duration_s=float(duration or 0.0),
        steady=steady,
        spent=tuple(_spent(summary)),
    )


def _spent(summary: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """The mean request of all and of each class: ms by part, and by what its queue waited for."""
    groups = summary.get("by_class") or {}
    for label, group in [("all", summary), *(groups.items() if len(groups) > 1 else ())]:
        whole = lookup(group, "latency_ms.e2e.from_intended.mean")
        shares = dict(group.get("attribution") or {})
        shares |= {f"queue_{name}": share for name, share in (group.get("queue_reasons") or {}).items()}
        if whole is not None and shares and None not in shares.values():
            yield label, {name: share * whole for name, share in shares.items()}


def _sections(runs: Sequence[Series]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The sections of the page, and every figure in the order in which it is drawn."""
    plan: list[tuple[str, str, bool, list[Any]]] = [
        (
            "Latency",
            "Share of completed requests (of gaps, in the last) at or below a value.",
            False,
            [
                figures.cdf(runs, "ttft_ms", "Time to first token"),
                figures.cdf(runs, "tpot_ms", "Time per output token"),
                figures.cdf(runs, "normalized_ms", "Normalized latency: E2E over output tokens", "ms/token"),
                figures.cdf(runs, "gap_ms", "Gap between chunks"),
            ],
        ),
        (
            "Over time",
            "One marker per completed request, at its intended arrival."
            + (" The steady window is shaded." if len(runs) == 1 and runs[0].steady else ""),
            False,
            [
                figures.over_time(runs, "ttft_ms", "Time to first token"),
                figures.over_time(runs, "tpot_ms", "Time per output token"),
                figures.throughput(runs),
                figures.concurrency(runs),
                figures.occupancy(runs),
                figures.kv_use(runs),
                figures.step_times(runs),
            ],
        ),
        (
            "Where the time went",
            "The mean completed request, from its intended arrival to its last token at the client, in the "
            "order of its life. Definitions: docs/metrics.md, attribution.",
            True,
            [figures.time_spent(runs)],
        ),
        ("Outcomes", "How every scheduled request ended.", True, [figures.outcomes(runs)]),
    ]
    sections: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    for title, note, wide, candidates in plan:
        shown = []
        for figure in filter(None, candidates):
            figure["id"] = f"plot{len(drawn)}"
            height = figure["layout"].setdefault("height", PLOT_HEIGHT)
            key = figure.pop("key", [])
            drawn.append(figure)
            shown.append({"id": figure["id"], "title": figure["title"], "height": height, "key": key})
        if shown:
            sections.append({"title": title, "note": note, "wide": wide, "figures": shown})
    return sections, drawn


def _title(shown: Sequence[Shown]) -> str:
    workloads = list(dict.fromkeys(str(s.summary.get("workload") or "?") for s in shown))
    engines = list(dict.fromkeys(str(s.summary.get("engine") or s.name) for s in shown))
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
