"""The tables of `python -m workloads show` and `fit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from workloads.fitting.arrivals import index_of_dispersion
from workloads.fitting.goodness import Figure
from workloads.fitting.preset import TraceFit
from workloads.reuse import reusable_share
from workloads.schedule import Schedule
from workloads.trace import Trace

if TYPE_CHECKING:
    from workloads.check import Check

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def print_schedule(schedule: Schedule, console: Console) -> None:
    """Rate, gaps, lengths, classes and cancellations of a schedule."""
    times = np.array([r.arrival_s for r in schedule])
    gaps = np.diff(times)
    busy = len(gaps) > 1 and gaps.mean() > 0
    shared = reusable_share(schedule.columns.segments)
    about = Table(title=f"{schedule.name}, seed {schedule.seed}", show_header=False)
    rows = {
        "requests": f"{len(schedule)}",
        "span": f"{times[-1]:.1f} s",
        "planned rate": "-" if schedule.planned_rate is None else f"{schedule.planned_rate:.3g} /s",
        "CV of gaps": f"{gaps.std() / gaps.mean():.2f}" if busy else "-",
        "dispersion in 1 s": "-" if (d := index_of_dispersion(times, 1.0)) is None else f"{d:.2f}",
        "length_scale": f"{schedule.length_scale:g}",
        "streamed": f"{np.mean([r.stream for r in schedule]):.1%}",
        "prompt tokens seen before": f"{shared:.1%}",
        "sha256": schedule.sha256(),
    }
    if schedule.skipped_rows:
        rows["bad rows skipped"] = str(schedule.skipped_rows)
    for name, value in rows.items():
        about.add_row(name, value)
    console.print(about)

    lengths = Table(title="tokens")
    for column in ("", "n", "mean", *(f"p{q}" for q in QUANTILES), "max"):
        lengths.add_column(column, justify="right" if column else "left")
    classes = Counter(r.request_class for r in schedule)
    for name in [None, *(classes if len(classes) > 1 else ())]:
        members = [r for r in schedule if name is None or r.request_class == name]
        label = f"{name} " if name else ""
        for what in ("prompt_tokens", "stop_after", "max_tokens"):
            lengths.add_row(f"{label}{what}", *_quantile_cells(np.array([getattr(r, what) for r in members])))
    console.print(lengths)

    if any(r.session is not None for r in schedule):
        console.print(_sessions(schedule))

    cancels = Table(title="users who give up")
    for column in ("kind", "requests", "share", "p50 of value"):
        cancels.add_column(column, justify="left" if column == "kind" else "right")
    for kind, count in Counter(r.cancel_kind for r in schedule).most_common():
        values = [r.cancel_value for r in schedule if r.cancel_kind == kind and r.cancel_value is not None]
        unit = "tokens" if kind == "after_tokens" else "s"
        middle = f"{np.median(values):.3g} {unit}" if values else "-"
        cancels.add_row(kind, str(count), f"{count / len(schedule):.1%}", middle)
    console.print(cancels)
    for note in schedule.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


def print_fit(trace: Trace, fit: TraceFit, console: Console) -> None:
    """What was found in a trace, part by part."""
    table = Table(title=f"{trace.path} ({trace.format}): {fit.rows} rows in {fit.span_s:.1f} s")
    for column in ("", "n", "mean", *(f"p{q}" for q in QUANTILES), "max"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("input", "output"):
        table.add_row(f"{name} tokens", *_quantile_cells(getattr(trace, f"{name}_tokens")))
    console.print(table)
    found = Table(title="traffic", show_header=False)
    arrivals = fit.arrivals
    rows: list[tuple[str, str]] = [("arrivals", arrivals.kind)]
    if arrivals.rate is not None:
        rows.append(("rate", f"{arrivals.rate:.4g} /s" + (" (sessions)" if fit.sessions else "")))
    rows += [("CV of all gaps", f"{arrivals.cv:.3g}")] if arrivals.cv is not None else []
    rows += [(f"dispersion in {w:g} s", f"{d:.2f}") for w, d in arrivals.dispersion.items()]
    if "factor" in arrivals.settings:
        factor = arrivals.settings["factor"]
        rows.append(("slow factor", f"sigma {factor['sigma']:g}, forgotten after {factor['tau_s']:g} s"))
    rows.append(
        ("kind and cv of gaps", f"{arrivals.settings.get('kind', '-')}, {arrivals.settings.get('cv')}")
    )
    if fit.lengths.spearman is not None:
        rows.append(("rank correlation of lengths", f"{fit.lengths.spearman:.3f}"))
    if fit.prefixes is not None:
        rows.append((f"prompt tokens reused ({fit.prefixes.source})", f"{fit.prefixes.hit_rate:.2%}"))
    if fit.sessions is not None:
        rows.append(("sessions", f"{fit.sessions.sessions}, alike {fit.sessions.alike:g}"))
    if fit.tenants:
        rows.append(
            ("tenants", f"{len(fit.tenants)}, the largest {max(fit.tenants.values()) / fit.rows:.1%}")
        )
    for name, value in rows:
        found.add_row(name, value)
    console.print(found)
    for note in (*fit.notes, *arrivals.notes):
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


def print_checks(name: str, checks: Sequence[Check], console: Console) -> None:
    """A row for each check, the failed ones marked."""
    table = Table(title=name)
    for column in ("", "found", "wanted", "limit", "ok"):
        table.add_column(column, justify="right" if column in ("found", "wanted") else "left")
    for one in checks:
        verdict = "yes" if one.ok else "[bold red]NO[/]"
        table.add_row(one.figure, f"{one.found:.3f}", f"{one.wanted:.3f}", one.limit, verdict)
    console.print(table)


def print_figures(figures: list[Figure], console: Console) -> None:
    """Source against drawn, and what was missed."""
    table = Table(title="source against drawn")
    for column in ("", "source", "drawn", "limit", ""):
        table.add_column(column)
    for figure in figures:
        verdict = "" if figure.ok is None else "ok" if figure.ok else "MISSED"
        table.add_row(figure.name, figure.source, figure.drawn, figure.limit, verdict)
    console.print(table)


def _sessions(schedule: Schedule) -> Table:
    turns = Counter(r.session for r in schedule if r.session is not None)
    table = Table(title=f"{len(turns)} sessions")
    for column in ("", "n", "mean", *(f"p{q}" for q in QUANTILES), "max"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("turns", *_quantile_cells(np.array(list(turns.values()))))
    thinks = np.array([r.think_s for r in schedule if r.think_s is not None])
    if len(thinks):
        table.add_row("think_s", *_quantile_cells(thinks, ".1f"))
        last = max(turns, key=lambda session: turns[session])
        prompts = " > ".join(str(r.prompt_tokens) for r in schedule if r.session == last)
        table.caption = f"prompt tokens of the longest, turn by turn: {prompts}"
    return table


def _quantile_cells(values: np.ndarray, form: str = ".0f") -> list[str]:
    quantiles = [*np.percentile(values, QUANTILES), values.max()]
    return [f"{len(values)}", f"{values.mean():.1f}", *(format(q, form) for q in quantiles)]
