"""Where one engine overtakes another, from paired rounds at several places. Pure: no runs, no files.

At each place every round measures both engines on the same requests, so the log ratio of the two is what
counts, and the round is the unit. The curve of mean log ratios is joined by straight lines; it crosses zero
where the engines change places. How far the crossing moves is asked by a bootstrap over the rounds, the same
rounds at all places (they are the same requests there). Few rounds vary too little when they are drawn again,
so each draw's departure from the mean is stretched until it spreads as Student's interval does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from harness.stats import Effect, paired_effect
from harness.stats.effect import t_quantile

Kind = Literal["crossover", "none", "same", "inconclusive"]
DRAWS = 1000
NORMAL = 1.959964
SAME = 0.02
"""Ratios within this of 1 everywhere: nothing to choose between the two."""


@dataclass(frozen=True, slots=True)
class Place:
    """Both engines' figures at one place, by round: None where it was not measured."""

    x: float
    reference: tuple[float | None, ...]
    arm: tuple[float | None, ...]

    def effect(self, confidence: float) -> Effect:
        return paired_effect(self.reference, self.arm, confidence=confidence)


@dataclass(frozen=True, slots=True)
class Crossing:
    """kind crossover: at x, between low and high, and above x the arm has more (arm_above) or less of the
    metric. none: arm_above throughout. share: of the bootstrap's draws that have a crossing."""

    kind: Kind
    x: float | None = None
    low: float | None = None
    high: float | None = None
    arm_above: bool | None = None
    share: float | None = None
    reason: str | None = None


def locate(
    places: Sequence[Place], *, confidence: float = 0.95, logarithmic: bool = True, seed: int = 0
) -> Crossing:
    """places: at least two. A crossover needs a place on either side where the engines differ beyond their
    interval, and no such place that contradicts; none needs all of them on one side, and hardly a draw of
    the bootstrap that crosses."""
    effects = {place.x: place.effect(confidence) for place in sorted(places, key=lambda place: place.x)}
    known = {x: e for x, e in effects.items() if e.ratio is not None and e.low is not None}
    if len(known) < 2:
        why = next((e.reason for e in effects.values() if e.reason), "fewer than two places were measured")
        return Crossing("inconclusive", reason=why)
    if all(within(effect) for effect in known.values()):
        return Crossing("same", share=0.0)
    xs = np.array(list(known))
    at = np.log(xs) if logarithmic else xs
    means = np.log([effect.ratio or 1.0 for effect in known.values()])
    drawn = _draws([_logs(effect) for effect in known.values()], seed)
    found = [crossings(at, row) for row in drawn if row.min() <= 0 <= row.max()]
    share = sum(len(each) > 0 for each in found) / DRAWS
    signs = [side(effect) for effect in known.values()]
    clear = [sign for sign in signs if sign]
    turns = sum(a != b for a, b in pairwise(clear))
    if turns == 1:
        where = crossings(at, means)
        middles = [float(np.median(each)) for each in found if len(each)]
        tail = (1 - confidence) / 2
        low, high = np.quantile(middles, [tail, 1 - tail])
        # It lies between the last place that is clear on one side and the first on the other.
        last = max(i for i, sign in enumerate(signs) if sign == clear[0])
        first = min(i for i, sign in enumerate(signs) if sign == clear[-1])
        bounds = [float(np.clip(v, at[last], at[first])) for v in (np.median(where), low, high)]
        middle, low, high = (math.exp(v) if logarithmic else v for v in bounds)
        return Crossing("crossover", middle, low, high, clear[-1] > 0, share)
    if turns > 1:
        return Crossing("inconclusive", share=share, reason="the engines change places more than once")
    if clear and share <= 1 - confidence:
        return Crossing("none", arm_above=clear[0] > 0, share=share)
    return Crossing("inconclusive", share=share, reason=_unclear(dict(zip(known, signs, strict=True))))


def _unclear(signs: Mapping[float, int]) -> str:
    """What is clear nevertheless: a range that begins where it ends may be decided at once."""
    at = {sign: ", ".join(f"{x:.4g}" for x, s in signs.items() if s == sign) for sign in (-1, 1, 0)}
    told = [f"{word} 1 at {at[sign]}" for sign, word in ((-1, "below"), (1, "above")) if at[sign]]
    if not told:
        return "the differences are not clear of the noise"
    if not at[0]:
        return f"the ratio is {told[0]} and its curve may still cross between them"
    return f"the ratio is {told[0]} and not clear of the noise at {at[0]}"


def next_place(
    places: Sequence[Place], *, confidence: float = 0.95, logarithmic: bool = True, tolerance: float = 0.1
) -> float | None:
    """Where to measure next to know the crossing better: halfway in the gap in which the curve crosses zero;
    None where it does not, or the gap is narrow (a share `tolerance` of the whole range)."""
    ordered = sorted(places, key=lambda place: place.x)
    ratios = [(place.x, place.effect(confidence).ratio) for place in ordered]
    curve = [(math.log(x) if logarithmic else x, math.log(ratio)) for x, ratio in ratios if ratio]
    if len(curve) < 2:
        return None
    span = curve[-1][0] - curve[0][0]
    gaps = [(b[0] - a[0], a[0], b[0]) for a, b in pairwise(curve) if a[1] * b[1] < 0]
    width, low, high = max(gaps, default=(0.0, 0.0, 0.0))
    if width <= tolerance * span:
        return None
    middle = (low + high) / 2
    return float(f"{math.exp(middle) if logarithmic else middle:.4g}")


def side(effect: Effect) -> int:
    """+1 where the arm clearly has more, -1 where it has less, 0 where that is not clear."""
    if effect.low is None or effect.high is None:
        return 0
    return int(effect.low > 1) - int(effect.high < 1)


def within(effect: Effect) -> bool:
    low, high = effect.low, effect.high
    return low is not None and high is not None and low >= 1 / (1 + SAME) and high <= 1 + SAME


def crossings(at: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Where the straight lines between the points of a curve pass through zero."""
    left, right = curve[:-1], curve[1:]
    crosses = (left * right < 0) | ((left == 0) & (right != 0))
    share = np.where(crosses, left / np.where(crosses, left - right, 1.0), 0.0)
    return np.asarray((at[:-1] + share * np.diff(at))[crosses])


def _logs(effect: Effect) -> np.ndarray:
    return np.array([np.nan if ratio is None else math.log(ratio) for ratio in effect.per_round])


def _draws(logs: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """[draws, places] mean log ratios of rounds that are drawn again. Places that have fewer rounds use those
    they have."""
    rng = np.random.default_rng(seed)
    rounds = max(map(len, logs))
    chosen = rng.integers(0, rounds, (DRAWS, rounds))
    out = np.empty((DRAWS, len(logs)))
    for place, values in enumerate(logs):
        padded = np.full(rounds, np.nan)
        padded[: len(values)] = values
        count = int(np.isfinite(padded).sum())
        mean = float(np.nanmean(padded))
        drawn = padded[chosen]
        there = np.isfinite(drawn).sum(axis=1)
        means = np.where(there > 0, np.nansum(drawn, axis=1) / np.maximum(there, 1), mean)
        stretch = math.sqrt(count / (count - 1)) * t_quantile(count - 1, 0.95) / NORMAL if count > 1 else 1.0
        out[:, place] = mean + stretch * (means - mean)
    return out


def by_x(figures: Mapping[float, tuple[Sequence[float | None], Sequence[float | None]]]) -> list[Place]:
    return [Place(x, tuple(reference), tuple(arm)) for x, (reference, arm) in sorted(figures.items())]
