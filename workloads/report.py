"""The tables of `python -m workloads show` and `fit`."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console
from rich.table import Table

from workloads.fit import TraceFit, index_of_dispersion
from workloads.schedule import Schedule
from workloads.trace import Trace

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def print_schedule(schedule: Schedule, console: Console) -> None:
    """Rate, gaps, lengths, classes and cancellations of a schedule."""
    times = np.array([r.arrival_s for r in schedule])
    gaps = np.diff(times)
    busy = len(gaps) > 1 and gaps.mean() > 0
    shared = _shared_share(schedule)
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
    """Lengths and gaps of a trace beside their fits, and the settings that a preset would take."""
    table = Table(title=f"{trace.path} ({trace.format}): {fit.rows} rows in {fit.span_s:.1f} s")
    for column in ("", "n", "mean", *(f"p{q}" for q in QUANTILES), "max", "mu", "sigma", "KS"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in (("input", fit.input), ("output", fit.output)):
        values = getattr(trace, f"{name}_tokens")
        table.add_row(name, *_quantile_cells(values), f"{one.mu:.3f}", f"{one.sigma:.3f}", f"{one.ks:.3f}")
    console.print(table)
    gaps = Table(title="arrivals")
    gaps.add_column("")
    gaps.add_column("", justify="right")
    for label, value in (
        ("rate /s", fit.arrivals.rate),
        ("CV of gaps", fit.arrivals.cv),
        ("gamma shape", fit.arrivals.shape),
        ("KS", fit.arrivals.ks),
        *((f"dispersion in {w:g} s", d) for w, d in fit.arrivals.dispersion.items()),
    ):
        gaps.add_row(label, "-" if value is None else f"{value:.3g}")
    console.print(gaps)
    lines = [f"input:  {{dist: lognormal, mu: {fit.input.mu:.3f}, sigma: {fit.input.sigma:.3f}}}"]
    lines.append(f"output: {{dist: lognormal, mu: {fit.output.mu:.3f}, sigma: {fit.output.sigma:.3f}}}")
    if fit.arrivals.shape is not None:
        lines.append(f"arrivals: {{kind: gamma, cv: {fit.arrivals.shape**-0.5:.3f}}}")
    console.print("as settings:\n  " + "\n  ".join(lines), highlight=False, soft_wrap=True, markup=False)
    for note in trace.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


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


def _shared_share(schedule: Schedule) -> float:
    """Share of prompt tokens whose whole prefix an earlier request had, segment by segment, the last one in
    part: what a prefix cache without limits could reuse at most."""
    prompts = schedule.columns.segments
    longest: dict[tuple[int, ...], int] = {}
    hits = 0
    start, code, number, tokens = (
        column.tolist() for column in (prompts.start, prompts.code, prompts.number, prompts.tokens)
    )
    for i in range(len(prompts)):
        prefix: tuple[int, ...] = ()
        shares = True
        for k in range(start[i], start[i + 1]):
            prefix = (*prefix, code[k], number[k])
            known = longest.get(prefix, 0)
            if shares:
                hits += min(known, tokens[k])
                shares = known >= tokens[k]
            longest[prefix] = max(known, tokens[k])
            prefix = (*prefix, tokens[k])
    return hits / int(prompts.tokens.sum())
