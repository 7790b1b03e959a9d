from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workloads import WorkloadError
from workloads.arrivals import Arrivals, Burst, draw_arrivals, place, read_arrivals
from workloads.fitting.arrivals import index_of_dispersion
from workloads.settings import Settings


def times(
    arrivals: Arrivals, rate: float, n: int | None = None, duration: float | None = None, seed: int = 0
):
    return draw_arrivals(seed, arrivals, rate=rate, requests=n, duration_s=duration)


def test_poisson_gaps_are_exponential_and_counts_have_dispersion_one():
    t = times(Arrivals("poisson"), rate=8, n=20_000)
    gaps = np.diff(t)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert stats.kstest(gaps * 8, "expon").statistic < stats.kstwo.ppf(0.999, len(gaps))
    for window in (1.0, 10.0):
        # 2,500 and 250 windows: the standard error is sqrt(2 / windows).
        assert index_of_dispersion(t, window) == pytest.approx(1, abs=4 * np.sqrt(2 * window / t[-1]))


@pytest.mark.parametrize("cv", [0.5, 1.07, 2.0, 4.0])
def test_gamma_gaps_have_the_cv_and_the_rate(cv):
    t = times(Arrivals("gamma", cv=cv), rate=5, n=40_000)
    gaps = np.diff(t)
    assert gaps.mean() == pytest.approx(0.2, rel=0.02 + 0.02 * cv)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)
    if cv > 2:
        return  # a share of such gaps is below the resolution of a float
    shape = 1 / cv**2
    ks = stats.kstest(gaps / gaps.mean(), stats.gamma(shape, scale=1 / shape).cdf).statistic
    assert ks < stats.kstwo.ppf(0.999, len(gaps))


def test_constant_gaps_are_constant():
    assert times(Arrivals("constant"), rate=4, n=5).tolist() == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_at_once_is_at_zero():
    assert times(Arrivals("at_once"), rate=1, n=3).tolist() == [0, 0, 0]


def test_bursts_multiply_the_rate_inside_episodes_and_keep_the_mean():
    burst = Burst(factor=6, on_s=2, off_s=8)
    t = times(Arrivals("poisson", burst=burst), rate=10, n=60_000)
    inside = (t % 10) >= 8
    quiet, loud = np.sum(~inside) / 8, np.sum(inside) / 2
    assert loud / quiet == pytest.approx(6, rel=0.05)
    assert len(t) / t[-1] == pytest.approx(10, rel=0.03)
    dispersion = index_of_dispersion(t, 2.0)
    assert dispersion is not None
    assert dispersion > 5


@settings(max_examples=60, deadline=None)
@given(
    factor=st.floats(0.1, 20), on=st.floats(0.1, 30), off=st.floats(0.1, 30), rate=st.floats(0.1, 50),
    counts=st.lists(st.floats(0, 1e4), min_size=2, max_size=30),
)  # fmt: skip
def test_placing_keeps_the_order_and_full_periods_have_the_mean_rate(factor, on, off, rate, counts):
    burst = Burst(factor, on, off)
    placed = place(np.sort(np.array(counts)), rate, burst)
    assert np.all(np.diff(placed) >= -1e-9)
    period = np.array([rate * (on + off) * 3])
    assert place(period, rate, burst)[0] == pytest.approx(3 * (on + off), rel=1e-6)


def test_another_rate_is_the_same_pattern_stretched():
    slow, fast = times(Arrivals("gamma", cv=2), rate=1, n=500), times(Arrivals("gamma", cv=2), rate=8, n=500)
    assert np.allclose(slow, fast * 8)


@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant"])
def test_pinned_arrivals_take_the_time_that_their_number_is_expected_in(kind):
    arrivals = Arrivals(kind, cv=3, pinned=True)
    by_count, by_time = times(arrivals, 20, n=400), times(arrivals, 20, duration=20)
    assert len(by_count) == 400
    assert by_count[-1] == pytest.approx(20)
    assert (np.diff(by_count) >= 0).all()
    assert by_time == pytest.approx(by_count)  # 20 s at 20/s: the same 400
    free = times(Arrivals(kind, cv=3), 20, n=400)
    assert by_count == pytest.approx(free * 20 / free[-1])  # the same pattern


@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant"])
def test_duration_ends_the_arrivals_and_is_a_prefix_of_a_longer_one(kind):
    short, long = times(Arrivals(kind), rate=20, duration=30), times(Arrivals(kind), rate=20, duration=90)
    assert 30 - 1 < short[-1] <= 30
    assert np.array_equal(short, long[: len(short)])
    assert long[len(short)] > 30
    assert len(times(Arrivals(kind), rate=20, n=7, duration=30)) == 7
    assert len(times(Arrivals(kind), rate=20, n=100_000, duration=30)) == len(short)


def test_a_very_uneven_process_still_fills_its_duration():
    t = times(Arrivals("gamma", cv=9), rate=50, duration=20, seed=3)
    assert t[-1] <= 20
    more = times(Arrivals("gamma", cv=9), rate=50, n=len(t) + 1, seed=3)
    assert more[-1] > 20


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: times(Arrivals("poisson"), rate=None, n=3), "workload.rate=null"),
        (lambda: times(Arrivals("poisson"), rate=3), "workload.requests=null"),
        (lambda: times(Arrivals("at_once"), rate=3, duration=3), "workload.requests=null"),
        (lambda: times(Arrivals("poisson"), rate=1e6, duration=1e4), "makes more than 5000000 requests"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, words):
    with pytest.raises(WorkloadError, match=words):
        call()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "pareto"}, "workload.arrivals.kind=pareto: choose from poisson"),
        ({"cv": 0}, "workload.arrivals.cv=0: needs a number above 0"),
        ({"burst": {"factor": -1, "on_s": 1, "off_s": 1}}, "workload.arrivals.burst.factor=-1"),
        ({"burst": {"factor": 2, "on_s": 1}}, "workload.arrivals.burst.off_s is missing"),
        ({"burst": None}, "workload.arrivals.burst=None: needs a mapping"),
        ({"shape": 2}, "workload.arrivals.shape is not a setting"),
    ],
)
def test_wrong_settings_are_named(changes, words):
    values = {"kind": "poisson", "cv": 1, "burst": {"factor": 1, "on_s": 1, "off_s": 1}, **changes}
    with pytest.raises(WorkloadError, match=words):
        read_arrivals(Settings(values, "workload.arrivals"))
