"""How fast the engine has been lately: what every estimate of a wait rests on. Nothing here is a promise, and
None means that too little has been seen."""

from __future__ import annotations

import math

HALF_LIFE_S = 10.0
"""Busy seconds after which what was seen counts half."""
LEAST = 4.0
"""Fewer observations than this, after forgetting, are no ground for refusing anyone."""
LONGEST_RETRY_S = 60
"""More is not worth predicting: what the engine will do by then depends on requests that have not come."""


def retry_after(wait_s: float | None) -> int:
    """Whole seconds, at least 1, which is also the answer as long as nothing is known."""
    return 1 if wait_s is None else min(LONGEST_RETRY_S, max(1, math.ceil(wait_s)))


class _Decaying:
    """A sum that forgets, over the time in which it was gathered."""

    __slots__ = ("amount", "count", "seconds")

    def __init__(self) -> None:
        self.amount = self.count = self.seconds = 0.0

    def add(self, amount: float, count: float, seconds: float) -> None:
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self.amount = self.amount * keep + amount
        self.count = self.count * keep + count
        self.seconds = self.seconds * keep + seconds

    @property
    def per_s(self) -> float | None:
        return self.amount / self.seconds if self.count >= LEAST and self.seconds > 0 else None

    @property
    def mean(self) -> float | None:
        return self.amount / self.count if self.count >= LEAST else None


class Pace:
    """`entered`: prompt tokens that got their first seat, over the time in which somebody was left behind:
    the speed at which the queue drains. While it is empty, arrivals and not the engine set that speed."""

    def __init__(self) -> None:
        self._drain = _Decaying()
        self._steps = _Decaying()
        self._released = _Decaying()
        self._answers = _Decaying()
        self._entries = _Decaying()
        self._left_behind = False

    def passed(
        self, seconds: float, entered: list[int], entry_blocks: int, released: int, left_behind: bool
    ) -> None:
        """An iteration took `seconds`, its host gap included. `entered`: prompt lengths of those scheduled
        for the first time. `left_behind`: after it was planned, somebody still waited."""
        self._steps.add(seconds, 1, seconds)
        self._released.add(released, 1, seconds)
        if entered:
            self._entries.add(entry_blocks, len(entered), seconds)
        if self._left_behind:
            self._drain.add(sum(entered), len(entered), seconds)
        self._left_behind = left_behind

    def ended(self, tokens: int) -> None:
        """An answer has ended by itself. They are forgotten by number: one in 32 each time."""
        self._answers.add(tokens, 1, HALF_LIFE_S / 22)

    @property
    def release_per_s(self) -> float | None:
        return self._released.per_s

    @property
    def entry_blocks(self) -> float | None:
        """KV blocks of a sequence at its entry."""
        return self._entries.mean

    @property
    def step_s(self) -> float | None:
        return self._steps.mean

    def wait_s(self, tokens_ahead: int) -> float | None:
        """Until as many waiting tokens have got their seats."""
        speed = self._drain.per_s
        if tokens_ahead == 0:
            return 0.0
        return tokens_ahead / speed if speed else None

    def serve_s(self, prompt_tokens: int, max_tokens: int, budget: int) -> float | None:
        """From its seat to its last token, if its answer is as long as the mean of the last ones."""
        step, answer = self.step_s, self._answers.mean
        if step is None or answer is None:
            return None
        return step * (-(-prompt_tokens // budget) + min(answer, max_tokens) - 1)
