"""Crossings of curves whose truth is known."""

import math
from collections import Counter

import numpy as np
import pytest

from harness.capacity.crossover import Place, crossings, locate, next_place

XS = (1.0, 2.0, 4.0, 8.0)


def place(x, logs, reference=None):
    base = np.ones(len(logs)) if reference is None else reference
    return Place(x, tuple(base), tuple(base * np.exp(logs)))


def curve(truth, noise, rounds=4, xs=XS, rng=None):
    """The arm has less below the truth and more above it."""
    rng = rng or np.random.default_rng(0)
    shared = rng.lognormal(0, 0.3, rounds)  # what both engines meet in a round
    return [place(x, math.log(x / truth) + rng.normal(0, noise, rounds), shared) for x in xs]


@pytest.mark.parametrize("logarithmic", [True, False])
def test_a_crossing_without_noise_is_where_the_lines_meet_zero(logarithmic):
    found = locate(curve(3.0, 1e-9), logarithmic=logarithmic)
    assert found.kind == "crossover"
    assert found.arm_above is True
    assert found.x == pytest.approx(3.0, rel=1e-6 if logarithmic else 0.1)
    assert found.low == pytest.approx(found.high)


def test_the_intervals_cover_and_names_do_not_matter():
    rng = np.random.default_rng(3)
    covered = []
    for _ in range(60):
        places = curve(3.0, 0.15, rng=rng)
        found = locate(places)
        swapped = locate([Place(p.x, p.arm, p.reference) for p in places])
        assert swapped.kind == found.kind
        if found.kind == "crossover":
            covered.append(found.low <= 3.0 <= found.high)
            assert swapped.x == pytest.approx(found.x)
            assert swapped.arm_above is not found.arm_above
    assert len(covered) > 45
    assert np.mean(covered) > 0.9


def test_an_inconclusive_one_says_what_is_clear_nevertheless():
    wide = np.array([-1.5, 1.4, -0.1, 0.3])
    found = locate([place(1.0, wide), place(2.0, wide / 100 - 0.5), place(4.0, wide / 100 - 0.9)])
    assert (found.kind, found.reason) == (
        "inconclusive",
        "the ratio is below 1 at 2, 4 and not clear of the noise at 1",
    )


def test_engines_that_do_not_differ_have_no_crossover():
    """Many places, whose noise changes sign all the time: no crossing may be made of that."""
    rng = np.random.default_rng(5)
    kinds = Counter(
        locate([place(x, rng.normal(0, 0.2, 4)) for x in np.geomspace(1, 8, 8)]).kind for _ in range(60)
    )
    assert kinds["crossover"] <= 3
    assert kinds["none"] == 0
    assert locate([place(x, rng.normal(0, 0.001, 4)) for x in XS]).kind == "same"


def test_no_crossover_is_a_result():
    found = locate(curve(0.3, 0.1))
    assert found.kind == "none"
    assert found.arm_above is True
    assert locate(curve(50.0, 0.1)).arm_above is False


def test_a_truth_at_the_edge_is_inconclusive_rather_than_made_up():
    rng = np.random.default_rng(2)
    kinds = Counter(locate(curve(1.02, 0.3, rng=rng)).kind for _ in range(40))
    assert kinds["inconclusive"] > 20
    assert kinds["none"] < 5


def test_engines_that_change_places_twice_are_told():
    places = [
        place(x, sign + np.array([-0.01, 0.0, 0.01])) for x, sign in zip(XS, (1, -1, 1, 1), strict=True)
    ]
    found = locate(places)
    assert found.kind == "inconclusive"
    assert "more than once" in found.reason


def test_figures_that_have_no_ratio_are_told():
    places = [Place(1.0, (1.0, 2.0), (0.0, 1.0)), Place(2.0, (None, None), (1.0, 1.0))]
    found = locate(places)
    assert found.kind == "inconclusive"
    assert "0" in found.reason


def test_the_next_place_halves_the_gap_of_the_crossing_until_it_is_narrow():
    places = curve(3.0, 1e-9)
    assert next_place(places) == pytest.approx(math.sqrt(8), rel=1e-3)
    for _ in range(10):
        x = next_place(places)
        if x is None:
            break
        places.append(curve(3.0, 1e-9, xs=(x,))[0])
    assert next_place(places) is None
    xs = sorted(p.x for p in places)
    below, above = max(x for x in xs if x < 3), min(x for x in xs if x > 3)
    assert math.log(above / below) <= 0.1 * math.log(8)
    assert next_place(curve(50.0, 0.01)) is None


def test_crossings_of_a_line():
    at = np.array([0.0, 1.0, 2.0, 3.0])
    assert crossings(at, np.array([-1.0, 1.0, 1.0, -3.0])).tolist() == [0.5, 2.25]
    assert crossings(at, np.array([1.0, 2.0, 3.0, 4.0])).size == 0
