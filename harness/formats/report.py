"""A gate's verdict as the writers of the formats see it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from harness.metrics.summary import clean


@dataclass(frozen=True)
class Figure:
    """One metric of a run: its value, what it was held against, and what came of it."""

    metric: str  # its path in summary.json
    better: str  # lower | higher
    value: float | None
    ci95: tuple[float, float] | None
    baseline: float
    change: float | None  # relative to the baseline
    limit: float
    verdict: str  # pass, better, noise, regression, inconclusive or, on another machine, not judged
    reason: str | None = None

    @property
    def unit(self) -> str:
        """As trackers show it; "" where the path does not tell."""
        for ending, unit in UNITS:
            if self.metric.rpartition(".")[2].endswith(ending):
                return unit
        block = self.metric.partition(".")[0]
        return "ms" if "_ms" in self.metric else "requests" if block == "counts" else ""


UNITS = (
    ("tokens_per_s", "tokens/s"),
    ("requests_per_s", "requests/s"),
    ("_rps", "requests/s"),
    ("_per_s", "1/s"),
    ("fraction", "ratio"),
    ("share", "ratio"),
    ("attainment", "ratio"),
    ("_tokens", "tokens"),
    ("_s", "s"),
)


@dataclass(frozen=True)
class Report:
    outcome: str  # pass, regression, invalid or inconclusive
    reasons: tuple[str, ...]  # why the whole run is invalid, or cannot be judged here
    baseline: str  # the file that it was held against
    figures: tuple[Figure, ...]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """What was run: workload/engine/model."""
        return "/".join(str(self.summary.get(key) or "unknown") for key in ("workload", "engine", "model"))

    @property
    def run(self) -> str:
        return str(self.summary["run"]["id"])

    def measured(self) -> tuple[Figure, ...]:
        """The figures that are numbers: not null, known with an interval, and of a valid run."""
        if self.outcome == "invalid":
            return ()
        return tuple(f for f in self.figures if f.value is not None and f.verdict != "inconclusive")

    def comparable(self) -> tuple[Figure, ...]:
        """Those that may join a history which knows figures by their names alone: none of another machine or
        another test."""
        return () if self.reasons else self.measured()


def dumps(value: Any) -> str:
    """Strict JSON with the precision of summary.json."""
    return json.dumps(clean(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
