"""In which order the arms of each round are measured.

Every second round is the one before it in reverse, and each such pair is shuffled anew: over a pair every arm
stands in the same place on average, so that a machine that slowly gets slower (or warms up) is shared out
evenly, and no arm always follows the same other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def orders(names: Sequence[str], seed: int) -> Iterator[tuple[str, ...]]:
    """One order a round, without end. The same seed gives the same orders."""
    rng = np.random.default_rng([seed, 0x0C0DE])
    while True:
        order = tuple(names[i] for i in rng.permutation(len(names)))
        yield order
        yield order[::-1]
