"""Arrivals: a renewal process over a slowly swinging rate, or bursts and silences.

What tells traffic apart is the index of dispersion, variance over mean of the counts in windows, at several
window lengths: 1 everywhere for a Poisson process, the squared coefficient of variation of the gaps at
short windows, and growing with the window where the rate itself swings. The parameters are found from it,
not from the gaps alone: the gaps of a pooled service look Poisson while its counts in a minute swing by a
fifth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workloads.arrivals import draw_arrivals, read_arrivals
from workloads.settings import Settings

WINDOWS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
CHECKED = (1.0, 10.0, 60.0)
NEAR_S = 0.01  # requests of a cluster lie so near
_SILENCE = 0.5  # share of the seconds without a request, beyond what the rate explains, that makes on and off
_FEWEST_WINDOWS = 5
_TRIALS = 8


@dataclass(frozen=True, slots=True)
class ArrivalFit:
    """settings: the `arrivals` node of a preset. dispersion: of the trace, by window in s."""

    kind: str  # renewal | on_off | lengths_only | at_once
    rate: float | None
    settings: dict[str, Any]
    cv: float | None = None  # of all gaps
    dispersion: dict[float, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def fit_arrivals(times_s: np.ndarray) -> ArrivalFit:
    """times_s: seconds from the first arrival, not falling."""
    span = float(times_s[-1]) if len(times_s) else 0.0
    if len(times_s) < 2 or span <= 0:
        return ArrivalFit("at_once", None, _node("at_once"), notes=("all requests have one time",))
    rate = (len(times_s) - 1) / span
    gaps = np.diff(times_s)
    cv = float(gaps.std() / gaps.mean())
    dispersion = dispersions(times_s, WINDOWS)
    silent = _silent_seconds(times_s, span)
    if silent - math.exp(-rate) > _SILENCE and len(times_s) > 200 and cv > 2:
        return _on_off(times_s, rate, cv, dispersion)
    return _renewal(times_s, rate, cv, dispersion)


def dispersions(times_s: np.ndarray, windows: tuple[float, ...]) -> dict[float, float]:
    """By window in seconds, those that fit into the time often enough."""
    found = {w: index_of_dispersion(times_s, w) for w in windows}
    return {w: d for w, d in found.items() if d is not None}


def index_of_dispersion(times: np.ndarray, window_s: float) -> float | None:
    """Variance over mean of the counts in whole windows; None with fewer than 5 windows."""
    windows = int(times[-1] // window_s) if len(times) else 0
    if windows < _FEWEST_WINDOWS:
        return None
    index, counts = np.unique(times // window_s, return_counts=True)  # a trace may have gaps of years
    counts = counts[index < windows].astype(float)
    mean = counts.sum() / windows
    return float((np.square(counts).sum() / windows - mean**2) / mean) if mean else None


def _renewal(times_s: np.ndarray, rate: float, cv: float, dispersion: dict[float, float]) -> ArrivalFit:
    """IDC(w) = c + rate w s^2 h(w / tau), with c the squared variation of the local gaps and s^2 h the
    variance of the mean of exp(AR(1)) over a window: least squares of the logarithms over a grid of tau and
    cv."""
    notes = []
    windows = np.array(list(dispersion))
    wanted = np.maximum(np.array(list(dispersion.values())), 1e-3)  # equal gaps have none at all
    local = math.sqrt(max(wanted[0], 1e-4)) if len(wanted) else cv
    sigma2, tau_s, variation = 0.0, 420.0, local
    if len(windows) >= 3:
        best = math.inf
        weights = 1 / np.sqrt(windows)  # long windows are few, and their dispersion a guess
        for tau in np.geomspace(2.0, 3600.0, 46):
            slope = rate * windows * _window_share(windows / tau)
            for c in np.unique(
                np.clip(np.array([local, 0.9 * local, 0.8 * local, 1.0]) ** 2, 1e-3, wanted[0])
            ):
                for s2 in np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 60)]):
                    miss = float((weights * np.log((c + slope * s2) / wanted) ** 2).sum())
                    if miss < best:
                        best, sigma2, tau_s, variation = miss, s2, tau, math.sqrt(c)
    elif len(wanted) == 0:
        notes.append("too short for windows of a second: no swing of the rate was looked for")
    variation = round(min(max(variation, 0.05), 20.0), 3)
    settings = _node("poisson" if abs(variation - 1) < 0.02 else "gamma" if variation <= 1.5 else "weibull")
    settings["cv"] = variation
    if sigma2 > 0:
        # Var of exp(AR(1) - sigma^2/2) is e^(sigma^2) - 1.
        settings["factor"] = {
            "sigma": round(math.sqrt(math.log1p(sigma2)), 4),
            "tau_s": round(float(tau_s), 1),
        }
    return ArrivalFit("renewal", rate, settings, cv, dispersion, tuple(notes))


def _window_share(x: np.ndarray) -> np.ndarray:
    """Variance of the mean of an AR(1) of variance 1 over x times its memory."""
    return 2 * (x - 1 + np.exp(-x)) / x**2


def _on_off(times_s: np.ndarray, rate: float, cv: float, dispersion: dict[float, float]) -> ArrivalFit:
    """Bursts are cut at gaps of some seconds; their lengths and those of the silences become tables."""
    gaps = np.diff(times_s)
    border_s = max(1.0, 10 * float(np.median(gaps[gaps > NEAR_S])) if (gaps > NEAR_S).any() else 1.0)
    ends = np.flatnonzero(gaps > border_s)
    starts = np.concatenate([[0], ends + 1])
    lasts = np.concatenate([ends, [len(times_s) - 1]])
    on = np.maximum(times_s[lasts] - times_s[starts], 0.05)
    off = gaps[ends]
    near = float((gaps < NEAR_S).mean())
    settings = _node("poisson")
    settings["on_off"] = {"on_s": _table(on), "off_s": _table(off)}
    if near > 0.05:
        within = gaps[gaps < NEAR_S]
        settings["cluster"] = {
            "size": round(1 / (1 - near), 3),
            "within_s": round(max(float(within.mean()), 1e-5), 5),
        }
    swing = _swing_within(settings, rate, len(times_s), dispersion)
    if swing is not None:
        settings["factor"] = swing
    notes = (f"{len(on)} bursts, cut at gaps of {border_s:.1f} s",)
    return ArrivalFit("on_off", rate, settings, cv, dispersion, notes)


def _swing_within(
    settings: dict[str, Any], rate: float, n: int, dispersion: dict[float, float]
) -> dict[str, float] | None:
    """Bursts are not equally fast: the factor whose draws come nearest to the dispersions, by trial; None
    where none is nearer than without."""
    wanted = {w: dispersion[w] for w in CHECKED if w in dispersion}
    trials: list[dict[str, float] | None] = [None]
    trials += [
        {"sigma": sigma, "tau_s": tau_s}
        for sigma in (0.2, 0.35, 0.5, 0.7, 0.9)
        for tau_s in (3.0, 10.0, 30.0)
    ]

    def miss(factor: dict[str, float] | None) -> float:
        node = settings if factor is None else {**settings, "factor": factor}
        arrivals = read_arrivals(Settings(node, "workload.arrivals"))
        drawn = [
            draw_arrivals(seed, arrivals, rate=rate, requests=n, duration_s=None) for seed in range(_TRIALS)
        ]
        total = 0.0
        for window, value in wanted.items():
            found = [d for t in drawn if (d := index_of_dispersion(t - t[0], window)) is not None]
            total += abs(math.log(float(np.median(found)) / value)) if found else 0.0
        return total

    return min(trials, key=miss)


def _table(seconds: np.ndarray) -> dict[str, Any]:
    percentiles = np.array([0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100])
    values = np.maximum.accumulate(np.maximum(np.percentile(seconds, percentiles), 1e-3))
    rows = [[int(p), round(float(v), 3)] for p, v in zip(percentiles, values, strict=True)]
    return {"dist": "quantiles", "points": rows}


def _node(kind: str) -> dict[str, Any]:
    return {"kind": kind, "cv": 1, "burst": {"factor": 1, "on_s": 5, "off_s": 15}}


def _silent_seconds(times_s: np.ndarray, span: float) -> float:
    seconds = max(1, int(span))
    return 1 - len(np.unique(times_s[times_s < seconds] // 1)) / seconds
