"""Length distributions, each as its quantile function: from shares u in (0, 1) to tokens (real numbers,
unrounded).

One uniform number a draw keeps sub-streams aligned, makes every distribution easy to check against its
table, and lets answers be rank-correlated with prompts (`correlate`) whatever the two distributions are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from workloads import exact
from workloads.errors import WorkloadError
from workloads.settings import Settings
from workloads.tables import load_table

Quantile = Callable[[np.ndarray], np.ndarray]

DISTRIBUTIONS = ("constant", "discrete", "lognormal", "mixture", "quantiles")
MOST_TOKENS = 1e15  # beyond it lengths would overflow when they are added up
_GRID = 1 << 13  # points of a mixture's distribution function


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
        edges = np.cumsum(self.weights)
        index = np.searchsorted(edges / edges[-1], np.asarray(u), side="right")
        return np.asarray(self.values)[np.minimum(index, len(self.values) - 1)]


@dataclass(frozen=True, slots=True)
class Lognormal:
    mu: float  # mean of ln tokens
    sigma: float

    def __call__(self, u: np.ndarray) -> np.ndarray:
        # Infinite where it overflows: `scaled` refuses it, a `max` may cut it.
        return exact.exp(self.mu + self.sigma * exact.normal_quantile(u))


@dataclass(frozen=True, slots=True)
class LognormalMixture:
    """Parts (weight, mu, sigma). Its quantile has no closed form: the distribution function on a grid of
    normal scores from part to part, read backwards."""

    parts: tuple[tuple[float, float, float], ...]

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return exact.exp(exact.interpolate(u, *_mixture_table(self.parts)))


@lru_cache(maxsize=64)
def _mixture_table(parts: tuple[tuple[float, float, float], ...]) -> tuple[np.ndarray, np.ndarray]:
    """(shares below, ln tokens), both rising."""
    scores = np.linspace(-7.1, 7.1, _GRID // len(parts))
    grid = np.unique(np.concatenate([mu + sigma * scores for _, mu, sigma in parts]))
    below = np.zeros_like(grid)
    for weight, mu, sigma in parts:
        below += weight * exact.normal_share((grid - mu) / sigma)
    rises = np.concatenate([[True], np.diff(below) > 0])
    total = math.fsum(weight for weight, _, _ in parts)
    return below[rises] / total, grid[rises]


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """Points (percentile, tokens), joined by straight lines; beyond the first and last it is flat."""

    percentiles: tuple[float, ...]
    tokens: tuple[float, ...]

    def __call__(self, u: np.ndarray) -> np.ndarray:
        points, values = np.asarray(self.percentiles), np.asarray(self.tokens)
        return exact.interpolate(np.asarray(u) * 100, points, values)


@dataclass(frozen=True, slots=True)
class Clipped:
    inner: Quantile
    least: float
    most: float

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return np.clip(self.inner(u), self.least, self.most)


@dataclass(frozen=True, slots=True)
class Citations:
    """Markers of `tokens` in an answer, one for each `per` tokens of its text, to the nearest whole."""

    tokens: float = 0.0
    per: float = 1.0

    def cited(self, text_tokens: np.ndarray) -> np.ndarray:
        return text_tokens + self.tokens * np.rint(text_tokens / self.per) if self.tokens else text_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of answers, given their prompts': independent of them, rank-correlated, or by a table of
    their own for each range of prompts (`joint`; edges: the prompts, before length_scale, at which the next
    table begins)."""

    tables: tuple[Quantile, ...]
    edges: tuple[float, ...] = ()
    spearman: float = 0.0
    citations: Citations = Citations()

    def draw(self, u: np.ndarray, prompt_tokens: np.ndarray) -> np.ndarray:
        """u: shares in (0, 1); prompt_tokens before length_scale; both of shape (n,)."""
        return self.citations.cited(self._text(u, prompt_tokens))

    def _text(self, u: np.ndarray, prompt_tokens: np.ndarray) -> np.ndarray:
        if not self.edges:
            return self.tables[0](correlate(u, prompt_tokens, self.spearman))
        which = np.searchsorted(np.asarray(self.edges), prompt_tokens, side="right")
        tokens = np.empty(len(u))
        for number, table in enumerate(self.tables):
            here = which == number
            tokens[here] = table(u[here])
        return tokens

    def p99(self) -> float:
        """Of all answers, where every range of prompts is as frequent as the others."""
        u = np.array([0.99]) if not self.edges else (np.arange(2000) + 0.5) / 2000
        text = np.sort(np.concatenate([table(u) for table in self.tables]))
        at = 0 if not self.edges else int(0.99 * len(text))
        return float(self.citations.cited(text[at : at + 1])[0])


def read_answer(node: Settings) -> Answer:
    """The `output` node of a class."""
    citations = Citations()
    if "citations" in node and node.get("citations") is not None:
        marker = node.node("citations", "{tokens: 8, per: 70}")
        marker.only("tokens", "per")
        citations = Citations(marker.number("tokens", least=0), marker.number("per", least=1))
    if node.choice("dist", (*DISTRIBUTIONS, "joint")) == "joint":
        node.only("dist", "table", "edges", "points", "min", "max", "citations")
        source = node if "table" not in node else load_table(node, "joint")
        edges = source.numbers("edges")
        if any(a >= b for a, b in pairwise(edges)):
            raise source.error("edges", "needs rising numbers of prompt tokens")
        rows = source.get("points")
        if not isinstance(rows, Sequence) or len(rows) != len(edges) + 1:
            message = f"needs {len(edges) + 1} tables of [percentile, tokens]: one for each range"
            raise source.error("points", message)
        tables = []
        for number, points in enumerate(rows):
            one = Settings({"points": points}, f"{source.name}.points[{number}]")
            tables.append(_clipped(node, _quantile_table(one)))
        return Answer(tuple(tables), tuple(edges), citations=citations)
    spearman = node.number("correlation") if "correlation" in node else 0.0
    if not -1 <= spearman <= 1:
        raise node.error("correlation", "needs a rank correlation, -1 to 1")
    alone = read_distribution(node, "correlation", "citations")
    return Answer((alone,), spearman=spearman, citations=citations)


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
        node.only(*common, "points", "table")
        inner = _quantile_table(node if "table" not in node else load_table(node))
    return _clipped(node, inner)


def _quantile_table(node: Settings) -> QuantileTable:
    percentiles, tokens = zip(*node.table("points", 2), strict=True)
    rising = all(a < b for a, b in pairwise(percentiles))
    sorted_tokens = list(tokens) == sorted(tokens) and min(tokens) >= 0
    if not rising or not sorted_tokens or percentiles[0] < 0 or percentiles[-1] > 100:
        raise node.error("points", "needs rows of percentile (0 to 100, rising) and tokens (not falling)")
    return QuantileTable(percentiles, tokens)


def _clipped(node: Settings, inner: Quantile) -> Quantile:
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
    scores = exact.normal_quantile((ranks + 0.5) / len(u))
    r = round(2 * math.sin(math.pi * spearman / 6), 12)  # the same everywhere, unlike its last bits
    return exact.normal_share(r * scores + math.sqrt(1 - r * r) * exact.normal_quantile(u))


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
