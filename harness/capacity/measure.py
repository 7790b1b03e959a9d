"""The capacities of several engines: one search each, their probes in turn, on the same requests, in bounded
time. Whatever ends it early, what was probed is kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.capacity.point import Point
from harness.capacity.prober import Interrupted, ProbeError, Prober
from harness.capacity.search import FIRST, Interval, Rules, Search, rounded
from harness.cli import INCONCLUSIVE, INVALID, PASS, REGRESSION

LEAST_REQUESTS, MOST_REQUESTS = 100, 20_000
"""Of a probe: an attainment of 99 % can tell one miss from two."""
SATURATING_REQUESTS = 4000
"""More than a closed loop gets through in its time."""
BESIDE_S = 3.0
"""Of a probe, beside its arrivals, before one has shown it."""


@dataclass
class Arm:
    """One engine and what is known of it. ended: resolved | unclear | time | out_of_reach | unbounded |
    interrupted | invalid; None: the search goes on."""

    name: str
    prober: Prober
    guess: float | None = None
    search: Search | None = None
    requests: int = LEAST_REQUESTS  # of a probe
    points: list[Point] = field(default_factory=list)
    ended: str | None = None
    reason: str | None = None

    @property
    def interval(self) -> Interval:
        return self.search.interval() if self.search is not None else Interval(None, None)

    @property
    def held(self) -> list[Point]:
        """The probes at the capacity: at the highest rate that held."""
        return [point for point in self.points if point.rate == self.interval.low]


@dataclass(frozen=True, slots=True)
class Budget:
    """probe_s: of arrivals, at about the rate that the engines serve."""

    seconds: float
    probe_s: float
    requests: int | None = None
    curve: tuple[float, ...] = ()


def measure(
    arms: Sequence[Arm],
    rules: Rules,
    budget: Budget,
    *,
    say: Callable[[str], None],
    save: Callable[[Sequence[Arm]], Any] = lambda arms: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fills the arms in. save is called after every probe. A virtual prober's time does not count."""
    deadline = clock() + budget.seconds
    try:
        for arm in arms:
            with _ending_it(arm, say):
                arm.guess = arm.prober.saturate(budget.requests or SATURATING_REQUESTS)
                arm.search = Search(arm.guess, rules)
                say(f"{arm.name}: serves {arm.guess:.3g} requests/s when it never waits for work")
        share_out(arms, budget)
        _search(arms, deadline, say, save, clock)
        _curve(arms, budget.curve, deadline, say, save, clock)
    except (Interrupted, KeyboardInterrupt):
        for arm in arms:
            arm.ended = arm.ended or "interrupted"
    finally:
        save(arms)


@contextmanager
def _ending_it(arm: Arm, say: Callable[[str], None]) -> Iterator[None]:
    """A probe without figures ends the search of its engine; the others go on."""
    try:
        yield
    except ProbeError as error:
        arm.ended, arm.reason = "invalid", str(error)
        say(f"{arm.name}: {error}")


def share_out(arms: Sequence[Arm], budget: Budget) -> None:
    """How many requests each engine's probes have: the same for all, and so the same requests, but for those
    that are much slower than the middle one: their probes would take for ever."""
    guesses = [arm.guess for arm in arms if arm.guess]
    for arm in arms:
        served = min(statistics.median(guesses), 1.25 * arm.guess) if arm.guess else 0.0
        wanted = round(budget.probe_s * FIRST * served)
        arm.requests = budget.requests or min(MOST_REQUESTS, max(LEAST_REQUESTS, wanted))


def _search(
    arms: Sequence[Arm],
    deadline: float,
    say: Callable[[str], None],
    save: Callable[[Sequence[Arm]], Any],
    clock: Callable[[], float],
) -> None:
    while active := [arm for arm in arms if arm.ended is None]:
        for arm in active:  # in turn: what the machine does meanwhile meets all of them
            assert arm.search is not None
            rate = arm.search.next()
            if rate is None:
                arm.ended = _ending(arm.search)
            elif clock() + expected_s(arm, rate) > deadline:
                arm.ended = "time"
            else:
                with _ending_it(arm, say):
                    point = _probe(arm, rate, say)
                    arm.search.tell(rate, point.pressure)
                save(arms)


def _ending(search: Search) -> str:
    found = search.interval()
    if found.low is None:
        return "out_of_reach"
    if found.high is None:
        return "unbounded"
    return "unclear" if found.unclear or found.violations else "resolved"


def _curve(
    arms: Sequence[Arm],
    multiples: Sequence[float],
    deadline: float,
    say: Callable[[str], None],
    save: Callable[[Sequence[Arm]], Any],
    clock: Callable[[], float],
) -> None:
    """Points that no search needs."""
    for multiple in multiples:
        for arm in arms:
            low = arm.interval.low
            rate = rounded(low * multiple) if low else None
            if rate and clock() + expected_s(arm, rate) <= deadline:
                with _ending_it(arm, say):
                    _probe(arm, rate, say)
                save(arms)


def _probe(arm: Arm, rate: float, say: Callable[[str], None]) -> Point:
    """A probe that is invalid is tried once more. Raises ProbeError for a second one."""
    repeat = sum(point.rate == rate for point in arm.points)
    for last in (False, True):
        point = arm.prober.probe(rate, repeat, arm.requests)
        if not point.invalid_reasons:
            break
        why = f"{arm.name} at {rate:g}/s: {point.invalid_reasons[0]}"
        if last:
            raise ProbeError(f"{why}, twice")
        say(f"{why}; once more")
    arm.points.append(point)
    verdict = "held" if point.ok else f"over ({', '.join(point.over)})"
    attained = "-" if point.attainment is None else f"{point.attainment:.1%}"
    again = f", again ({repeat + 1})" if repeat else ""
    say(f"{arm.name} at {rate:g}/s{again}: {verdict}, attainment {attained}, pressure {point.pressure:.2f}")
    return point


def expected_s(arm: Arm, rate: float) -> float:
    """How long a probe will take: its arrivals, or the service of all where that takes longer. In virtual
    time as long as the longest so far."""
    if not arm.prober.takes_its_arrivals:
        return max((p.seconds for p in arm.points), default=0.0)
    beside = [p.seconds - _length_s(arm, p.rate, p.requests) for p in arm.points]
    return max(0.0, (statistics.median(beside) if beside else BESIDE_S) + _length_s(arm, rate, arm.requests))


def _length_s(arm: Arm, rate: float, requests: int) -> float:
    return requests / min(rate, arm.guess or rate)


def exit_code(arms: Sequence[Arm]) -> int:
    """3 invalid or interrupted, 4 no interval, 1 an engine that cannot keep the SLO at any rate, else 0."""
    endings = {arm.ended for arm in arms}
    if endings & {"invalid", "interrupted"}:
        return INVALID
    if any(arm.interval.high is None or (arm.interval.low is None and arm.ended == "time") for arm in arms):
        return INCONCLUSIVE
    return REGRESSION if any(arm.interval.low is None for arm in arms) else PASS
