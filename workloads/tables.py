"""Small tables that `python -m workloads fit` made from public traces, under `workloads/data`, each with
its source and licence: 101-point quantiles of prompt and answer lengths, and the answers by ranges of
prompts.

A preset names one as `table: azure2023_conv/input`, instead of writing its points out.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from workloads.settings import Settings


def tables() -> list[str]:
    """Names of the tables, without their columns."""
    return sorted(item.name[:-5] for item in _folder().iterdir() if item.name.endswith(".yaml"))


def load_table(node: Settings, column: str | None = None) -> Settings:
    """The table that `node.table` names: NAME/COLUMN, or NAME where the column is given. Raises
    WorkloadError."""
    name, _, asked = node.text("table").partition("/")
    if name not in tables():
        raise node.error("table", f"no such table; choose from {', '.join(tables())}")
    about = _read(name)
    wanted = column or asked
    if wanted not in about or not isinstance(about[wanted], dict):
        columns = ", ".join(f"{name}/{key}" for key, value in about.items() if isinstance(value, dict))
        raise node.error("table", f"has no such column; choose from {columns}")
    return Settings(about[wanted], f"{node.name}.table={node.text('table')}")


def _folder() -> Any:
    return files("workloads") / "data"


@cache
def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
