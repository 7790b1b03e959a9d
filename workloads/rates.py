"""The rate of arrivals over time: a ramp, or steps. (A plain number needs nothing of this.)

Arrivals are a process of rate 1 in "expected requests"; the integral of the rate over time says when that
many are expected, and its inverse lays them out (the time-rescaling theorem: Brown et al. 2002, "The
time-rescaling theorem and its application to neural spike train data analysis"). So Poisson arrivals stay
Poisson at every moment, equal gaps stay equal while the rate does, and a count is never off by the rounding
of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workloads.settings import Settings

KINDS = ("ramp", "steps")
FORMS = "{kind: ramp, from: 1, to: 10, over_s: 60} or {kind: steps, steps: [[2, 30], [5, 30]]}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The rate goes from `start` to `end` requests/s in a straight line."""

    start: float
    end: float
    seconds: float

    @property
    def requests(self) -> float:
        return (self.start + self.end) / 2 * self.seconds

    def time_of(self, requests: np.ndarray) -> np.ndarray:
        """Seconds from its start until so many are expected, at most those of the whole stretch."""
        slope = (self.end - self.start) / self.seconds
        root = np.sqrt(np.maximum(0.0, self.start**2 + 2 * slope * requests))
        below = self.start + root
        # The usual formula (root - start) / slope fails for a slope of 0; where `below` is 0, so is requests.
        return np.divide(2 * requests, below, out=np.zeros_like(requests), where=below > 0)


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Stretches one after the other; afterwards the last rate goes on."""

    stretches: tuple[Stretch, ...]

    @property
    def span_s(self) -> float:
        return sum(s.seconds for s in self.stretches)

    def expected(self, seconds: float) -> float:
        """Requests until then."""
        total, left = 0.0, seconds
        for stretch in self.stretches:
            within = min(left, stretch.seconds)
            rate = stretch.start + (stretch.end - stretch.start) * within / stretch.seconds
            total += (stretch.start + rate) / 2 * within
            left -= within
        return total + left * self.stretches[-1].end

    def mean(self, starts_s: np.ndarray, step_s: float) -> np.ndarray:
        """Requests/s, averaged over step_s from each start."""
        edges = np.array([self.expected(float(t)) for t in [*starts_s, starts_s[-1] + step_s]])
        return np.diff(edges) / step_s

    def place(self, requests: np.ndarray) -> np.ndarray:
        """Times in seconds at which the expected number of arrivals reaches `requests`, shape (n,), each
        above 0."""
        ends = np.cumsum([s.requests for s in self.stretches])
        starts_s = np.cumsum([0.0, *(s.seconds for s in self.stretches)])
        # side=left: a count that is reached at the end of a stretch belongs to it, so that nothing lands in a
        # pause that follows.
        which = np.searchsorted(ends, requests, side="left")
        times = np.empty(len(requests))
        before = 0.0
        for number, stretch in enumerate(self.stretches):
            here = which == number
            times[here] = starts_s[number] + stretch.time_of(requests[here] - before)
            before = float(ends[number])
        after = which == len(self.stretches)
        times[after] = starts_s[-1] + (requests[after] - before) / self.stretches[-1].end
        return times


def read_rate(node: Settings, key: str = "rate") -> float | RateProfile | None:
    """A number of requests/s, null, or a profile."""
    value = node.get(key)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return node.number(key, above=0)
    profile = node.node(key)
    if "kind" not in profile:
        raise node.error(key, f"needs a number, or {FORMS}")
    if profile.choice("kind", KINDS) == "ramp":
        profile.only("kind", "from", "to", "over_s")
        start, end = profile.number("from", least=0), profile.number("to", above=0)
        return RateProfile((Stretch(start, end, profile.number("over_s", above=0)),))
    profile.only("kind", "steps")
    rows = profile.table("steps", 2)
    if any(rate < 0 or seconds <= 0 for rate, seconds in rows) or rows[-1][0] == 0:
        raise profile.error("steps", "needs rows of requests/s (0 is a pause, and not the last) and seconds")
    return RateProfile(tuple(Stretch(rate, rate, seconds) for rate, seconds in rows))


def shown_rate(rate: float | RateProfile | None) -> str:
    """In a few words, for messages."""
    if not isinstance(rate, RateProfile):
        return "null" if rate is None else f"{rate:g}"
    first, last = rate.stretches[0].start, rate.stretches[-1].end
    return f"{first:g} to {last:g} in {rate.span_s:g} s"
