"""Percentiles with an interval that says how far they can be trusted.

Percentiles interpolate linearly between order statistics (Hyndman & Fan 1996, type 7). Their 95 % interval
is distribution-free and equal-tailed: the order statistics whose ranks bracket the binomial number of
samples below the true percentile (David & Nagaraja, Order Statistics, 2003, section 7.1). A sample that is
too small to have such an interval (no order statistic is surely above the percentile) makes the figure
unreliable: n < 6 for p50, 36 for p90, 72 for p95, 368 for p99.

Pooled gaps are not independent, so that interval would be too narrow for them: theirs comes from a
bootstrap that draws whole requests.

`slo.percentile_floor=mlperf` asks for more (MLPerf's early-stopping floors at 99 % confidence, with room for
one sample over the limit): p50 11, p90 64, p95 130, p97 219, p99 662, p99.9 6,636."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr

Floats = NDArray[np.float64]

LEVELS: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
ALPHA = 0.05
BOOTSTRAP_DRAWS = 200
BOOTSTRAP_CUTS = 2500
BOOTSTRAP_SEED = 20_240_229  # fixed: rebuilding a report gives the same bits
MIN_BOOTSTRAP_REQUESTS = 20
"""Below this many requests a bootstrap over requests covers too rarely to be shown as 95 %."""

FLOOR_RULES = ("interval", "mlperf")
MLPERF_ALPHA = 0.01

FIGURES = ("n", "mean", "p50", "p90", "p95", "p99", "max")


@lru_cache(maxsize=4096)
def interval_ranks(n: int, q: float, alpha: float = ALPHA) -> tuple[int, int] | None:
    """1-based ranks (l, u) with P(X(l) <= percentile <= X(u)) >= 1 - alpha and at most alpha/2 missed on
    each side. None when n samples hold no such pair. q in (0, 1)."""
    if n < 1:
        return None
    below = bdtr(np.arange(n, dtype=np.float64), n, q)  # below[k] = P(Binomial(n, q) <= k), k = 0..n-1
    lower = int(np.searchsorted(below, alpha / 2, side="right"))  # largest l with P(B <= l-1) <= alpha/2
    above = 1.0 - below  # above[k] = P(B >= k+1)
    good = np.nonzero(above <= alpha / 2)[0]  # u = k + 1
    if lower < 1 or good.size == 0:
        return None
    return lower, int(good[0]) + 1


@lru_cache(maxsize=64)
def floor_samples(q: float, alpha: float = ALPHA) -> int:
    """The smallest sample with an interval at q: from it on, percentile q is reliable."""
    smallest = max(q, 1.0 - q)  # the tail that runs out of order statistics first
    n = max(1, math.ceil(math.log(alpha / 2) / math.log(smallest)) - 1)
    while interval_ranks(n, q, alpha) is None:
        n += 1
    return n


@lru_cache(maxsize=64)
def mlperf_floor(q: float, alpha: float = MLPERF_ALPHA) -> int:
    """The smallest sample in which one value over a limit still shows that its share is below 1 - q:
    P(Binomial(n, 1 - q) <= 1) <= alpha (MLCommons endpoints, docs/early_stopping.md)."""
    n = 1
    while bdtr(1.0, n, 1.0 - q) > alpha:
        n += max(1, n // 200)
    while n > 1 and bdtr(1.0, n - 1, 1.0 - q) <= alpha:
        n -= 1
    return n


def requests_needed(percentiles: Iterable[str | float], rule: str = "interval") -> int:
    """How many requests a run must complete for all these percentiles ("p99", "p99.9" or 0.99) to be
    reliable. Raises ValueError for an unknown rule or a percentile outside (0, 1)."""
    if rule not in FLOOR_RULES:
        raise ValueError(f"slo.percentile_floor={rule}: unknown; choose from {', '.join(FLOOR_RULES)}")
    floor = floor_samples if rule == "interval" else mlperf_floor
    needed = 0
    for name in percentiles:
        q = round(float(name[1:]) / 100, 9) if isinstance(name, str) else float(name)
        if not 0 < q < 1:
            raise ValueError(f"percentile {name}: outside (0, 1); a name is p99, a number 0.99")
        needed = max(needed, floor(q))
    return needed


def hold_to_floor(value: Any, rule: str) -> None:
    """Make every percentile below the rule's floor unreliable, in all blocks inside value (in place)."""
    if rule != "mlperf" or not isinstance(value, dict):
        return
    reliable, n = value.get("reliable"), value.get("n")
    if isinstance(reliable, dict) and isinstance(n, int):
        for name in reliable:
            if reliable[name] and n < requests_needed((name,), rule):
                reliable[name] = False
                value["ci95"][name] = None
        return
    for item in value.values():
        hold_to_floor(item, rule)


def share_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n independent trials (Wilson 1927); n >= 1."""
    z2 = 1.959964**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return centre - half, centre + half


def empty_block() -> dict[str, Any]:
    """The figures of something that was not measured: every one is null."""
    return {
        "n": 0,
        **dict.fromkeys(FIGURES[1:]),
        "ci95": dict.fromkeys(LEVELS),
        "reliable": dict.fromkeys(LEVELS, False),
    }


def describe(values: Sequence[float] | Floats) -> dict[str, Any]:
    """n, mean, p50..p99, max, ci95 and reliable of independent samples; non-finite ones are not samples."""
    data = np.asarray(values, dtype=np.float64)
    data = np.sort(data[np.isfinite(data)])
    if data.size == 0:
        return empty_block()
    block = empty_block()
    block["n"] = int(data.size)
    block["mean"] = float(data.mean())
    block["max"] = float(data[-1])
    for name, q in LEVELS.items():
        block[name] = float(np.quantile(data, q))
        ranks = interval_ranks(int(data.size), q)
        if ranks is not None:
            block["ci95"][name] = [float(data[ranks[0] - 1]), float(data[ranks[1] - 1])]
            block["reliable"][name] = True
    return block


def describe_censored(values: Sequence[float] | Floats) -> dict[str, Any]:
    """Like `describe`, but infinite samples count: nearest-rank percentiles, null where the answer is
    infinite.

    An infinite end of an interval is null too (nothing bounds it), and so are mean and max."""
    data = np.asarray(values, dtype=np.float64)
    data = np.sort(data[~np.isnan(data)])
    if data.size == 0:
        return empty_block()
    block = empty_block()
    n = int(data.size)
    block["n"] = n
    block["mean"] = _finite(float(data.mean()))
    block["max"] = _finite(float(data[-1]))
    for name, q in LEVELS.items():
        block[name] = _finite(float(data[max(0, math.ceil(q * n) - 1)]))
        ranks = interval_ranks(n, q)
        if ranks is not None:
            block["ci95"][name] = [_finite(float(data[rank - 1])) for rank in ranks]
            block["reliable"][name] = True
    return block


def weighted_quantiles(values: Floats, weights: Floats, qs: Sequence[float]) -> list[float]:
    """Linear-interpolation percentiles of a multiset given as sorted values with whole-number weights."""
    ends = weights.cumsum()
    positions = np.asarray(qs) * (ends[-1] - 1)
    lows = np.floor(positions)
    left = values[ends.searchsorted(lows, side="right")]
    right = values[ends.searchsorted(np.minimum(lows + 1, ends[-1] - 1), side="right")]
    return (left + (right - left) * (positions - lows)).tolist()


def describe_pooled(
    values: Floats, owners: NDArray[np.int64], counts: Floats | None = None
) -> dict[str, Any]:
    """Figures of gaps pooled over requests. values[i] occurs counts[i] times (default 1) in request
    owners[i].

    The intervals come from BOOTSTRAP_DRAWS resamplings of whole requests with a fixed seed. A percentile is
    reliable when both the gaps (floor of `describe`) and the requests (MIN_BOOTSTRAP_REQUESTS) suffice."""
    weights = np.ones(values.size) if counts is None else np.asarray(counts, dtype=np.float64)
    keep = np.isfinite(values) & (weights > 0)
    values, weights, owners = values[keep], weights[keep], owners[keep]
    if values.size == 0:
        return empty_block()
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    _, owner = np.unique(owners[order], return_inverse=True)
    requests = int(owner.max()) + 1
    total = int(weights.sum())
    block = empty_block()
    block["n"] = total
    block["mean"] = float(np.average(values, weights=weights))
    block["max"] = float(values[-1])
    names, qs = list(LEVELS), list(LEVELS.values())
    for name, figure in zip(names, weighted_quantiles(values, weights, qs), strict=True):
        block[name] = figure
    reliable = [
        name for name, q in LEVELS.items() if requests >= MIN_BOOTSTRAP_REQUESTS and total >= floor_samples(q)
    ]
    if reliable:
        draws = bootstrap_quantiles(values, weights, owner, qs)
        low, high = np.quantile(draws, [ALPHA / 2, 1 - ALPHA / 2], axis=0)
        for i, name in enumerate(names):
            if name in reliable:
                block["ci95"][name] = [float(low[i]), float(high[i])]
                block["reliable"][name] = True
    return block


def bootstrap_quantiles(
    values: Floats, weights: Floats, owner: NDArray[np.int64], qs: Sequence[float]
) -> Floats:
    """Percentiles of BOOTSTRAP_DRAWS resamplings of whole requests: [draws, len(qs)].

    values are sorted; owner counts from 0 without holes. Beyond BOOTSTRAP_CUTS values the answer is rounded
    up to a cut, so that a draw costs a row of a matrix product and not a pass over all: an equal part of
    the cuts lies within five standard errors (of wholly dependent gaps, the worst case) of each percentile,
    the rest at equal steps of rank."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    requests = int(owner.max()) + 1
    ends = weights.cumsum()
    cuts = np.arange(values.size)
    if values.size > BOOTSTRAP_CUTS:
        few = BOOTSTRAP_CUTS // (len(qs) + 1)
        near = [5 * math.sqrt(q * (1 - q) / requests) for q in qs]
        grids = [np.linspace(max(0.0, q - w), min(1.0, q + w), few) for q, w in zip(qs, near, strict=True)]
        steps = np.concatenate([np.linspace(0, 1, few), *grids]) * ends[-1]
        cuts = np.unique(np.minimum(ends.searchsorted(steps), values.size - 1))
    cell = cuts.searchsorted(np.arange(values.size))
    times = np.stack(
        [
            np.bincount(rng.integers(0, requests, requests), minlength=requests).astype(np.float64)
            for _ in range(BOOTSTRAP_DRAWS)
        ]
    )
    mass = np.zeros((BOOTSTRAP_DRAWS, cuts.size))
    block = max(1, 4_000_000 // cuts.size)  # requests at a time: 32 MB
    for first in range(0, requests, block):
        count = min(block, requests - first)
        mine = (owner >= first) & (owner < first + count)
        index = (owner[mine] - first) * cuts.size + cell[mine]
        held = np.bincount(index, weights=weights[mine], minlength=count * cuts.size)
        mass += times[:, first : first + count] @ held.reshape(count, cuts.size)
    mass = mass.cumsum(axis=1)
    ranks = [np.floor(q * (mass[:, -1:] - 1)) for q in qs]
    return np.stack([values[cuts[(mass <= rank).sum(axis=1)]] for rank in ranks], axis=1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
