"""What the page is asked to show: runs, results of other tools, a comparison or a capacity search."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.exchange.reading import is_result


class DashboardError(Exception):
    """A run cannot be read or the page cannot be written. The message is one line."""


@dataclass(frozen=True)
class Inputs:
    """Runs in the order of the page, the first is the reference. names: an arm's for each run, where they are
    those of a comparison."""

    runs: tuple[Path, ...]
    names: tuple[str, ...] | None = None
    compared: dict[str, Any] | None = None  # compare.json
    capacity: dict[str, Any] | None = None  # capacity.json


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Raises DashboardError for a path that holds none of these."""
    if not paths:
        raise DashboardError("no run directory given")
    runs: list[Path] = []
    found: dict[str, Any] = {}
    for path in paths:
        if (path / "compare.json").is_file():
            if len(paths) > 1:
                raise DashboardError(f"{path} is a comparison: give it alone, or the directories of its runs")
            return _comparison(path)
        if (path / "capacity.json").is_file():
            found = _json(path / "capacity.json")
            runs += _points(path, found)
        elif (path / "meta.json").is_file() or is_result(path):
            runs.append(path)
        else:
            raise DashboardError(f"{path} is not a run directory: it has no meta.json")
    if not runs:
        raise DashboardError(f"{paths[0]}: none of its runs is there any more")
    return Inputs(tuple(runs), capacity=found or None)


def _comparison(folder: Path) -> Inputs:
    """One run an arm: of the middle round among those that are valid and whole."""
    found = _json(folder / "compare.json")
    names = [str(arm.get("name")) for arm in found.get("arms") or []]
    reference = str(found.get("reference"))
    names.sort(key=lambda name: name != reference)
    rounds = [
        [folder / str((one.get("runs") or {}).get(name, "?")) for name in names]
        for one in found.get("rounds") or []
        if one.get("valid", True)
    ]
    whole = [paths for paths in rounds if paths and all((path / "meta.json").is_file() for path in paths)]
    if not whole:
        raise DashboardError(f"{folder}: compare.json names no valid round whose runs are all there")
    return Inputs(tuple(whole[len(whole) // 2]), tuple(names), compared=found)


def _points(folder: Path, found: dict[str, Any]) -> list[Path]:
    """The runs of a capacity search that are still there."""
    arms = found.get("arms") or {}
    points = [point for arm in arms.values() for point in (arm or {}).get("points") or []]
    runs = [folder / str(point["run"]) for point in points if point.get("run")]
    return [run for run in dict.fromkeys(runs) if (run / "meta.json").is_file()]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise DashboardError(f"cannot read {path}: {' '.join(str(exc).split())}") from exc
    if not isinstance(value, dict):
        raise DashboardError(f"cannot read {path}: it is no object")
    return value
