"""A gate's verdict as the writers of the formats see it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from harness.metrics.summary import clean


@dataclass(frozen=True)
class Figure:
    """One metric of a run, or of several: its value, what it was held against, and what came of it."""

    metric: str  # its path in summary.json
    better: str  # lower | higher
    value: float | None
    ci95: tuple[float, float] | None  # of the value
    baseline: float | None  # None: held against a constant
    change: float | None  # relative to the baseline
    limit: float | None  # the value that would be past it; None: unknown without a baseline
    verdict: str  # pass, better, noise, regression, inconclusive or, on another machine, not judged
    reason: str | None = None
    gate: bool = True  # whether it can fail the gate
    reliable: bool = True  # False: of too few samples, so it is a number nowhere
    effect: tuple[float, float] | None = None  # interval of the change, at this confidence
    confidence: float | None = None
    rounds: tuple[float, ...] = ()  # the value in each round
    needed: int | None = None  # rounds until it would be decided

    @property
    def failed(self) -> bool:
        return self.gate and self.verdict == "regression"

    @property
    def against(self) -> str:
        """What it was held against, in six digits."""
        if self.baseline is not None:
            return f"{self.baseline:.6g}"
        return f"the constant {self.limit:.6g}" if self.limit is not None else "nothing"

    @property
    def span(self) -> str:
        """The interval of the change, in per cent; "" where there is none."""
        if self.effect is None:
            return ""
        low, high = self.effect
        return "unbounded" if high >= WILD or low < -WILD else f"{100 * low:+z.1f} to {100 * high:+z.1f} %"

    @property
    def word(self) -> str:
        """The verdict as people read it."""
        return self.verdict if self.gate else f"{self.verdict}, report only"

    @property
    def unit(self) -> str:
        """As trackers show it; "" where the path does not tell."""
        for ending, unit in UNITS:
            if self.metric.rpartition(".")[2].endswith(ending):
                return unit
        block = self.metric.partition(".")[0]
        return "ms" if "_ms" in self.metric else "requests" if block == "counts" else ""


WILD = 10.0
"""A change of more than that at either end of an interval: the rounds say nothing."""
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
    baseline: str  # what it was held against: a file, or a revision and the rounds
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
        """The figures that are numbers: not null, of enough samples, and of a valid run."""
        if self.outcome == "invalid":
            return ()
        return tuple(f for f in self.figures if f.value is not None and f.reliable)

    def comparable(self) -> tuple[Figure, ...]:
        """Those that may join a history which knows figures by their names alone: none of another machine or
        another test."""
        return () if self.reasons else self.measured()


def dumps(value: Any) -> str:
    """Strict JSON with the precision of summary.json."""
    return json.dumps(clean(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
