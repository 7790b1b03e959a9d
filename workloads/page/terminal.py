"""The table of the page for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workloads.page.traffic import Traffic, table

if TYPE_CHECKING:
    from rich.console import Console


def print_traffic(shown: Sequence[Traffic], console: Console) -> None:
    from rich.table import Table

    made = Table()
    made.add_column("")
    for one in shown:
        made.add_column(one.name, justify="right", overflow="fold")
    group = ""
    for row in table(shown):
        if row.group != group:
            made.add_section()
            made.add_row(row.group, *[""] * len(shown), style="bold")
            group = row.group
        made.add_row(f"  {row.label}", *row.cells)
    console.print(made)
    for one in shown:
        for note in one.notes:
            console.print(f"note: {one.name}: {note}", highlight=False, soft_wrap=True, markup=False)
