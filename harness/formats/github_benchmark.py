"""JSON for github-action-benchmark's customSmallerIsBetter and customBiggerIsBetter, one file a direction.

The action knows a figure by its name and alerts on its ratio to the previous commit's alone, without any
interval: charts, not a gate."""

from __future__ import annotations

from typing import Any

from harness.formats.report import Figure, Report, dumps


def smaller_is_better(report: Report) -> str:
    return _array(report, "lower")


def bigger_is_better(report: Report) -> str:
    return _array(report, "higher")


def _array(report: Report, better: str) -> str:
    return dumps([_entry(report, figure) for figure in report.comparable() if figure.better == better])


def _entry(report: Report, figure: Figure) -> dict[str, Any]:
    entry = {
        "name": f"{report.name} {figure.metric}",
        "unit": figure.unit,
        "value": figure.value,
        "extra": f"{figure.word} against {figure.against}\nrun {report.run}",
    }
    if figure.ci95 is not None:
        entry["range"] = "{:.6g} to {:.6g}".format(*figure.ci95)
    return entry
