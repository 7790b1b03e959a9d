"""When users give up.

Four ways: never; before the first token, after a patience; in mid-answer, at a share of the planned answer;
after a fixed time from the send, whatever has come. No trace of user aborts with their times is public, so
every number here is a choice, and the schedule keeps each decision so that wasted tokens can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.lengths import Lognormal
from workloads.settings import Settings
from workloads.streams import stream


@dataclass(frozen=True, slots=True)
class Timer:
    """Seconds from the send, lognormal."""

    share: float
    p50_s: float
    sigma: float

    def seconds(self, u: np.ndarray) -> np.ndarray:
        return Lognormal(float(np.log(self.p50_s)), self.sigma)(u)


@dataclass(frozen=True, slots=True)
class Cancellation:
    before_first_token: Timer
    after_tokens_share: float
    after_tokens_fraction: tuple[float, float]  # of stop_after, uniform
    after_s: Timer


@dataclass(frozen=True, slots=True)
class Decision:
    kind: str
    value: float | None


def read_cancellation(node: Settings) -> Cancellation:
    """The `cancel` node of a workload."""
    node.only("before_first_token", "after_tokens", "after_s")
    tokens = node.node("after_tokens")
    tokens.only("share", "fraction")
    fraction = tokens.numbers("fraction")
    if len(fraction) != 2 or not 0 <= fraction[0] <= fraction[1] <= 1:
        raise tokens.error("fraction", "needs two shares [low, high] of the answer, 0 to 1")
    read = Cancellation(
        before_first_token=_timer(node.node("before_first_token")),
        after_tokens_share=tokens.share("share"),
        after_tokens_fraction=(fraction[0], fraction[1]),
        after_s=_timer(node.node("after_s")),
    )
    total = read.before_first_token.share + read.after_tokens_share + read.after_s.share
    if total > 1:
        raise node.error("after_s", f"the three shares sum to {total:g}, needs 1 at most")
    return read


def draw_cancellations(seed: int, cancel: Cancellation, stop_after: np.ndarray) -> list[Decision]:
    """One decision per request, given the tokens of the answers, int, shape (n,)."""
    n = len(stop_after)
    which = stream(seed, "cancel", "kind").random(n)
    patience = cancel.before_first_token.seconds(stream(seed, "cancel", "before_first_token").random(n))
    low, high = cancel.after_tokens_fraction
    fraction = low + (high - low) * stream(seed, "cancel", "after_tokens").random(n)
    seconds = cancel.after_s.seconds(stream(seed, "cancel", "after_s").random(n))
    first = cancel.before_first_token.share
    second = first + cancel.after_tokens_share
    third = second + cancel.after_s.share
    decisions = []
    for i in range(n):
        if which[i] < first:
            decisions.append(Decision("before_first_token", float(patience[i])))
        elif which[i] < second:
            decisions.append(Decision("after_tokens", float(max(1, round(fraction[i] * int(stop_after[i]))))))
        elif which[i] < third:
            decisions.append(Decision("after_s", float(seconds[i])))
        else:
            decisions.append(Decision("none", None))
    return decisions


def _timer(node: Settings) -> Timer:
    node.only("share", "p50_s", "sigma")
    return Timer(node.share("share"), node.number("p50_s", above=0), node.number("sigma", least=0))
