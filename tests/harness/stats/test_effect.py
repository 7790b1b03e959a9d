"""Intervals that hold what they promise for few rounds, and words that do not depend on the arms' order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.stats import confidence_at, decide, paired_effect, rounds_needed
from harness.stats.effect import t_quantile

VALUES = st.one_of(
    st.none(),
    st.sampled_from([0.0, math.inf, math.nan, -1.0]),
    st.floats(1e-300, 1e300),
)


def noisy_rounds(rng: np.random.Generator, runs: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """(reference, arm) of shape [runs, rounds]: each round has an effect of its own on both (the machine),
    each pass noise of its own; the arm truly takes 1.2 times as long."""
    machine = rng.lognormal(0, 0.3, (runs, rounds))
    reference = machine * rng.lognormal(0, 0.08, (runs, rounds))
    return reference, 1.2 * machine * rng.lognormal(0, 0.12, (runs, rounds))


@pytest.mark.parametrize("rounds", [3, 4, 5, 7, 10])
def test_the_interval_covers_the_true_ratio(rounds):
    runs = 2000
    reference, arm = noisy_rounds(np.random.default_rng(rounds), runs, rounds)
    covered = 0
    for r, a in zip(reference, arm, strict=True):
        effect = paired_effect(r.tolist(), a.tolist())
        covered += effect.low <= 1.2 <= effect.high
    assert 0.93 < covered / runs < 0.97  # no wider than it has to be either


def test_a_percentile_bootstrap_would_not_cover():
    """Why it is Student's t: the reason that effect.py gives."""
    rng, runs = np.random.default_rng(1), 500
    shares = {}
    for rounds in (3, 10):
        reference, arm = noisy_rounds(rng, runs, rounds)
        logs = np.log(arm / reference)
        drawn = rng.integers(0, rounds, (runs, 400, rounds))
        means = np.take_along_axis(logs[:, None, :], drawn, axis=2).mean(axis=2)
        low, high = np.quantile(means, [0.025, 0.975], axis=1)
        shares[rounds] = np.mean((low <= math.log(1.2)) & (math.log(1.2) <= high))
    assert shares[3] < 0.85
    assert shares[10] < 0.935


@given(st.lists(st.tuples(VALUES, VALUES), max_size=8), st.floats(0.0, 0.5))
def test_swapping_the_arms_mirrors_everything(pairs, limit):
    reference, arm = [r for r, _ in pairs], [a for _, a in pairs]
    effect, swapped = paired_effect(reference, arm), paired_effect(arm, reference)
    assert effect.rounds == swapped.rounds
    for one, other in ((effect.ratio, swapped.ratio), (effect.low, swapped.high)):
        assert (one is None) == (other is None)
        assert one is None or math.log(one) == pytest.approx(-math.log(other), rel=1e-9, abs=1e-9)
    mirrored = {"better": "worse", "worse": "better", "same": "same", "inconclusive": "inconclusive"}
    words = decide(effect, better="lower", limit=limit), decide(swapped, better="lower", limit=limit)
    # An interval that ends on the limit to the last bit may fall on either side of it.
    assert words[1] == mirrored[words[0]] or "inconclusive" in words
    assert decide(effect, better="higher", limit=limit) == mirrored[words[0]]
    assert effect.reason or None not in (effect.ratio, effect.low, effect.high)
    needed = rounds_needed(effect, better="lower", limit=limit)
    assert needed is None or needed >= effect.rounds


@pytest.mark.parametrize(
    ("reference", "arm", "ratio", "reason"),
    [
        ([0, 0, 0], [0, 0, 0], 1.0, None),
        ([0, 1, 1], [1, 1, 1], None, "the reference is 0 in round 1: no ratio"),
        ([1, 1, 1], [1, 0, 1], None, "the arm is 0 in round 2: no ratio"),
        ([1, math.inf], [1, 1], None, "the reference is inf in round 2: no ratio"),
        ([None, 2, 2], [1, 4, 4], 2.0, None),
        ([None, None], [1, 1], None, "was measured in no round"),
        ([], [], None, "was measured in no round"),
        ([2], [4], 2.0, "one round has no interval"),
        ([1e-300] * 3, [1e300] * 3, math.inf, None),
    ],
)
def test_values_without_a_ratio_have_a_defined_answer(reference, arm, ratio, reason):
    effect = paired_effect(reference, arm)
    assert effect.reason == reason
    if ratio is None:
        assert effect.ratio is effect.low is effect.high is None
        assert decide(effect, better="lower") == "inconclusive"
        assert rounds_needed(effect, better="lower") is None
    else:
        assert effect.ratio == pytest.approx(min(ratio, math.exp(700.0)))


def test_unlike_numbers_of_rounds_are_refused():
    with pytest.raises(ValueError, match="zip"):
        paired_effect([1, 2], [1])


@pytest.mark.parametrize(
    ("arm", "lower", "higher"),
    [
        ([1.2, 1.21, 1.22], "worse", "better"),
        ([0.8, 0.81, 0.82], "better", "worse"),
        ([1.01, 1.0, 0.99], "same", "same"),
        ([1.0, 1.2, 1.1], "inconclusive", "inconclusive"),
        ([1.04, 1.05, 1.06], "inconclusive", "inconclusive"),  # an effect, but not surely past the limit
    ],
)
def test_words(arm, lower, higher):
    effect = paired_effect([1.0, 1.0, 1.0], arm)
    assert decide(effect, better="lower", limit=0.05) == lower
    assert decide(effect, better="higher", limit=0.05) == higher


def test_rounds_needed_are_enough_when_the_scatter_stays():
    arm = [1.0, 1.3, 1.12, 1.25]
    effect = paired_effect([1.0] * 4, arm)
    needed = rounds_needed(effect, better="lower", limit=0.05)
    assert needed is not None
    assert needed > 4
    logs = np.log(arm)
    for rounds, enough in ((needed, True), (needed - 1, False)):  # that many with this mean and this spread
        drawn = np.random.default_rng(0).normal(size=rounds)
        drawn = (drawn - drawn.mean()) / drawn.std(ddof=1) * logs.std(ddof=1) + logs.mean()
        later = paired_effect([1.0] * rounds, np.exp(drawn).tolist())
        assert (decide(later, better="lower", limit=0.05) == "worse") == enough
    assert rounds_needed(paired_effect([1, 1, 1], [1.0, 1.05, 1.05**2]), better="lower", limit=0.05) is None


def test_looks_spend_no_more_than_there_is():
    for looks in range(1, 12):
        assert sum(1 - confidence_at(k, looks) for k in range(1, looks + 1)) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="look 3 of 2"):
        confidence_at(3, 2)


def test_t_quantile_is_students():
    assert t_quantile(4, 0.95) == pytest.approx(2.776445, abs=1e-6)
    assert t_quantile(2, 0.99) == pytest.approx(9.924843, abs=1e-6)
