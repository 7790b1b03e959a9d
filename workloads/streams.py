"""Named random sub-streams of one seed.

What one name draws never moves what another draws: another rate leaves lengths alone, other cancellations
leave arrivals alone. Every stream is read front to back, so the first k draws do not depend on how many
follow.
"""

from __future__ import annotations

import hashlib

import numpy as np

from workloads.errors import WorkloadError


def stream(seed: int, *names: str) -> np.random.Generator:
    """The sub-stream of `seed` with this path of names, e.g. stream(0, "output", "retrieval").

    A child of SeedSequence(seed), as `spawn` makes them, whose spawn key is a hash of the names instead of
    a counter: a new name never renumbers the old ones.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise WorkloadError(f"seed={seed!r}: needs a whole number of 0 or more")
    key = tuple(int.from_bytes(hashlib.blake2b(n.encode(), digest_size=4).digest(), "big") for n in names)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
