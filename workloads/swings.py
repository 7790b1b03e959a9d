"""What makes the rate of arrivals swing: a slow random factor, a curve of the day, silences.

    factor   rate x exp(AR(1)): the common swing of pooled services, which a renewal process of gaps cannot
    show.
             sigma: standard deviation of the log rate; tau_s: after so long a swing is forgotten to 1/e.
             Over a window w shorter than tau_s the index of dispersion grows by rate w sigma^2.
    day      24 multipliers, hour by hour from `from_hour`, joined by straight lines; their mean counts as
    1. on_off   a few users: bursts and silences of random lengths in turn; nothing arrives in a silence.

All keep the mean rate. They are laid over the process of arrivals by its expected count (the time-rescaling
theorem, as in `workloads.rates`), and run on the clock: another rate meets the same swings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workloads import exact
from workloads.errors import WorkloadError
from workloads.lengths import Quantile, distribution_at
from workloads.rates import RateProfile
from workloads.settings import Settings
from workloads.streams import stream

MOST_STEPS = 20_000_000
_BLOCK = 4096
DAYS = {
    # Hourly means over the week's mean on weekdays, 0 to 23 h UTC, of Azure's LLM services in May 2024 (CC
    # BY 4.0, Azure Public Dataset, AzureLLMInferenceDataset2024; read off its per-minute plots).
    "azure2024_conv": (
        *(1.01, 1.10, 1.10, 0.91, 0.91, 0.99, 1.13, 1.23, 1.27, 1.24, 1.12, 1.16),
        *(1.30, 1.44, 1.52, 1.43, 1.30, 1.24, 1.23, 1.17, 1.07, 0.89, 0.80, 0.82),
    ),
    "azure2024_code": (
        *(0.88, 0.84, 0.80, 0.66, 0.53, 0.44, 0.37, 0.32, 0.29, 0.30, 0.32, 0.45),
        *(0.83, 1.42, 2.05, 2.26, 2.13, 2.43, 2.70, 2.76, 2.60, 1.94, 1.39, 1.04),
    ),
}


@dataclass(frozen=True, slots=True)
class Swings:
    sigma: float = 0.0
    tau_s: float = 420.0
    day: tuple[float, ...] = ()
    from_hour: float = 0.0
    on_s: Quantile | None = None
    off_s: Quantile | None = None

    @property
    def still(self) -> bool:
        return self.sigma == 0 and not self.day and self.on_s is None


def read_swings(node: Settings) -> Swings:
    """The keys `factor`, `day` and `on_off` of the `arrivals` node, each absent or null for none."""
    sigma, tau_s = 0.0, 420.0
    if _given(node, "factor"):
        factor = node.node("factor", "{sigma: 0.2, tau_s: 420}")
        factor.only("sigma", "tau_s")
        sigma, tau_s = factor.number("sigma", least=0), factor.number("tau_s", above=0)
        if sigma > 3:
            raise factor.error("sigma", "needs 3 at most: beyond it a few moments have all the requests")
    day: tuple[float, ...] = ()
    from_hour = 0.0
    if _given(node, "day"):
        curve = node.node("day", "{curve: azure2024_conv, from_hour: 8}")
        curve.only("curve", "from_hour")
        from_hour = curve.number("from_hour", least=0)
        day = _curve(curve)
    on_s = off_s = None
    if _given(node, "on_off"):
        windows = node.node("on_off", "{on_s: {dist: ...}, off_s: {dist: ...}}")
        windows.only("on_s", "off_s")
        on_s, off_s = (distribution_at(windows, key) for key in ("on_s", "off_s"))
        if not (on_s(np.array([0.5]))[0] > 0 and off_s(np.array([0.5]))[0] > 0):
            raise node.error("on_off", "needs seconds above 0 for on_s and off_s")
    return Swings(sigma, tau_s, day, from_hour, on_s, off_s)


def place_swinging(
    seed: int, counts: np.ndarray, rate: float | RateProfile, swings: Swings, until_s: float | None = None
) -> np.ndarray:
    """Times in seconds at which the expected number of arrivals reaches counts (not falling), shape (n,);
    with until_s at least those up to then, the others infinite."""
    times = np.full(len(counts), np.inf)
    reached, at_s, done = 0.0, 0.0, 0
    for seconds, rates in _blocks(seed, rate, swings):
        expected = np.concatenate([[0.0], np.cumsum(seconds * rates)]) + reached
        clock = np.concatenate([[0.0], np.cumsum(seconds)]) + at_s
        upto = int(np.searchsorted(counts, expected[-1], side="right"))
        mine = counts[done:upto]
        step = np.clip(np.searchsorted(expected, mine, side="left"), 1, len(seconds))
        share = (mine - expected[step - 1]) / np.maximum(expected[step] - expected[step - 1], 1e-300)
        times[done:upto] = clock[step - 1] + share * seconds[step - 1]
        done, reached, at_s = upto, float(expected[-1]), float(clock[-1])
        if done == len(counts) or (until_s is not None and at_s > until_s):
            return times
    return times


def _blocks(seed: int, rate: float | RateProfile, swings: Swings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(seconds, requests/s) of stretches of constant rate, in blocks, without end."""
    step_s = math.inf
    if swings.sigma:
        step_s = min(step_s, swings.tau_s / 64)
    if swings.day or isinstance(rate, RateProfile):
        step_s = min(step_s, 60.0 if swings.day else 1.0)
    if isinstance(rate, RateProfile):
        step_s = min(step_s, rate.span_s / 256)
    if math.isinf(step_s):
        step_s = 1e9
    factor = _Factor(seed, swings, step_s)
    windows = _Windows(seed, swings) if swings.on_s is not None else None
    for block in range(MOST_STEPS // _BLOCK):
        starts = (block * _BLOCK + np.arange(_BLOCK)) * step_s
        rates = factor.next(_BLOCK) * _day_at(swings, starts + step_s / 2)
        if isinstance(rate, RateProfile):
            rates = rates * rate.mean(starts, step_s)
        else:
            rates = rates * rate
        seconds = np.full(_BLOCK, step_s)
        yield (seconds, rates) if windows is None else windows.cut(starts, seconds, rates)
    raise WorkloadError(
        f"workload.arrivals: the swings of the rate reach no end within {MOST_STEPS} steps of {step_s:g} s; "
        "raise workload.rate or factor.tau_s"
    )


class _Factor:
    """exp(x - sigma^2 / 2) of an AR(1) process x, step by step; 1 on average."""

    def __init__(self, seed: int, swings: Swings, step_s: float) -> None:
        self._sigma = swings.sigma
        if not self._sigma:
            return
        self._keep = float(exact.exp(np.array(-step_s / swings.tau_s)))
        self._rng = stream(seed, "arrivals", "factor")
        self._x = float(exact.normal_quantile(self._rng.random(1))[0]) * self._sigma

    def next(self, n: int) -> np.ndarray:
        if not self._sigma:
            return np.ones(n)
        shocks = exact.normal_quantile(self._rng.random(n)) * self._sigma * math.sqrt(1 - self._keep**2)
        path = np.empty(n)
        x = self._x
        for i, shock in enumerate(shocks.tolist()):
            path[i] = x
            x = self._keep * x + shock
        self._x = x
        return exact.exp(path - self._sigma**2 / 2)


class _Windows:
    """Bursts and silences in turn, from a burst that began at 0."""

    def __init__(self, seed: int, swings: Swings) -> None:
        assert swings.on_s is not None
        assert swings.off_s is not None
        self._swings, self._rng = swings, stream(seed, "arrivals", "on_off")
        middle = (np.arange(4096) + 0.5) / 4096
        on, off = (math.fsum(d(middle).tolist()) for d in (swings.on_s, swings.off_s))
        self._gain = round((on + off) / on, 9)  # the mean rate stays
        self._edges = np.zeros(1)  # ends of windows; the first burst begins at 0

    def cut(
        self, starts: np.ndarray, seconds: np.ndarray, rates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The stretches, cut at the windows, silent where they are."""
        assert self._swings.on_s is not None
        assert self._swings.off_s is not None
        end = float(starts[-1] + seconds[-1])
        if end > 1e8:  # without other swings a block has no natural length: as long as some thousand windows
            return self._whole(float(rates[0]))
        while self._edges[-1] <= end:
            self._more()
        inner = self._edges[(self._edges > starts[0]) & (self._edges < end)]
        cuts = np.unique(np.concatenate([starts, inner, [end]]))
        number = np.searchsorted(self._edges, cuts[:-1], side="right") - 1
        step = np.searchsorted(starts, cuts[:-1], side="right") - 1
        return np.diff(cuts), np.where(number % 2 == 0, rates[step] * self._gain, 0.0)

    def _whole(self, rate: float) -> tuple[np.ndarray, np.ndarray]:
        begin = len(self._edges) - 1
        self._more()
        seconds = np.diff(self._edges[begin:])
        on = (np.arange(len(seconds)) + begin) % 2 == 0
        return seconds, np.where(on, rate * self._gain, 0.0)

    def _more(self) -> None:
        assert self._swings.on_s is not None
        assert self._swings.off_s is not None
        u = self._rng.random((512, 2))
        lengths = np.stack([self._swings.on_s(u[:, 0]), self._swings.off_s(u[:, 1])], axis=1).ravel()
        self._edges = np.concatenate([self._edges, self._edges[-1] + np.cumsum(np.maximum(lengths, 1e-3))])


def _curve(node: Settings) -> tuple[float, ...]:
    value = node.get("curve")
    if isinstance(value, str):
        if value not in DAYS:
            raise node.error("curve", f"choose from {', '.join(DAYS)}, or give 24 numbers")
        hours = list(DAYS[value])
    else:
        hours = node.numbers("curve")
    if len(hours) != 24 or min(hours) < 0 or not sum(hours) > 0:
        raise node.error("curve", "needs 24 numbers of 0 or more, one for each hour")
    mean = math.fsum(hours) / 24
    return tuple(hour / mean for hour in hours)


def _day_at(swings: Swings, at_s: np.ndarray) -> np.ndarray:
    """The curve's points are the middles of its hours."""
    if not swings.day:
        return np.ones(len(at_s))
    hour = np.mod(at_s / 3600 + swings.from_hour - 0.5, 24.0)
    low = np.floor(hour).astype(np.int64) % 24
    day = np.asarray(swings.day)
    return day[low] + (hour - np.floor(hour)) * (day[(low + 1) % 24] - day[low])


def _given(node: Settings, key: str) -> bool:
    return key in node and node.get(key) is not None
