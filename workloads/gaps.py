"""Gaps of mean 1 between arrivals: the renewal processes that a workload can choose.

The first k gaps do not depend on how many follow: a gamma's rejections have a fixed supply of candidates
each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln

from workloads import exact

RENEWALS = ("poisson", "gamma", "weibull", "constant")
_CANDIDATES = 6  # of a gamma draw: all are refused once in 10^8 draws
_SMALLEST = 1e-300  # of a uniform: log(0) has no value


@dataclass(frozen=True, slots=True)
class Renewal:
    """kind: one of RENEWALS; cv: coefficient of variation of the gaps of gamma and weibull, 1: Poisson."""

    kind: str
    cv: float = 1.0


def unit_gaps(rng: np.random.Generator, renewal: Renewal, n: int) -> np.ndarray:
    """n gaps of mean 1, float64, shape (n,)."""
    if renewal.kind == "constant":
        return np.ones(n)
    if renewal.kind == "gamma":
        return _gamma(rng, round(1 / renewal.cv**2, 12), n)
    exponential = -exact.log(np.maximum(1 - rng.random(n), _SMALLEST))
    if renewal.kind == "poisson":
        return exponential
    shape = weibull_shape(renewal.cv)
    mean = round(math.exp(gammaln(1 + 1 / shape)), 12)
    return exact.power(np.maximum(exponential, _SMALLEST), 1 / shape) / mean


def weibull_shape(cv: float) -> float:
    """The shape k of a Weibull with this coefficient of variation: Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 = 1 +
    cv^2."""

    def miss(log_shape: float) -> float:
        k = math.exp(log_shape)
        return float(gammaln(1 + 2 / k) - 2 * gammaln(1 + 1 / k)) - math.log1p(cv**2)

    return round(math.exp(brentq(miss, math.log(0.05), math.log(2000.0), xtol=1e-12)), 9)


def _gamma(rng: np.random.Generator, shape: float, n: int) -> np.ndarray:
    """Marsaglia and Tsang 2000, "A simple method for generating gamma variables", divided by the mean.
    Below a shape of 1: one of shape + 1 times u^(1 / shape)."""
    u = rng.random((n, 2 * _CANDIDATES + 1))
    boosted = shape < 1
    d = (shape + 1 if boosted else shape) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    gamma = np.full(n, d)
    open_ = np.arange(n)
    for k in range(_CANDIDATES):
        x = exact.normal_quantile(u[open_, 2 * k])
        root = 1 + c * x
        v = root * root * root
        fits = v > 0
        log_v = exact.log(np.where(fits, v, 1.0))
        log_u = exact.log(np.maximum(u[open_, 2 * k + 1], _SMALLEST))
        taken = fits & (log_u < 0.5 * x * x + d - d * v + d * log_v)
        gamma[open_[taken]] = d * v[taken]
        open_ = open_[~taken]
        if not len(open_):
            break
    if boosted:
        gamma = gamma * exact.power(np.maximum(u[:, -1], _SMALLEST), 1 / shape)
    return gamma / shape
