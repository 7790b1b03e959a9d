"""Which rate to probe next, and what all probes so far say of the capacity. No I/O and no clock.

A probe says how hard its rate pressed: the largest of its figures over their limits, so that up to 1 the rate
held. Pressures rise with the rate and are noisy, so a rate near the limit is probed again, with other
requests, until it is clear on which side it lies or its repeats are used. What is not clear then stays inside
of the interval: its ends are only rates whose verdict is clear.

The search goes up from a first guess by a factor, or down by its growing powers, until one rate has held and
one has failed, then bisects between them. Down it hurries: where a server with next to nothing to do misses
its SLO every rate does, and a probe of a low rate takes long. (Bisection on the rate as in the artifact of
Sarathi-Serve, OSDI 2024, which probes each rate once.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST = 0.85
"""Of the guess, which is how fast the engine serves when it never waits for work: an open loop breaks
earlier."""
UP, DOWN = 1.2, 1.5
FLOOR, CEILING = 0.02, 20.0
"""Of the guess: rates outside are not looked at."""
SURE = 1.96
"""Standard errors between the mean log pressure of a rate and its limit, for a clear verdict: 5 % to err on
either side."""
PRIOR_SD, PRIOR_WEIGHT = 0.2, 2
"""The noise of a log pressure before any rate has been repeated, worth so many repeats: one probe alone is
clear when it is off the limit by half."""
MOST = math.log(10)
"""Log pressures are cut here, so that one infinite figure does not outweigh all repeats."""


@dataclass(frozen=True, slots=True)
class Rules:
    tolerance: float = 0.05  # the search ends at high / low - 1
    repeats: int = 3  # of one rate at most
    probes: int = 24  # in all: where pressure hardly depends on the rate, no number of them is enough


@dataclass(frozen=True, slots=True)
class Interval:
    """The capacity lies between low, which held, and high, which failed. None: no such rate was found."""

    low: float | None
    high: float | None
    unclear: tuple[float, ...] = ()  # rates whose repeats did not agree
    violations: tuple[tuple[float, float], ...] = ()  # (failed, held) although it is the higher rate

    def within(self, tolerance: float) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.high <= self.low * (1 + tolerance) * (1 + 1e-3)


class Search:
    """The probes of one engine. guess: requests/s that it may hold."""

    def __init__(self, guess: float, rules: Rules | None = None) -> None:
        self.guess = guess
        self.rules = rules or Rules()
        self.seen: dict[float, list[float]] = {}  # log pressures of each rate

    def tell(self, rate: float, pressure: float) -> None:
        """pressure: above 0; infinite where nothing was served."""
        value = math.log(pressure) if pressure > 0 else -MOST
        self.seen.setdefault(rate, []).append(min(MOST, max(-MOST, value)))

    def next(self) -> float | None:
        """The rate to probe, None when there is nothing left to learn, or no probe left."""
        if sum(map(len, self.seen.values())) >= self.rules.probes:
            return None
        if not self.seen:
            return rounded(FIRST * self.guess)
        if doubtful := self._of("open"):
            return doubtful[-1]
        held, failed = self._of("held"), self._of("failed")
        if not held:
            floor = rounded(FLOOR * self.guess)
            lower = max(floor, rounded(min(self.seen) / DOWN ** len(self.seen)))
            return lower if min(self.seen) > floor else None
        if not failed:
            higher = rounded(max(self.seen) * UP)
            return higher if higher <= CEILING * self.guess else None
        found = self.interval()
        assert found.low is not None
        assert found.high is not None
        inside = [rate for rate in self.seen if found.low < rate < found.high]
        marks = sorted([found.low, *inside, found.high])
        gaps = [(high / low, low, high) for low, high in ((marks[0], marks[1]), (marks[-2], marks[-1]))]
        widest, low, high = max(gaps)
        middle = rounded(math.sqrt(low * high))
        if widest > (1 + self.rules.tolerance) * (1 + 1e-3) and low < middle < high:
            return middle
        ends = [rate for rate in (found.low, found.high) if len(self.seen[rate]) < 2]
        return ends[0] if ends and self.rules.repeats > 1 else None  # no end stands on a single probe

    def verdict(self, rate: float) -> str:
        """held | failed | open (probe it again) | unclear (its repeats are used)."""
        return self._verdicts()[rate]

    def noise(self) -> float:
        """The standard deviation of a log pressure, pooled over the rates that were repeated."""
        squares, degrees = PRIOR_WEIGHT * PRIOR_SD**2, PRIOR_WEIGHT
        for values in self.seen.values():
            mean = sum(values) / len(values)
            squares += sum((value - mean) ** 2 for value in values)
            degrees += len(values) - 1
        return math.sqrt(squares / degrees)

    def _verdicts(self) -> dict[float, str]:
        noise, found = self.noise(), {}
        for rate, values in self.seen.items():
            errors = sum(values) / math.sqrt(len(values)) / noise
            if abs(errors) > SURE:
                found[rate] = "held" if errors < 0 else "failed"
            else:
                found[rate] = "open" if len(values) < self.rules.repeats else "unclear"
        return found

    def _of(self, *verdicts: str) -> list[float]:
        return sorted(rate for rate, verdict in self._verdicts().items() if verdict in verdicts)

    def interval(self) -> Interval:
        """Where a higher rate held than one that failed, both lie inside: neither is to be trusted."""
        held, failed = self._of("held"), self._of("failed")
        low = max((rate for rate in held if not failed or rate < failed[0]), default=None)
        high = min((rate for rate in failed if not held or rate > held[-1]), default=None)
        unclear = tuple(
            rate
            for rate in self._of("open", "unclear")
            if low is None or (rate > low and (high is None or rate < high))
        )
        broken = tuple((bad, good) for bad in failed for good in held if good > bad)
        return Interval(low, high, unclear, broken)


def rounded(rate: float) -> float:
    """Four significant digits: what one would write."""
    return float(f"{rate:.4g}")
