"""Capacities on a terminal: the engines side by side, then every point."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from harness.capacity.result import shown
from harness.table import console_for, grid, number, percent

POINT_COLUMNS = (("TTFT p99", "ttft_p99"), ("TPOT p99", "tpot_p99"), ("queue p50", "queue_delay_p50"))


def print_result(value: dict[str, Any], console: Console | None = None) -> None:
    """value: capacity.json."""
    console = console_for(console)
    for arm in value["arms"]:
        _points(arm, value.get("cost_device_hour"), console)
    table = grid("requests/s", *(arm["name"] for arm in value["arms"]))
    table.add_row("capacity: held", *(number(arm["capacity"]["rps"]) for arm in value["arms"]))
    table.add_row("lies within", *(shown(arm["capacity"]) for arm in value["arms"]))
    table.add_row("breaks by", *(", ".join(arm["limited_by"]) or "-" for arm in value["arms"]))
    table.add_row("serves when full", *(number(arm["saturated_rps"]) for arm in value["arms"]))
    table.add_row("output tokens/s", *(number(arm["cost"]["output_tokens_per_s"]) for arm in value["arms"]))
    if value.get("cost_device_hour") is not None:
        for label, key in (("output", "per_million_output"), ("total", "per_million_total")):
            row = (number(arm["cost"][key]) for arm in value["arms"])
            table.add_row(f"cost/M {label} tokens", *row)
    console.print()
    console.print(table)
    for arm in value["arms"]:
        for note in arm["notes"]:
            console.print(f"{arm['name']}: {note}", soft_wrap=True)


def _points(arm: dict[str, Any], price: float | None, console: Console) -> None:
    if not arm["points"]:
        return
    costs = ("cost/M",) if price is not None else ()
    columns = (name for name, _ in POINT_COLUMNS)
    table = grid(arm["name"], "goodput", "attained", *columns, *costs, "pressure", "")
    table.columns[-1].no_wrap = False  # all four criteria are wider than what is left of 80 columns
    for point in arm["points"]:
        table.add_row(
            number(point["rate"]),
            number(point["goodput_rps"]),
            percent(point["attainment"]),
            *(number(point[key]) for _, key in POINT_COLUMNS),
            *((number(point["cost"]["per_million_output"]),) if costs else ()),
            number(point["pressure"]),
            "held" if point["ok"] else ", ".join(point["over"]),
        )
    console.print()
    console.print(table)
