"""Seats that are taken away while there is KV for everyone: the tests' way to the states that a full pool
brings about at its own time (vLLM injects preemptions in the same way, PR 4451)."""

from __future__ import annotations

import random
from collections.abc import Collection
from collections.abc import Sequence as Seq

from engines.sequence import Sequence


class ForcedPreemption:
    """Every k iterations the newest sequence loses its seat. With a `seed` it is one iteration in k, drawn at
    random, and any sequence. It must be one that this pass has given a token, so that even k = 1 ends."""

    def __init__(self, every: int | None, seed: int | None) -> None:
        self._every = every
        self._random = None if seed is None else random.Random(seed)
        self._since = 0

    def victim(self, running: Seq[Sequence], given: Collection[int]) -> Sequence | None:
        """After a pass. `given` are the seq_ids that got a token."""
        if self._every is None:
            return None
        self._since += 1
        if self._random is not None:
            candidates = [seq for seq in running if seq.seq_id in given]
            drawn = self._random.random() * self._every < 1
            return self._random.choice(candidates) if candidates and drawn else None
        if self._since < self._every or not running or running[-1].seq_id not in given:
            return None
        self._since = 0
        return running[-1]
