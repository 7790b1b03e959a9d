"""Kernel stamps are CLOCK_REALTIME, everything else here is CLOCK_MONOTONIC: the difference, sampled through
a run.

On Linux both clocks are slewed alike, so that the difference stays the same to the nanosecond until somebody
sets the wall clock (man 2 clock_adjtime; man 7 time). A stamp that was taken before such a step and mapped
after it would be off by the step: the step is reported, and the run is not sound.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 5
STEP_NS = 20_000
"""A difference that changed by more than this is a step. A pair of readings is good to about 0.1 us."""


class WallClock:
    """`offset_ns` is CLOCK_REALTIME minus CLOCK_MONOTONIC; step_ns the largest change seen so far, or
    None."""

    def __init__(
        self,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        realtime_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._monotonic_ns, self._realtime_ns = monotonic_ns, realtime_ns
        self.offset_ns = self._tightest()[0]
        self.step_ns: int | None = None

    def sample(self) -> bool:
        """Look again, several times a second. True: the wall clock was set since the last look."""
        offset_ns, width_ns = self._tightest()
        change_ns = offset_ns - self.offset_ns
        if abs(change_ns) <= STEP_NS + width_ns:
            # The first reading stays: what comes after it differs by the error of the readings alone.
            return False
        self.offset_ns = offset_ns
        if self.step_ns is None or abs(change_ns) > abs(self.step_ns):
            self.step_ns = change_ns
        return True

    def _tightest(self) -> tuple[int, int]:
        """The difference and how long its reading took, of the quickest of several readings: one during which
        the process lost its core says little."""
        best: tuple[int, int] | None = None
        for _ in range(TRIES):
            before = self._monotonic_ns()
            real = self._realtime_ns()
            after = self._monotonic_ns()
            if best is None or after - before < best[1]:
                best = real - (before + after) // 2, after - before
        assert best is not None
        return best
