"""Constants (an SLO): figures that must not pass a limit, whatever they were before."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.formats import Figure
from harness.gate.outcome import INVALID, Result, concluded
from harness.gate.paired import mean_interval
from harness.gate.reading import interval, measured
from harness.gate.rules import Rule, Rules, RulesError

ORDER = ("better", "pass", "noise", "inconclusive", "regression")
"""Verdicts from best to worst."""


def gate_constants(summary: dict[str, Any], rules: Rules) -> Result:
    """A run against the constants among the rules. Raises RulesError where there is none."""
    limits = [rule for rule in rules.metrics if rule.limit is not None]
    if not limits:
        raise RulesError(
            f"{rules.source}: no metric has a limit; relative and absolute need --baseline or --base-ref"
        )
    if not summary["valid"]:
        return Result(INVALID, reasons=tuple(summary["invalid_reasons"]))
    return concluded([of_run(rule, summary) for rule in limits])


def of_run(rule: Rule, summary: dict[str, Any]) -> Figure:
    """One metric of one run, with the 95 % interval that the run has of it."""
    value, problem = measured(summary, rule.metric)
    ci = interval(summary, rule.metric) if value is not None else None
    return _held(rule, value, ci, 0.95, problem)


def of_rounds(rule: Rule, rules: Rules, values: Sequence[float | None]) -> Figure:
    """One metric over several runs, with the interval of its mean over them."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return _held(rule, None, None, None, f"measured in {len(known)} of {len(values)} rounds")
    confidence = rules.confidence(rule)
    mean = statistics.geometric_mean(known) if min(known) > 0 else statistics.fmean(known)
    return _held(rule, mean, mean_interval(known, confidence), confidence, None, tuple(known))


def _held(
    rule: Rule,
    value: float | None,
    ci: tuple[float, float] | None,
    confidence: float | None,
    problem: str | None,
    rounds: tuple[float, ...] = (),
) -> Figure:
    assert rule.limit is not None
    lower = rule.better == "lower"
    reason = problem
    if value is None or problem is not None:
        word = "inconclusive"
    elif value <= rule.limit if lower else value >= rule.limit:
        word = "pass"
    elif ci is not None and (ci[0] <= rule.limit if lower else ci[1] >= rule.limit):
        word, reason = "inconclusive", "past the limit, but its interval reaches it"
    else:
        word = "regression"
    known = (value, ci, None, None, rule.limit)
    return Figure(
        *(rule.metric, rule.better, *known, word, reason, rule.gate),
        reliable=problem is None,
        confidence=confidence,
        rounds=rounds,
    )


def worse_of(change: Figure, constant: Figure) -> Figure:
    """A metric whose rule has both: the verdict that is worse, the change's where they are alike."""
    return max((change, constant), key=lambda figure: ORDER.index(figure.verdict))
