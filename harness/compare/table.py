"""A comparison on the terminal: figures with intervals and words, the drift, the sentence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.compare.judge import Judged, times, trend
from harness.compare.metric import Metric, number_at
from harness.compare.result import Result, figures_of
from harness.table import MISSING, console_for, grid, number

SHOWN = {"better": ("▲", "green"), "worse": ("▼", "red"), "same": ("=", ""), "inconclusive": ("?", "yellow")}
ARM_WIDTH = 28


def print_result(result: Result, console: Console | None = None) -> None:
    out = console_for(console)
    if result.judged:
        fitting = max(1, (out.width - 34) // ARM_WIDTH)
        for start in range(0, len(result.others), fitting):
            out.print(_table(result, result.others[start : start + fitting]))
        out.print(Text(_legend(result), style="dim"))
        for line in (*_reasons(result), _drift(result)):
            out.print(Text(line, style="dim"), soft_wrap=True)
    for one in result.rounds:
        for problem in one.problems:
            out.print(Text(f"round {one.number} left out: {problem}", style="bold red"), soft_wrap=True)
    for reason in result.refused:
        out.print(Text(f"NOT COMPARABLE {reason}", style="bold red"), soft_wrap=True)
    out.print(Text(result.text, style="bold"), soft_wrap=True)


def _table(result: Result, arms: Sequence[str]) -> Table:
    table = grid("", result.reference, *arms)
    for metric in result.settings.metrics:
        values = [number_at(one.passes[result.reference].summary, metric.path) for one in result.valid]
        known = [value for value in values if value is not None]
        first = number(statistics.median(known)) if known else MISSING
        table.add_row(metric.label, first, *(_cell(result.judged[metric.path][arm]) for arm in arms))
    return table


def _cell(one: Judged) -> Text:
    effect = one.effect
    if one.verdict is None or effect.ratio is None:
        return Text(MISSING, style="dim")
    mark, style = SHOWN[one.verdict]
    span = "" if effect.interval is None else f" [{_end(effect.low)}, {_end(effect.high)}]"
    return Text(f"{times(effect.ratio)}{span} {mark}", style=style)


def _end(value: float | None) -> str:
    return times(value).removesuffix("x")


def _legend(result: Result) -> str:
    settings = result.settings
    return (
        f"ratios to {result.reference} (its median), {len(result.valid)} rounds, intervals at "
        f"{result.confidence:.4g}; ▲ better ▼ worse by more than {settings.limit:.0%} = same ? undecided"
    )


def _reasons(result: Result) -> list[str]:
    """Why there is no figure: a line for each reason, with the figures that share it."""
    found: dict[str, list[str]] = {}
    for metric in result.settings.metrics:
        for one in result.judged[metric.path].values():
            if one.reason:
                names = found.setdefault(one.reason, [])
                names += [] if metric.name in names else [metric.name]
    return [f"{', '.join(names)}: {reason}" for reason, names in found.items()]


def _drift(result: Result) -> str:
    """The widest differences that are none of the arms'."""
    if result.again:
        found = [_again(result, metric) for metric in result.settings.metrics]
        return f"A/A {result.reference} against itself: {', '.join(text for text in found if text)}"
    figures = figures_of(result)
    told = []
    for metric in result.settings.metrics:
        change = trend(figures, metric.path, result.confidence)
        if change is not None:
            told.append(f"{metric.name} {_end(change['low'])} to {_end(change['high'])}")
    return f"drift from the first pass to the last, all arms: {', '.join(told)}"


def _again(result: Result, metric: Metric) -> str | None:
    for one in result.again.get(metric.path, {}).values():
        if one.effect.interval is not None:
            mark = " !" if one.verdict in ("better", "worse") else ""
            return f"{metric.name} {_end(one.effect.low)} to {_end(one.effect.high)}{mark}"
    return None
