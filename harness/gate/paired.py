"""Base and head in paired rounds: which of a metric's changes can be told from noise.

A round is a run of each, back to back; the unit is the round. Two intervals decide, and each has an error
rate that is promised whatever the noise is (Student's t on the log ratios of the rounds, harness.stats):

    regression    the change is past the limit and the interval of Rules.confidence lies wholly past it
    pass          the upper end of the (1 - 2 misses) interval is within the limit
    inconclusive  neither: noise leaves both possible, and more rounds would tell

So noise costs rounds, not errors: a gate of m metrics fails without a cause in at most false_alarms of all
cases, and a metric that is worse by its limit passes in at most misses of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.formats import Figure
from harness.gate.rules import Rule, Rules
from harness.stats import confidence_at
from harness.stats.effect import half_width, paired_effect, t_quantile

MOST_ROUNDS = 1000
"""Beyond these nobody waits."""


@dataclass(frozen=True, slots=True)
class Look:
    """Which look at the growing rounds this is, of how many planned ones: each further look is a further
    chance for an error, so they share the error rates (harness.stats.looks)."""

    number: int = 1
    planned: int = 1

    def confidence(self, confidence: float) -> float:
        return confidence_at(self.number, self.planned, confidence=confidence)


ONLY_LOOK = Look()


@dataclass(frozen=True, slots=True)
class Change:
    """One metric over the rounds, on a scale on which more is worse: log ratios, or differences where there
    is no ratio or the rule has none. limit is on that scale; base and head are the means behind it."""

    worse: tuple[float, ...]
    limit: float
    base: float
    head: float
    ratios: bool


def judge(
    rule: Rule,
    rules: Rules,
    base: Sequence[float | None],
    head: Sequence[float | None],
    *,
    look: Look = ONLY_LOOK,
    problem: str | None = None,
) -> Figure:
    """One metric's verdict from its value in each round, in the same order. problem: why it cannot be judged
    although it may be known."""
    pairs = [(b, h) for b, h in zip(base, head, strict=True) if b is not None and h is not None]
    known = tuple(h for _, h in pairs)
    if problem is None and len(pairs) < len(base):
        problem = f"measured in {len(pairs)} of {len(base)} rounds"
    if problem is not None or not pairs:
        figures = (None, None, None, None, None, "inconclusive", problem or "no round is valid")
        return Figure(rule.metric, rule.better, *figures, rule.gate, reliable=False)
    change = change_of(rule, [b for b, _ in pairs], known)
    past = look.confidence(rules.confidence(rule))
    within = look.confidence(1 - 2 * rules.misses)
    word, reason, needed = decide(change, past, within)
    sign = 1 if rule.better == "lower" else -1
    return Figure(
        rule.metric,
        rule.better,
        change.head,
        mean_interval(known, 0.95),
        change.base,
        change.head / change.base - 1 if change.base else None,
        change.base * math.exp(sign * change.limit) if change.ratios else change.base + sign * change.limit,
        word,
        reason,
        rule.gate,
        effect=effect_of(change, sign, past),
        confidence=past,
        rounds=known,
        needed=needed,
    )


def change_of(rule: Rule, base: Sequence[float], head: Sequence[float]) -> Change:
    """Log ratios where the rule is relative and every value is above 0; else differences."""
    sign = 1 if rule.better == "lower" else -1
    if rule.relative is not None and min(*base, *head) > 0:
        ratios = paired_effect(base, head).per_round
        reference = statistics.geometric_mean(base)
        limit = math.log1p(rule.allowed(reference) / reference)
        logs = tuple(sign * math.log(ratio) for ratio in ratios if ratio is not None)
        return Change(logs, limit, reference, statistics.geometric_mean(head), ratios=True)
    differences = tuple(sign * (h - b) for b, h in zip(base, head, strict=True))
    reference = statistics.fmean(base)
    return Change(differences, rule.allowed(reference), reference, statistics.fmean(head), ratios=False)


def decide(change: Change, past: float, within: float) -> tuple[str, str | None, int | None]:
    """(verdict, reason, rounds needed) with intervals of these two-sided confidences."""
    rounds = len(change.worse)
    if rounds < 2:
        return "inconclusive", "one round has no interval", None
    mean = statistics.fmean(change.worse)
    sure = half_width(change.worse, past)
    if mean - sure > change.limit:
        return "regression", None, None
    if mean + half_width(change.worse, within) <= change.limit:
        return ("better" if mean + sure < -change.limit else "pass"), None, None
    spread = statistics.stdev(change.worse)
    confidence, room = (past, mean - change.limit) if mean > change.limit else (within, change.limit - mean)
    needed = next(
        (
            n
            for n in range(rounds + 1, MOST_ROUNDS + 1)
            if t_quantile(n - 1, confidence) * spread / math.sqrt(n) < room
        ),
        None,
    )
    more = f"about {needed} would" if needed else "it lies at the limit"
    reason = f"{rounds} rounds cannot tell on which side of the limit it is; {more}"
    return "inconclusive", reason, needed


def effect_of(change: Change, sign: int, confidence: float) -> tuple[float, float] | None:
    """The interval of the relative change; None with one round, or without a reference to relate it to."""
    if len(change.worse) < 2 or not change.base:
        return None
    mean, half = statistics.fmean(change.worse), half_width(change.worse, confidence)
    ends = sorted((sign * (mean - half), sign * (mean + half)))
    if change.ratios:
        low, high = (math.expm1(min(end, 700.0)) for end in ends)  # wild rounds: beyond what a float holds
    else:
        low, high = sorted(end / change.base for end in ends)
    return low, high


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Of the mean over the rounds: geometric where all are above 0. None for a single value."""
    if len(values) < 2:
        return None
    if min(values) > 0:
        return paired_effect([1.0] * len(values), values, confidence=confidence).interval
    mean, half = statistics.fmean(values), half_width(values, confidence)
    return mean - half, mean + half
