"""Fitting a trace: lognormal lengths and gamma gaps, with the distance between fit and data.

KS is the largest distance between the two distribution functions (Kolmogorov-Smirnov): below 0.02 a fit may
stand for its data; lengths of real traffic have several modes, and one lognormal often misses by 0.05 to
0.25.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import digamma, gammainc, ndtr, polygamma

from workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class LognormalFit:
    """Maximum likelihood: mean and standard deviation of ln x."""

    mu: float
    sigma: float
    ks: float


@dataclass(frozen=True, slots=True)
class GammaFit:
    """Maximum likelihood over the gaps above 0; cv is that of all gaps. None: no gamma to fit."""

    rate: float | None  # 1/s
    cv: float | None
    shape: float | None
    ks: float | None
    dispersion: dict[float, float]  # window in seconds: variance over mean of counts, 1 for a Poisson process


@dataclass(frozen=True, slots=True)
class TraceFit:
    rows: int
    span_s: float
    input: LognormalFit
    output: LognormalFit
    arrivals: GammaFit


def fit_trace(trace: Trace) -> TraceFit:
    """Fit the two lengths and the gaps of a trace."""
    times = trace.times_s()
    return TraceFit(
        rows=len(trace),
        span_s=float(times[-1]),
        input=fit_lognormal(trace.input_tokens),
        output=fit_lognormal(trace.output_tokens),
        arrivals=fit_gaps(times),
    )


def fit_lognormal(values: np.ndarray) -> LognormalFit:
    """values are whole numbers above 0, shape (n,); KS is taken half a token up, where rounding puts the
    edge."""
    logs = np.log(values)
    mu, sigma = float(logs.mean()), float(logs.std())
    if sigma == 0:
        return LognormalFit(mu, 0.0, 0.0)
    steps, counts = np.unique(values, return_counts=True)
    below = np.cumsum(counts) / len(values)
    model = ndtr((np.log(steps + 0.5) - mu) / sigma)
    model_low = ndtr((np.log(steps - 0.5) - mu) / sigma)
    ks = max(np.abs(model - below).max(), np.abs(model_low - (below - counts / len(values))).max())
    return LognormalFit(mu, sigma, float(ks))


def fit_gaps(times: np.ndarray) -> GammaFit:
    """times in seconds, sorted, shape (n,)."""
    gaps = np.diff(times)
    dispersion = {w: d for w in (1.0, 10.0, 60.0) if (d := index_of_dispersion(times, w)) is not None}
    positive = gaps[gaps > 0]
    mean = float(gaps.mean()) if len(gaps) else 0.0
    cv = float(gaps.std() / mean) if mean > 0 else None
    # Stamps on a coarse grid: most gaps are 0 and the rest one step, which no gamma describes.
    if len(positive) < 0.5 * len(gaps) or len(positive) < 2 or np.ptp(positive) == 0:
        return GammaFit(1 / mean if mean > 0 else None, cv, None, None, dispersion)
    shape = _gamma_shape(positive)
    ordered = np.sort(positive)
    model = gammainc(shape, shape * ordered / positive.mean())
    ranks = np.arange(1, len(ordered) + 1) / len(ordered)
    ks = float(max(np.abs(model - ranks).max(), np.abs(model - (ranks - 1 / len(ordered))).max()))
    return GammaFit(1 / mean, cv, shape, ks, dispersion)


def index_of_dispersion(times: np.ndarray, window_s: float) -> float | None:
    """Variance over mean of the counts in whole windows; None with fewer than 5 windows."""
    windows = int(times[-1] // window_s) if len(times) else 0
    if windows < 5:
        return None
    index, counts = np.unique(times // window_s, return_counts=True)  # a trace may have gaps of years
    counts = counts[index < windows].astype(float)
    mean = counts.sum() / windows
    return float((np.square(counts).sum() / windows - mean**2) / mean)


def _gamma_shape(gaps: np.ndarray) -> float:
    # Newton's steps on ln(k) - digamma(k) = ln(mean) - mean(ln) (Minka, "Estimating a Gamma distribution").
    s = float(np.log(gaps.mean()) - np.log(gaps).mean())
    k = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for _ in range(50):
        step = (np.log(k) - digamma(k) - s) / (1 / k - polygamma(1, k))
        k = max(k - step, k / 10)
        if abs(step) < 1e-10 * k:
            break
    return float(k)
