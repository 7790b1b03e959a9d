"""Virtual token counters: how much each name has had, divided by its weight (VTC: Sheng et al., Fairness in
Serving Large Language Models, OSDI 2024).

    charge  counter += cost / weight
    lift    a name that begins to wait gets at least the smallest counter of those that wait; if nobody does,
            the counter of the last one that did. Time in which it asked for nothing saves no credit.
    next    the name with the smallest counter

Over any time in which two names both wait without a pause, what they have had differs by a bounded amount:
theorem 4.4 of the paper, twice the most that one of them can be charged between two of its turns."""

from __future__ import annotations

from collections.abc import Mapping

MOST_WEIGHT = 1e6
"""Counters are floats: with weights far from each other a token of one would vanish in those of the other."""


def check_weight(name: str, weight: float) -> None:
    """Raises ValueError."""
    least = 1 / MOST_WEIGHT
    if not least <= weight <= MOST_WEIGHT:
        raise ValueError(f"{name}={weight}: needs a number above 0, from {least:g} to {MOST_WEIGHT:g}")


class Shares:
    SWEEP = 1024  # names, before those that a lift would raise anyway are forgotten

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._count: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._last = ""  # the last name that ceased to wait
        self._sweep_at = self.SWEEP

    def of(self, name: str) -> float:
        """Its counter; of a name that does not wait, what it would begin with."""
        count = self._count.get(name, 0.0)
        return count if name in self._waiting else max(count, self.least())

    def least(self) -> float:
        """What a name that begins to wait has at least."""
        if self._waiting:
            return min(self._count[name] for name in self._waiting)
        return self._count.get(self._last, 0.0)

    def cost(self, name: str, tokens: float) -> float:
        return tokens / self._weights.get(name, 1.0)

    def charge(self, name: str, tokens: float) -> None:
        self._count[name] = self._count.get(name, 0.0) + self.cost(name, tokens)

    def wait(self, name: str) -> None:
        """Somebody of it waits from now on."""
        if name not in self._waiting:
            self._count[name] = self.of(name)
            self._waiting.add(name)
            if len(self._count) > self._sweep_at:
                self._sweep()

    def rest(self, name: str) -> None:
        """Nobody of it waits any more."""
        if name in self._waiting:
            self._waiting.remove(name)
            self._last = name

    def _sweep(self) -> None:
        """Names are the clients' choice: those whose counter says nothing must not pile up."""
        least = self.least()
        kept = {*self._waiting, self._last}
        self._count = {name: c for name, c in self._count.items() if c > least or name in kept}
        self._sweep_at = max(self.SWEEP, 2 * len(self._count))
