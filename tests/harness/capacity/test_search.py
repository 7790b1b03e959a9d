"""The search against known truths: a pressure that crosses 1 at a given rate, with and without noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.capacity.search import Interval, Rules, Search


def play(search, pressure, most=200):
    """The rates that were probed, until the search is satisfied."""
    rates = []
    while (rate := search.next()) is not None:
        assert len(rates) < most
        rates.append(rate)
        search.tell(rate, pressure(rate))
    return rates


@given(
    capacity=st.floats(0.05, 15),
    guess=st.just(1.0),
    slope=st.floats(1.5, 20),
    tolerance=st.sampled_from([0.02, 0.05, 0.2]),
)
@settings(max_examples=60, deadline=None)
def test_without_noise_the_truth_is_within_and_the_interval_is_narrow(capacity, guess, slope, tolerance):
    search = Search(guess, Rules(tolerance=tolerance, probes=200))
    play(search, lambda rate: (rate / capacity) ** slope)
    found = search.interval()
    assert found.low <= capacity <= found.high
    assert not found.violations
    if slope > 4 and not found.unclear:
        assert found.within(tolerance)


def test_a_step_is_found_in_few_probes_and_no_end_stands_on_a_single_one():
    """Far from the limit on both sides, as a queue that is stable or is not."""
    search = Search(10.0)
    rates = play(search, lambda rate: 0.3 if rate <= 7.3 else 5.0)
    found = search.interval()
    assert found.within(0.05)
    assert found.low <= 7.3 < found.high
    assert not found.unclear
    assert len(rates) <= 10
    assert len(search.seen[found.low]) >= 2
    assert len(search.seen[found.high]) >= 2


@pytest.mark.parametrize(("slope", "noise", "least"), [(10, 0.3, 0.92), (5, 0.15, 0.95), (5, 0.5, 0.8)])
def test_the_interval_covers_the_truth_of_noisy_probes(slope, noise, least):
    """Heavy-tailed noise on the log pressure, as near saturation. The search does not know it."""
    rng = np.random.default_rng(7)
    covered, widths = [], []
    for _ in range(200):
        capacity = math.exp(rng.normal(0, 0.2))
        search = Search(1.0)
        play(
            search, lambda rate, c=capacity: (rate / c) ** slope * math.exp(noise * rng.standard_t(4) / 1.41)
        )
        found = search.interval()
        low, high = found.low or 0.0, found.high or math.inf
        covered.append(low <= capacity <= high)
        widths.append(high / low - 1 if low else math.inf)
    assert np.mean(covered) >= least
    assert np.median(widths) < 0.35


def test_a_rate_near_the_limit_is_repeated_until_it_is_clear_or_the_repeats_are_used():
    search = Search(1.0, Rules(repeats=3))
    first = search.next()
    search.tell(first, 0.9)
    assert search.verdict(first) == "open"
    assert search.next() == first
    search.tell(first, 1.1)
    assert search.next() == first
    search.tell(first, 1.0)
    assert search.verdict(first) == "unclear"
    assert search.next() != first
    assert search.interval() == Interval(None, None, (first,))


def test_a_clear_first_probe_needs_no_repeat():
    search = Search(1.0)
    first = search.next()
    search.tell(first, 0.2)
    assert search.verdict(first) == "held"
    assert search.next() > first


def test_a_higher_rate_that_held_is_told_and_both_lie_inside():
    search = Search(1.0)
    for rate, pressure in ((0.5, 0.1), (0.8, 9.0), (1.0, 0.1), (1.4, 9.0)):
        search.tell(rate, pressure)
        search.tell(rate, pressure)
    found = search.interval()
    assert (found.low, found.high) == (0.5, 1.4)
    assert found.violations == ((0.8, 1.0),)


def test_an_slo_out_of_reach_and_one_that_nothing_breaks_end_by_themselves():
    low = Search(1.0)
    assert len(play(low, lambda rate: 3.0)) <= 6  # a probe of a low rate takes long
    assert low.interval().low is None
    assert low.interval().high < 0.05
    high = Search(1.0)
    play(high, lambda rate: 0.1)
    assert high.interval().high is None
    assert high.interval().low > 10


def test_where_nothing_was_served_the_rate_has_failed():
    search = Search(1.0)
    rate = search.next()
    search.tell(rate, math.inf)
    assert search.verdict(rate) == "failed"


def test_pressure_that_hardly_depends_on_the_rate_ends_with_the_probes_and_a_wide_interval():
    rng = np.random.default_rng(1)
    search = Search(1.0, Rules(probes=24))
    rates = play(search, lambda rate: rate**0.2 * math.exp(rng.normal(0, 0.15)))
    assert len(rates) == 24
    assert search.interval().unclear
