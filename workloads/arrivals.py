"""When requests arrive: a renewal process of unit-mean gaps, laid over a rate that may have episodes.

The gaps are drawn without knowing the rate and then stretched, so another rate replays the same pattern,
faster or slower. Episodes repeat: `off_s` seconds of quiet, then `on_s` seconds at `factor` times the quiet
rate, while the mean over a whole period stays the given rate. Ramps and steps: `workloads.rates`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.errors import WorkloadError
from workloads.rates import RateProfile, shown_rate
from workloads.settings import Settings

KINDS = ("poisson", "gamma", "constant", "at_once")
LEAST_CV, MOST_CV = 1e-3, 100.0
MOST_REQUESTS = 5_000_000  # a schedule lives in memory


@dataclass(frozen=True, slots=True)
class Burst:
    """factor 1 means no episodes."""

    factor: float = 1.0
    on_s: float = 5.0
    off_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """cv is the coefficient of variation of the gaps of kind gamma; 1 is a Poisson process. pinned: n
    arrivals take exactly the time in which n are expected, so that two kinds differ in burstiness and not in
    load."""

    kind: str
    cv: float = 1.0
    burst: Burst = Burst()
    pinned: bool = False


def read_arrivals(node: Settings) -> Arrivals:
    """The `arrivals` node of a workload."""
    node.only("kind", "cv", "burst", "pinned")
    burst = node.node("burst")
    burst.only("factor", "on_s", "off_s")
    return Arrivals(
        kind=node.choice("kind", KINDS),
        cv=_cv(node),
        burst=Burst(
            factor=burst.number("factor", above=0),
            on_s=burst.number("on_s", above=0),
            off_s=burst.number("off_s", above=0),
        ),
        pinned="pinned" in node and node.flag("pinned"),
    )


def _cv(node: Settings) -> float:
    """Beyond these a gamma has no gaps but 0, or none but the mean."""
    cv = node.number("cv", above=0)
    if not LEAST_CV <= cv <= MOST_CV:
        raise node.error("cv", f"needs {LEAST_CV:g} to {MOST_CV:g}; for equal gaps: arrivals.kind=constant")
    return cv


def unit_gaps(rng: np.random.Generator, arrivals: Arrivals, n: int) -> np.ndarray:
    """n gaps of mean 1, float64, shape (n,). A gamma of coefficient of variation c has shape 1 / c^2."""
    if arrivals.kind == "poisson":
        return rng.standard_exponential(n)
    if arrivals.kind == "gamma":
        shape = 1 / arrivals.cv**2
        return rng.standard_gamma(shape, n) / shape
    if arrivals.kind == "constant":
        return np.ones(n)
    return np.zeros(n)


def place(requests: np.ndarray, rate: float, burst: Burst) -> np.ndarray:
    """Times in seconds at which the expected number of arrivals reaches `requests`, shape (n,)."""
    if burst.factor == 1:
        return requests / rate
    period = burst.off_s + burst.on_s
    quiet = rate * period / (burst.off_s + burst.factor * burst.on_s)
    periods, rest = np.divmod(requests, rate * period)
    in_burst = rest - quiet * burst.off_s
    within = np.where(in_burst < 0, rest / quiet, burst.off_s + in_burst / (quiet * burst.factor))
    return periods * period + within


def draw_arrivals(
    rng: np.random.Generator,
    arrivals: Arrivals,
    *,
    rate: float | RateProfile | None,
    requests: int | None,
    duration_s: float | None,
) -> np.ndarray:
    """Arrival times in seconds from the start, not falling. Ends at `requests` arrivals or before the first
    that is later than `duration_s`, whichever comes first; one of them must be given. Pinned arrivals without
    a count are as many as `duration_s` is expected to bring. Reads `rng` front to back."""
    if requests is not None and requests > MOST_REQUESTS:
        raise WorkloadError(f"load.requests={requests}: needs {MOST_REQUESTS} at most")
    if arrivals.kind == "at_once":
        if requests is None:
            raise WorkloadError("workload.requests=null: arrivals.kind=at_once needs a count")
        return np.zeros(requests)
    if rate is None:
        raise WorkloadError(f"workload.rate=null: arrivals.kind={arrivals.kind} needs requests per second")
    if isinstance(rate, RateProfile) and arrivals.burst.factor != 1:
        raise WorkloadError(
            f"workload.arrivals.burst.factor={arrivals.burst.factor:g}: workload.rate is a profile and has a "
            "shape of its own; set burst.factor=1, or workload.rate to a number"
        )
    if requests is not None:
        n = requests
    elif duration_s is not None:
        expected = rate.expected(duration_s) if isinstance(rate, RateProfile) else rate * duration_s
        n = max(1, round(expected)) if arrivals.pinned else int(expected * 2) + 64
    else:
        raise WorkloadError("workload.requests=null: give a count, or load.duration_s")
    gaps = np.empty(0)
    while True:
        if n > MOST_REQUESTS:
            raise WorkloadError(
                f"workload.rate={shown_rate(rate)}, load.duration_s={duration_s}, "
                f"load.requests={requests}: "
                f"makes more than {MOST_REQUESTS} requests; lower one of them"
            )
        gaps = np.concatenate([gaps, unit_gaps(rng, arrivals, n - len(gaps))])
        counts = np.cumsum(gaps)
        if arrivals.pinned:
            counts *= n / counts[-1]
        if isinstance(rate, RateProfile):
            times = rate.place(counts)
        else:
            times = place(counts, rate, arrivals.burst)
        if duration_s is None or (arrivals.pinned and requests is None):
            return times
        if requests is not None or times[-1] > duration_s:
            return times[times <= duration_s]
        n *= 2
