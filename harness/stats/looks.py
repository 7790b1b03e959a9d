"""Looking again after every round without finding more than there is.

Who stops at the first look that shows an effect has as many chances for a false alarm as looks. So the
allowed error of the whole comparison is spent in parts, one a look, which together are never more than it
(the union bound holds however looks depend on each other). Half goes to the first look, the rest in equal
parts to the later ones: the spending of Lan and DeMets (Biometrika 1983) in its simplest form."""

from __future__ import annotations

from harness.stats.effect import CONFIDENCE


def confidence_at(look: int, looks: int, *, confidence: float = CONFIDENCE) -> float:
    """Of the intervals at this look (from 1) of so many planned ones. One planned look has all of it."""
    if not 1 <= look <= looks:
        raise ValueError(f"look {look} of {looks}: needs one from 1 to {looks}")
    error = 1 - confidence
    if looks == 1:
        return confidence
    return 1 - (error / 2 if look == 1 else error / 2 / (looks - 1))
