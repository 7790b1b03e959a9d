"""Figures for people: how a number, an unreliable one and a missing one look on a terminal and in a log."""

from __future__ import annotations

import io
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cli import mute

MISSING = "-"
UNRELIABLE = "~"
LEGEND = f"{UNRELIABLE} too few samples for a 95 % interval"


def lookup(summary: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of a summary; None where there is none. A name may hold a dot itself
    (iod.0.2s)."""
    value: Any = summary
    names = path.split(".")
    while names:
        ends = range(1, len(names) + 1)
        end = next((i for i in ends if isinstance(value, dict) and ".".join(names[:i]) in value), None)
        if end is None:
            return None
        value, names = value[".".join(names[:end])], names[end:]
    return value


def why_null(summary: dict[str, Any], path: str) -> str | None:
    """The reason recorded for path or for the nearest part that holds it."""
    reasons = summary.get("null_reasons") or {}
    while path:
        if path in reasons:
            return str(reasons[path])
        path = path.rpartition(".")[0]
    return None


def number(value: Any, digits: int = 3) -> str:
    """A figure with about three significant digits, at most 8 characters; MISSING for null."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    size = abs(value)
    if size >= 1e7:
        return f"{value:.1e}"
    if isinstance(value, int) or size >= 10 ** (digits - 1):
        return f"{value:.0f}"
    if value == 0:
        return "0"
    places = digits - 1 if size < 10 else digits - 2
    return f"{value:.{places}f}" if size >= 10**-places else f"{value:.1g}"


def percent(value: Any) -> str:
    """A share as a percentage; MISSING for null."""
    if value is None:
        return MISSING
    shown = 100 * float(value)
    return f"{shown:.0f} %" if shown in (0, 100) else f"{shown:.1f} %"


def figure(block: Any, name: str) -> Text:
    """One figure of a latency block; unreliable ones are dim and carry a ~."""
    value = block.get(name) if isinstance(block, dict) else None
    if value is None:
        return Text(MISSING, style="dim")
    if block.get("reliable", {}).get(name, True):
        return Text(number(value))
    return Text(UNRELIABLE + number(value), style="dim")


def grid(*columns: str) -> Table:
    """A table without lines: the first column is a label, the others are figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=True, header_style="bold")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def console_for(console: Console | None) -> Console:
    """The caller's console, or one on standard output that neither guesses at emoji nor recolours numbers.
    What its encoding does not have (arrows, in a terminal that is not UTF-8) is shown as "?"."""
    if console is not None:
        return console
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return _Console(highlight=False, emoji=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would leave with exit code 1, which says regression."""
        self.quiet = True
        mute()
