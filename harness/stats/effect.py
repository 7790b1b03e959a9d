"""The effect of an arm on one metric: its ratio to the reference, with an interval over rounds.

Ratios of times are products of many small factors, so their logarithms are what is averaged, and swapping
the arms turns every figure into its inverse. The interval is Student's t on the log ratios of the rounds: of
3 to 10 lognormal rounds it holds its coverage, where a percentile bootstrap over the rounds covers 79 % (3
rounds) to 90 % (10) instead of 95 % (tests/harness/stats/test_effect.py counts both)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Effect:
    """Arm over reference: above 1 the arm has more. ratio is the geometric mean over the rounds that have
    one. Where there is no ratio, or no interval (one round), the figures are None and `reason` says why."""

    ratio: float | None
    low: float | None
    high: float | None
    rounds: int
    confidence: float
    per_round: tuple[float | None, ...] = ()
    reason: str | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


def paired_effect(
    reference: Sequence[float | None], arm: Sequence[float | None], *, confidence: float = CONFIDENCE
) -> Effect:
    """One value a round, in the same order. None and NaN: not measured in that round, which is then left
    out. Two zeros are equal (ratio 1). One zero, a negative or an infinite value has no ratio, and since a
    round cannot be left out for being extreme, then the whole effect has none. Raises ValueError for unlike
    lengths."""
    pairs = list(zip(map(_known, reference), map(_known, arm), strict=True))
    measured = [(number, r, a) for number, (r, a) in enumerate(pairs, 1) if r is not None and a is not None]
    if not measured:
        return Effect(None, None, None, 0, confidence, (None,) * len(pairs), "was measured in no round")
    logs: dict[int, float] = {}
    for number, r, a in measured:
        odd = _no_ratio(r, a)
        if odd:
            reason = f"{odd} in round {number}: no ratio"
            return Effect(None, None, None, len(measured), confidence, (None,) * len(pairs), reason)
        logs[number] = 0.0 if r == a else math.log(a) - math.log(r)
    per_round = tuple(_exp(logs[n]) if n in logs else None for n in range(1, len(pairs) + 1))
    values = list(logs.values())
    mean = statistics.fmean(values)
    ratio = _exp(mean)
    if len(values) < 2:
        return Effect(ratio, None, None, 1, confidence, per_round, "one round has no interval")
    half = half_width(values, confidence)
    return Effect(ratio, _exp(mean - half), _exp(mean + half), len(values), confidence, per_round)


def half_width(values: Sequence[float], confidence: float) -> float:
    """Of Student's interval for the mean of these values, two or more."""
    return t_quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(degrees: int, confidence: float) -> float:
    """Two-sided: the share `confidence` of Student's t lies within plus and minus this."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _no_ratio(reference: float, arm: float) -> str | None:
    for name, value in (("the reference", reference), ("the arm", arm)):
        if math.isinf(value) or value < 0:
            return f"{name} is {value:g}"
    if (reference == 0) != (arm == 0):
        return f"{'the reference' if reference == 0 else 'the arm'} is 0"
    return None


def _exp(value: float) -> float:
    """An interval of wild rounds may reach beyond what a float holds."""
    return math.exp(min(max(value, -700.0), 700.0))
