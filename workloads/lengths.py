"""Length distributions, each as its quantile function: from shares u in (0, 1) to tokens (real numbers,
unrounded).

One uniform number a draw keeps sub-streams aligned, makes every distribution easy to check against its
table, and lets answers be rank-correlated with prompts (`correlate`) whatever the two distributions are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import ndtr, ndtri

from workloads.errors import WorkloadError
from workloads.settings import Settings

Quantile = Callable[[np.ndarray], np.ndarray]

DISTRIBUTIONS = ("constant", "discrete", "lognormal", "mixture", "quantiles")
MOST_TOKENS = 1e15  # beyond it lengths would overflow when they are added up
_TINY = 1e-12  # keeps u away from 0 and 1, where a lognormal is 0 or infinite


@dataclass(frozen=True, slots=True)
class Constant:
    tokens: float

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return np.full(np.shape(u), self.tokens, dtype=float)


@dataclass(frozen=True, slots=True)
class Discrete:
    """Given values with given weights (which need not sum to 1), in the given order."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def __call__(self, u: np.ndarray) -> np.ndarray:
        edges = np.cumsum(self.weights) / np.sum(self.weights)
        index = np.searchsorted(edges, np.asarray(u), side="right")
        return np.asarray(self.values)[np.minimum(index, len(self.values) - 1)]


@dataclass(frozen=True, slots=True)
class Lognormal:
    mu: float  # mean of ln tokens
    sigma: float

    def __call__(self, u: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # infinite: `scaled` refuses it, a `max` may cut it
            return np.exp(self.mu + self.sigma * ndtri(np.clip(u, _TINY, 1 - _TINY)))


@dataclass(frozen=True, slots=True)
class LognormalMixture:
    """Parts (weight, mu, sigma); its quantile has no closed form and is found by bisection in ln tokens."""

    parts: tuple[tuple[float, float, float], ...]

    def cdf(self, log_tokens: np.ndarray) -> np.ndarray:
        total = sum(w for w, _, _ in self.parts)
        shares = [(w / total) * ndtr((log_tokens - mu) / sigma) for w, mu, sigma in self.parts]
        return np.sum(shares, axis=0)

    def __call__(self, u: np.ndarray) -> np.ndarray:
        u = np.clip(np.asarray(u, dtype=float), _TINY, 1 - _TINY)
        # At one share, a mixture's quantile lies between those of its parts.
        ends = np.array([mu + sigma * ndtri(u) for _, mu, sigma in self.parts])
        low, high = ends.min(axis=0), ends.max(axis=0)
        for _ in range(50):
            middle = (low + high) / 2
            below = self.cdf(middle) < u
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        with np.errstate(over="ignore"):
            return np.exp((low + high) / 2)


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """Points (percentile, tokens), joined by straight lines; beyond the first and last it is flat."""

    percentiles: tuple[float, ...]
    tokens: tuple[float, ...]

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return np.interp(np.asarray(u) * 100, self.percentiles, self.tokens)


@dataclass(frozen=True, slots=True)
class Clipped:
    inner: Quantile
    least: float
    most: float

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return np.clip(self.inner(u), self.least, self.most)


def distribution_at(node: Settings, key: str) -> Quantile:
    """The distribution under a key of a node."""
    return read_distribution(node.node(key, "{dist: constant, value: 3}"))


def read_distribution(node: Settings, *extra: str) -> Quantile:
    """The distribution that a node names by `dist`, with its parameters and optional `min`, `max`. `extra`
    are keys of the same node that somebody else reads."""
    kind = node.choice("dist", DISTRIBUTIONS)
    common = ("dist", "min", "max", *extra)
    inner: Quantile
    if kind == "constant":
        node.only(*common, "tokens", "value")  # the same; `value` where it is no number of tokens
        inner = Constant(node.number("value" if "value" in node else "tokens", least=0))
    elif kind == "discrete":
        node.only(*common, "values", "weights")
        values, weights = node.numbers("values"), node.numbers("weights")
        if len(values) != len(weights) or min(weights) < 0 or sum(weights) <= 0:
            raise node.error("weights", "needs one weight of 0 or more for each value, not all 0")
        if min(values) < 0:
            raise node.error("values", "needs numbers of 0 or more")
        inner = Discrete(tuple(values), tuple(weights))
    elif kind == "lognormal":
        node.only(*common, "mu", "sigma")
        inner = Lognormal(node.number("mu"), node.number("sigma", least=0))
    elif kind == "mixture":
        node.only(*common, "parts")
        parts = tuple((w, mu, sigma) for w, mu, sigma in node.table("parts", 3))
        if any(w <= 0 or sigma <= 0 for w, _, sigma in parts):
            raise node.error("parts", "needs rows of weight, mu, sigma with weight and sigma above 0")
        inner = LognormalMixture(parts)
    else:
        node.only(*common, "points")
        points = node.table("points", 2)
        percentiles, tokens = zip(*points, strict=True)
        rising = all(a < b for a, b in pairwise(percentiles))
        sorted_tokens = list(tokens) == sorted(tokens) and min(tokens) >= 0
        if not rising or not sorted_tokens or percentiles[0] < 0 or percentiles[-1] > 100:
            raise node.error("points", "needs rows of percentile (0 to 100, rising) and tokens (not falling)")
        inner = QuantileTable(percentiles, tokens)
    if "min" not in node and "max" not in node:
        return inner
    least = node.number("min", least=0) if "min" in node else 0.0
    most = node.number("max", least=least) if "max" in node else np.inf
    return Clipped(inner, least, most)


def correlate(u: np.ndarray, beside: np.ndarray, spearman: float) -> np.ndarray:
    """Shares in (0, 1) that keep the distribution of `u` but have the given rank correlation with `beside`.

    A Gaussian copula over the ranks of `beside`: Pearson's r of the normal scores is 2 sin(pi rho / 6).
    """
    if spearman == 0 or len(u) < 2:
        return u
    ranks = np.empty(len(u))
    ranks[np.argsort(beside, kind="stable")] = np.arange(len(u))
    scores = ndtri((ranks + 0.5) / len(u))
    r = 2 * np.sin(np.pi * spearman / 6)
    return ndtr(r * scores + np.sqrt(1 - r * r) * ndtri(np.clip(u, _TINY, 1 - _TINY)))


def scaled(tokens: np.ndarray | float, length_scale: float) -> np.ndarray:
    """Whole tokens, at least 1, of real lengths times `length_scale`. Raises WorkloadError for a length over
    MOST_TOKENS."""
    lengths = np.asarray(tokens, dtype=float) * length_scale
    if lengths.size and not lengths.max() <= MOST_TOKENS:
        raise WorkloadError(
            f"workload.length_scale={length_scale:g}: makes a length of {lengths.max():.3g} tokens, the most "
            f"is {MOST_TOKENS:g}; lower it, or give the distribution a max"
        )
    return np.maximum(1, np.rint(lengths)).astype(np.int64)
