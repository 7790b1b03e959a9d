"""Paired statistics over few rounds: pure functions, no records and no files.

A round is one measured pass of each arm, back to back; what the machine did meanwhile is in both, so the
ratio of the two is what counts, and the round is the unit: requests of one pass share its noise and are no
independent samples of it."""

from harness.stats.effect import Effect, paired_effect
from harness.stats.looks import confidence_at
from harness.stats.verdict import Better, Verdict, decide, rounds_needed

__all__ = ["Better", "Effect", "Verdict", "confidence_at", "decide", "paired_effect", "rounds_needed"]
