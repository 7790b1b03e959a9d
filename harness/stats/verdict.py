"""From an effect to a word, and to how many rounds the word would take.

The limit is the smallest effect that matters, symmetric in ratios: with 0.05, from 1 / 1.05 to 1.05 nothing
has happened. So swapped arms get the mirrored word, always."""

from __future__ import annotations

import math
import statistics
from typing import Literal

from harness.stats.effect import Effect, t_quantile

Better = Literal["lower", "higher"]
Verdict = Literal["better", "worse", "same", "inconclusive"]

LIMIT = 0.05
MOST_ROUNDS = 1000
"""Beyond these nobody waits: the answer is that it will not be decided."""


def decide(effect: Effect, *, better: Better, limit: float = LIMIT) -> Verdict:
    """better or worse: the whole interval, and with it the estimate, lies beyond the limit; same: the whole
    interval lies within it (two one-sided tests); else inconclusive."""
    if effect.low is None or effect.high is None:
        return "inconclusive"
    margin = 1 + limit
    if 1 / margin <= effect.low and effect.high <= margin:
        return "same"
    if effect.low > margin:
        return "worse" if better == "lower" else "better"
    if effect.high < 1 / margin:
        return "better" if better == "lower" else "worse"
    return "inconclusive"


def rounds_needed(effect: Effect, *, better: Better, limit: float = LIMIT) -> int | None:
    """Rounds in all until decide() would find a word, if later ones scatter about the same estimate as these
    did. None: nothing to go by, or more than MOST_ROUNDS (an effect of about the limit)."""
    if decide(effect, better=better, limit=limit) != "inconclusive":
        return effect.rounds
    logs = [math.log(ratio) for ratio in effect.per_round if ratio]
    if effect.ratio is None or len(logs) < 2:
        return None
    spread = statistics.stdev(logs)
    room = abs(abs(math.log(effect.ratio)) - math.log1p(limit))
    for rounds in range(effect.rounds + 1, MOST_ROUNDS + 1):
        if t_quantile(rounds - 1, effect.confidence) * spread / math.sqrt(rounds) < room:
            return rounds
    return None
