"""When users give up.

Four ways: never; before the first token, after a patience; in mid-answer, at a share of the planned answer;
after a fixed time from the send, whatever has come. Apart from that a client may have a time-out, which
ends a request as timed out and not as cancelled. No trace of user aborts with their times is public, so
every number here is a choice, and the schedule keeps each decision so that wasted tokens can be counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workloads.columns import Texts
from workloads.lengths import Lognormal
from workloads.settings import Settings
from workloads.streams import stream

CANCEL_KINDS = ("none", "before_first_token", "after_tokens", "after_s")


@dataclass(frozen=True, slots=True)
class Timer:
    """Seconds from the send, lognormal."""

    share: float
    p50_s: float
    sigma: float

    def seconds(self, u: np.ndarray) -> np.ndarray:
        return Lognormal(round(math.log(self.p50_s), 12), self.sigma)(u)


@dataclass(frozen=True, slots=True)
class Cancellation:
    before_first_token: Timer
    after_tokens_share: float
    after_tokens_fraction: tuple[float, float]  # of stop_after, uniform
    after_s: Timer
    timeout_share: float = 0.0  # of the requests whose client has a time-out
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Decisions:
    """Of n requests."""

    kind: Texts
    value: np.ndarray  # float64: seconds or tokens, NaN where none
    timeout_s: np.ndarray  # float64, NaN where none


def read_cancellation(node: Settings) -> Cancellation:
    """The `cancel` node of a workload, or of a class that has one of its own."""
    node.only("before_first_token", "after_tokens", "after_s", "timeout")
    tokens = node.node("after_tokens")
    tokens.only("share", "fraction")
    fraction = tokens.numbers("fraction")
    if len(fraction) != 2 or not 0 <= fraction[0] <= fraction[1] <= 1:
        raise tokens.error("fraction", "needs two shares [low, high] of the answer, 0 to 1")
    timeout_share, timeout_s = 0.0, 600.0
    if "timeout" in node and node.get("timeout") is not None:
        timeout = node.node("timeout", "{share: 0.1, s: 60}")
        timeout.only("share", "s")
        timeout_share, timeout_s = timeout.share("share"), timeout.number("s", above=0)
    read = Cancellation(
        before_first_token=_timer(node.node("before_first_token")),
        after_tokens_share=tokens.share("share"),
        after_tokens_fraction=(fraction[0], fraction[1]),
        after_s=_timer(node.node("after_s")),
        timeout_share=timeout_share,
        timeout_s=timeout_s,
    )
    total = read.before_first_token.share + read.after_tokens_share + read.after_s.share
    if total > 1:
        raise node.error("after_s", f"the three shares sum to {total:g}, needs 1 at most")
    return read


def draw_cancellations(
    seed: int, cancel: Sequence[Cancellation], member: np.ndarray, stop_after: np.ndarray
) -> Decisions:
    """One decision per request. cancel: of every class; member: the number of its class; stop_after: the
    tokens of the answers; both int, shape (n,)."""
    n = len(stop_after)
    which = stream(seed, "cancel", "kind").random(n)
    patience = stream(seed, "cancel", "before_first_token").random(n)
    middle = stream(seed, "cancel", "after_tokens").random(n)
    seconds = stream(seed, "cancel", "after_s").random(n)
    impatient = stream(seed, "cancel", "timeout").random(n)
    kind = np.zeros(n, dtype=np.int64)
    value = np.full(n, np.nan)
    timeout_s = np.full(n, np.nan)
    for number, one in enumerate(cancel):
        mine = np.flatnonzero(member == number)
        first = one.before_first_token.share
        second = first + one.after_tokens_share
        third = second + one.after_s.share
        kind[mine] = np.searchsorted([first, second, third], which[mine], side="right")
        early, midway, late = (mine[kind[mine] == k] for k in (0, 1, 2))
        low, high = one.after_tokens_fraction
        value[early] = one.before_first_token.seconds(patience[early])
        fraction = low + (high - low) * middle[midway]
        value[midway] = np.maximum(1, np.rint(fraction * stop_after[midway]))
        value[late] = one.after_s.seconds(seconds[late])
        timeout_s[mine[impatient[mine] < one.timeout_share]] = one.timeout_s
    # Codes so far: 0 before_first_token, 1 after_tokens, 2 after_s, 3 none.
    return Decisions(Texts((kind + 1) % 4, CANCEL_KINDS), value, timeout_s)


def _timer(node: Settings) -> Timer:
    node.only("share", "p50_s", "sigma")
    return Timer(node.share("share"), node.number("p50_s", above=0), node.number("sigma", least=0))
