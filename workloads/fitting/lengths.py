"""Lengths: 101-point quantile tables, and the answers by ranges of prompts.

Lengths of real traffic have several modes; one lognormal misses them by a KS distance of 0.04 to 0.26, a
table of quantiles by its rounding. Answers depend on prompts in ways that no correlation says (jobs of
fixed forms), so they get a table for each decile of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.lengths import Answer, QuantileTable
from workloads.trace import Trace

PERCENTILES = np.arange(101)
OF_ANSWERS = np.array([0, 1, 2, 5, *range(10, 91, 5), 95, 98, 99, 100])
RANGES = 10
_ROWS_FOR_JOINT = 400  # fewer have no answers to tell apart


@dataclass(frozen=True, slots=True)
class LengthFit:
    """Points are [percentile, tokens]."""

    input: list[list[float]]
    output: list[list[float]]
    edges: list[float]  # prompts at which the next table of answers begins; empty: one table
    joint: list[list[list[float]]]
    spearman: float | None  # of the trace

    def answer(self) -> Answer:
        if not self.edges:
            return Answer((_table(self.output),))
        return Answer(tuple(map(_table, self.joint)), tuple(self.edges))


def fit_lengths(trace: Trace) -> LengthFit:
    """The tables of a trace."""
    prompts, answers = trace.input_tokens, trace.output_tokens
    edges: list[float] = []
    joint: list[list[list[float]]] = []
    if len(trace) >= _ROWS_FOR_JOINT:
        edges = sorted({float(e) for e in np.percentile(prompts, np.arange(1, RANGES) * 100 / RANGES)})
        edges = [e for e in edges if prompts.min() < e <= prompts.max()]
        which = np.searchsorted(edges, prompts, side="right")
        joint = [points(answers[which == k], OF_ANSWERS) for k in range(len(edges) + 1)]
    return LengthFit(points(prompts), points(answers), edges, joint, rank_correlation(prompts, answers))


def points(values: np.ndarray, percentiles: np.ndarray = PERCENTILES) -> list[list[float]]:
    """[[percentile, value], ...], values rounded to three digits behind the point."""
    found = np.percentile(values, percentiles) if len(values) else np.ones(len(percentiles))
    return [[_short(p), _short(round(float(v), 3))] for p, v in zip(percentiles, found, strict=True)]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Spearman's; None where one of them does not vary."""
    from scipy.stats import spearmanr

    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(spearmanr(x, y).statistic)


def ks_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance between the distribution functions of two samples (Kolmogorov-Smirnov)."""
    values = np.unique(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def _table(rows: list[list[float]]) -> QuantileTable:
    percentiles, tokens = zip(*rows, strict=True)
    return QuantileTable(percentiles, tokens)


def _short(value: float) -> float:
    return int(value) if float(value).is_integer() else float(value)
