"""Workload configurations for tests: the shipped YAML as plain dicts, with changes."""

from __future__ import annotations

import copy
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

PRESETS = (
    *("chat", "rag", "summarize", "code", "agent", "toolcall", "batch", "reasoning"),
    *("mixed", "tiers"),
)


def workload_file(name: str) -> str:
    return str(files("harness.conf") / "workload" / f"{name}.yaml")


@cache
def _shipped(name: str) -> dict[str, Any]:
    return yaml.safe_load(Path(workload_file(name)).read_text(encoding="utf-8"))


def workload(name: str, **changes: Any) -> dict[str, Any]:
    """The shipped node; `changes` are dotted keys with __ for the dot: input__cap=None."""
    node = copy.deepcopy(_shipped(name))
    for key, value in changes.items():
        target = node
        *path, last = key.split("__")
        for step in path:
            target = target[step]
        assert last in target, f"{key} is not in {name}.yaml"
        target[last] = value
    return node


def full_size(name: str, **changes: Any) -> dict[str, Any]:
    """The preset as its sources measured it: no scaling, no caps."""
    return workload(name, **{"length_scale": 1, "input__cap": None, "output__cap": None, **changes})
