"""The verdict on rounds of base and head, and when there are enough of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.formats import Figure
from harness.gate.constants import of_rounds, worse_of
from harness.gate.outcome import INVALID, Result, concluded
from harness.gate.paired import ONLY_LOOK, Look, judge
from harness.gate.reading import check_paths, measured
from harness.gate.rounds import Round
from harness.gate.rules import Rule, Rules

HOPELESS = 2
"""Invalid rounds before the first valid one: the fault is no accident of the machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many valid rounds to measure: `rounds`, or until every metric is decided, then at most `most`,
    looking after each further `rounds`."""

    rounds: int
    most: int

    @property
    def looks(self) -> int:
        return 1 + math.ceil((self.most - self.rounds) / self.rounds)

    def until(self, look: int) -> int:
        return min(self.most, look * self.rounds)


def hold(rounds: Iterator[Round], rules: Rules, plan: Plan, kept: list[Round]) -> Result:
    """Take rounds until they are judged. Every round that was measured is appended to kept, also the invalid
    ones; as many of those as the plan has valid ones are made up for. Raises UsageError."""
    for look in range(1, plan.looks + 1):
        while len(valid(kept)) < plan.until(look):
            kept.append(next(rounds))
            problem = unusable(kept, plan) or unlike(valid(kept)[-1:])
            if problem:
                return Result(INVALID, reasons=problem)
            if len(valid(kept)) == 1:
                check_paths(rules, valid(kept)[0].passes["head"].summary or {})
        result = judged(valid(kept), rules, Look(look, plan.looks))
        if not any(f.gate and f.verdict == "inconclusive" and f.rounds for f in result.figures):
            break
        if any(f.failed for f in result.figures):
            break
    return result


def valid(rounds: Sequence[Round]) -> list[Round]:
    return [done for done in rounds if done.valid]


def unusable(rounds: Sequence[Round], plan: Plan) -> tuple[str, ...]:
    """Why there is no use in going on: too many rounds were invalid."""
    bad = [done for done in rounds if not done.valid]
    if len(bad) > plan.most or (len(bad) >= HOPELESS and len(bad) == len(rounds)):
        said = dict.fromkeys(problem for done in bad for problem in done.problems)
        return (f"{len(bad)} of {len(rounds)} rounds are invalid", *said)
    return ()


def unlike(rounds: Sequence[Round]) -> tuple[str, ...]:
    """Both sides must have been sent the same requests."""
    for done in rounds:
        prints = [p.summary["run"]["fingerprint"]["schedule"] for p in done.passes.values() if p.summary]
        if len(set(prints)) != 1 or None in prints:
            return (
                "fingerprint.schedule differs: base and head draw other requests from these settings, so no "
                "figure compares; fix the traffic with a trace (workload=trace workload.path=FILE)",
            )
    return ()


def judged(rounds: Sequence[Round], rules: Rules, look: Look = ONLY_LOOK) -> Result:
    """Every metric's verdict on these valid rounds."""
    figures = [_figure(rule, rules, rounds, look) for rule in rules.metrics]
    return concluded([figure for figure in figures if figure is not None])


def _figure(rule: Rule, rules: Rules, rounds: Sequence[Round], look: Look) -> Figure | None:
    base, no_base = series(rounds, "base", rule.metric)
    head, no_head = series(rounds, "head", rule.metric)
    problem = no_base or no_head
    if rules.optional and problem and not (rule.gate and any(value is not None for value in base)):
        return None  # nobody asked for it by name, and this engine or so few requests have no such figure
    constant = None if rule.limit is None else of_rounds(rule, rules, head)
    if not rule.judges_change:
        return constant
    change = judge(rule, rules, base, head, look=look, problem=problem)
    return change if constant is None else worse_of(change, constant)


def series(rounds: Sequence[Round], side: str, path: str) -> tuple[list[float | None], str | None]:
    """(a side's figure in each round, why one of them cannot be judged)."""
    values: list[float | None] = []
    problem = None
    for done in rounds:
        value, why = measured(done.passes[side].summary or {}, path)
        values.append(value)
        problem = problem or (f"{side}: {why}" if why else None)
    return values, problem
