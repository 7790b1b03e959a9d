"""From the figures of whole rounds to effects, words and one sentence. Pure: no files, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.compare.metric import Metric, number_at
from harness.stats import Effect, Verdict, decide, paired_effect, rounds_needed
from harness.stats.effect import half_width, t_quantile
from harness.table import number, why_null

if TYPE_CHECKING:
    import pandas as pd

Figures = Mapping[str, dict[str, Any]]
"""Summaries of one round by arm, in the order in which they were measured."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One metric of one arm against the reference. verdict None: there is nothing to compare (reason)."""

    effect: Effect
    verdict: Verdict | None
    needed: int | None  # rounds in all until there would be a word, as it looks
    values: tuple[float | None, ...]  # of the arm, by round
    reason: str | None


def judge(
    rounds: Sequence[Figures],
    metrics: Sequence[Metric],
    reference: str,
    arms: Sequence[str],
    *,
    limit: float,
    confidence: float,
) -> dict[str, dict[str, Judged]]:
    """{path: {arm: Judged}} over valid rounds."""
    return {
        one.path: {
            arm: _judge(rounds, one, reference, arm, limit=limit, confidence=confidence) for arm in arms
        }
        for one in metrics
    }


def _judge(
    rounds: Sequence[Figures], metric: Metric, reference: str, arm: str, *, limit: float, confidence: float
) -> Judged:
    values = [tuple(number_at(figures[name], metric.path) for figures in rounds) for name in (reference, arm)]
    effect = paired_effect(values[0], values[1], confidence=confidence)
    if effect.rounds == 0:
        lacking = arm if any(value is not None for value in values[0]) else reference
        why = why_null(rounds[-1][lacking], metric.path) if rounds else None
        return Judged(effect, None, None, values[1], f"{lacking}: {why or 'was not measured'}")
    verdict = decide(effect, better=metric.better, limit=limit)
    needed = rounds_needed(effect, better=metric.better, limit=limit)
    return Judged(effect, verdict, needed, values[1], effect.reason)


def is_undecided(judged: Mapping[str, Mapping[str, Judged]]) -> bool:
    """Whether a figure that can be compared has no word yet."""
    return any(one.verdict == "inconclusive" for arms in judged.values() for one in arms.values())


def per_request(
    frames: Sequence[tuple[pd.DataFrame, pd.DataFrame]], column: str, confidence: float
) -> dict[str, Any]:
    """The same request with the reference and with the arm, a pair of frames for each round: by how many ms
    the arm takes longer. The median over requests is one figure a round, and the interval is over rounds:
    requests of one pass wait for each other and are no independent samples. faster: share of the requests
    that the arm answered sooner."""
    medians, faster, count = [], [], 0
    for first, second in frames:
        columns = ["id", column]
        pair = first.loc[first["outcome"] == "completed", columns].merge(
            second.loc[second["outcome"] == "completed", columns], on="id"
        )
        difference = (pair[f"{column}_y"] - pair[f"{column}_x"]).dropna().to_numpy()
        if difference.size:
            medians.append(float(np.median(difference)))
            faster.append(float((difference < 0).mean()))
            count += difference.size
    if not medians:
        return {"n": 0, "median_ms": None, "low_ms": None, "high_ms": None, "faster": None}
    middle = float(np.mean(medians))
    half = half_width(medians, confidence) if len(medians) > 1 else None
    return {
        "n": count,
        "median_ms": middle,
        "low_ms": None if half is None else middle - half,
        "high_ms": None if half is None else middle + half,
        "faster": float(np.mean(faster)),
    }


def trend(rounds: Sequence[Figures], path: str, confidence: float) -> dict[str, float] | None:
    """By which factor a figure changed from the first pass to the last, whatever the arm: a straight line
    through the logarithms of all passes, each less the mean of its arm. The order of the arms is balanced, so
    that it is no difference between them. None: fewer figures than it takes."""
    rows = [
        (place, name, math.log(value))
        for place, (name, value) in enumerate(
            (name, number_at(summary, path)) for figures in rounds for name, summary in figures.items()
        )
        if value is not None and 0 < value < math.inf
    ]
    names = sorted({name for _, name, _ in rows})
    degrees = len(rows) - len(names) - 1
    if degrees < 1:
        return None
    x, y = np.array([row[0] for row in rows], dtype=float), np.array([row[2] for row in rows])
    for name in names:
        mine = np.array([row[1] == name for row in rows])
        x[mine] -= x[mine].mean()
        y[mine] -= y[mine].mean()
    spread = float(x @ x)
    if spread == 0:
        return None
    slope = float(x @ y) / spread
    error = math.sqrt(max(0.0, float(((y - slope * x) ** 2).sum())) / degrees / spread)
    span = rows[-1][0] - rows[0][0]
    half = t_quantile(degrees, confidence) * error
    low, middle, high = (math.exp(_bounded(span * (slope + d))) for d in (-half, 0.0, half))
    return {"ratio": middle, "low": low, "high": high}


def times(ratio: float | None) -> str:
    """A ratio for people, with two significant digits below 1."""
    return f"{ratio:.2g}x" if ratio is not None and ratio < 0.995 else f"{number(ratio)}x"


def _bounded(value: float) -> float:
    return min(max(value, -700.0), 700.0)


def sentence(
    judged: Mapping[str, Mapping[str, Judged]], metrics: Sequence[Metric], reference: str, arms: Sequence[str]
) -> str:
    """Who wins on what, in one line."""
    return f"Against {reference}, {'; '.join(_about(arm, judged, metrics) for arm in arms)}."


def _about(arm: str, judged: Mapping[str, Mapping[str, Judged]], metrics: Sequence[Metric]) -> str:
    told: dict[str, list[str]] = {"better": [], "worse": [], "same": [], "inconclusive": []}
    for metric in metrics:
        one = judged[metric.path][arm]
        if one.verdict is None:
            continue
        if one.verdict == "inconclusive":
            needed = f" (about {one.needed} rounds would tell)" if one.needed else ""
            told[one.verdict].append(metric.name + needed)
        elif one.verdict == "same":
            told[one.verdict].append(metric.name)
        else:
            told[one.verdict].append(f"{metric.name} ({times(one.effect.ratio)})")
    parts = [
        f"{words} {', '.join(told[word])}"
        for word, words in (
            ("better", "better on"),
            ("worse", "worse on"),
            ("same", "the same on"),
            ("inconclusive", "undecided on"),
        )
        if told[word]
    ]
    return f"{arm} is {', '.join(parts) or 'not to be compared: it has no figures'}"
