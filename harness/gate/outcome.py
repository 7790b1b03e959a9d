"""How a gate ends: exit codes, and the rule by which metrics make one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.cli import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE
from harness.formats import Figure

OUTCOMES = {PASS: "pass", REGRESSION: "regression", INVALID: "invalid", INCONCLUSIVE: "inconclusive"}

__all__ = ["INCONCLUSIVE", "INVALID", "OUTCOMES", "PASS", "REGRESSION", "USAGE", "Result", "concluded"]


@dataclass(frozen=True)
class Result:
    """exit: the outcome as an exit code. reasons: why the whole run is invalid or cannot be judged here."""

    exit: int
    figures: tuple[Figure, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.exit]


def concluded(figures: Sequence[Figure]) -> Result:
    """A regression outranks what is inconclusive; metrics that are only reported decide nothing."""
    if any(f.failed for f in figures):
        return Result(REGRESSION, tuple(figures))
    unclear = any(f.gate and f.verdict == "inconclusive" for f in figures)
    return Result(INCONCLUSIVE if unclear else PASS, tuple(figures))
