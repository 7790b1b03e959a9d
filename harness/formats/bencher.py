"""Bencher Metric Format (bencher.dev): {benchmark: {measure: {value, lower_value, upper_value}}}."""

from __future__ import annotations

import hashlib
from typing import Any

from harness.formats.report import Figure, Report, dumps

BENCHMARK_CHARS, MEASURE_CHARS = 1024, 64


def bencher(report: Report) -> str:
    """One benchmark, a measure a metric; the 95 % interval as its bounds. `{}` when there is none."""
    measures = {_short(f.metric, MEASURE_CHARS): _metric(f) for f in report.comparable()}
    return dumps({_short(report.name, BENCHMARK_CHARS): measures} if measures else {})


def _metric(figure: Figure) -> dict[str, Any]:
    low, high = figure.ci95 or (None, None)
    metric = {"value": figure.value, "lower_value": low, "upper_value": high}
    return {key: value for key, value in metric.items() if value is not None}


def _short(name: str, chars: int) -> str:
    """The name, or its start and a hash: two long names must not become one."""
    if len(name) <= chars:
        return name
    return f"{name[: chars - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
