"""A verdict for people and for machines: the table, and one line of JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from harness.formats import Figure, Report
from harness.gate.outcome import Result
from harness.names import label, name
from harness.table import MISSING, console_for, grid, number

STYLES = {"regression": "bold red", "inconclusive": "yellow", "better": "green"}
OPTIONAL = ("effect", "confidence", "rounds", "needed")
"""Of interleaved rounds only."""


def print_result(report: Report, console: Console | None = None) -> None:
    """The table: a line a metric, then the reasons."""
    out = console_for(console)
    if report.figures:
        paired = any(figure.effect is not None for figure in report.figures)
        names = ("base", "head", "change", "interval") if paired else ("baseline", "now", "change")
        table = grid("metric", *names, "limit", "verdict")
        for column in (table.columns[0], *(c for c in table.columns if c.header == "interval")):
            column.no_wrap = False  # where 80 columns are too few, words are folded and no figure cut off
        for f in report.figures:
            cells = [number(f.baseline), number(f.value), percentage(f.change)]
            cells += [f.span or MISSING] if paired else []
            style = STYLES.get(f.verdict, "") if f.gate else "dim"
            verdict = Text(f.verdict if f.gate else f"({f.verdict})", style=style)
            table.add_row(label(f.metric), *cells, number(f.limit), verdict)
        out.print(table)
        if paired:
            out.print(Text(_legend(report.figures), style="dim"))
        for f in report.figures:
            if f.reason:
                out.print(Text(f"{name(f.metric)}: {f.reason}", style="dim"))
    for reason in report.reasons:
        out.print(Text(f"{report.outcome.upper()} {reason}", style="bold red"))


def _legend(figures: tuple[Figure, ...]) -> str:
    shares = sorted({f.confidence for f in figures if f.confidence is not None})
    words = " to ".join(f"{100 * share:.4g} %" for share in dict.fromkeys((shares[0], shares[-1])))
    return f"interval of the change at {words} (harness.stats); in brackets: reported, cannot fail the gate"


def percentage(change: float | None) -> str:
    return f"{100 * change:+.1f} %" if change is not None else MISSING


def machine_line(result: Result, report: Report, code: int, **more: Any) -> dict[str, Any]:
    return {
        "gate": result.outcome,
        "exit": code,
        "run": report.summary.get("run", {}).get("id"),
        "baseline": report.baseline,
        **more,
        "reasons": list(result.reasons),
        "metrics": [machine_figure(figure) for figure in result.figures],
    }


def machine_figure(f: Figure) -> dict[str, Any]:
    """What is only known of interleaved rounds is left out elsewhere."""
    line: dict[str, Any] = {
        "metric": f.metric,
        "better": f.better,
        "gate": f.gate,
        "baseline": f.baseline,
        "now": f.value,
        "change": f.change,
        "limit": f.limit,
        "verdict": f.verdict,
        "reason": f.reason,
    }
    return line | {name: value for name in OPTIONAL if (value := getattr(f, name)) not in (None, ())}
