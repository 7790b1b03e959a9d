"""Swings of the rate: slow factors, days, silences, clusters, and one process for each tenant."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.support.workload_configs import workload
from workloads import WorkloadError, draw
from workloads.arrivals import draw_arrivals, read_arrivals
from workloads.fitting.arrivals import index_of_dispersion
from workloads.settings import Settings

NODE = {"kind": "poisson", "cv": 1, "burst": {"factor": 1, "on_s": 5, "off_s": 15}}
ONE, TWO = ({"dist": "lognormal", "mu": mu, "sigma": 1.0} for mu in (1.8, 2.1))


def times(rate=5.0, n=None, duration=None, seed=0, **changes):
    arrivals = read_arrivals(Settings({**NODE, **changes}, "workload.arrivals"))
    return draw_arrivals(seed, arrivals, rate=rate, requests=n, duration_s=duration)


def test_a_slow_factor_keeps_the_mean_and_raises_the_dispersion_with_the_window():
    sigma, tau_s, rate = 0.21, 40.0, 20.0
    drawn = times(rate, duration=40_000, factor={"sigma": sigma, "tau_s": tau_s})
    assert len(drawn) / 40_000 == pytest.approx(rate, rel=0.03)
    for window in (1.0, 10.0):
        # Var of the mean of exp(AR(1)) over a window: sigma^2 at 0, less the longer the window.
        x = window / tau_s
        variance = (np.exp(sigma**2) - 1) * 2 * (x - 1 + np.exp(-x)) / x**2
        assert index_of_dispersion(drawn, window) == pytest.approx(1 + rate * window * variance, rel=0.12)
    assert index_of_dispersion(times(rate, duration=4_000), 10.0) == pytest.approx(1, abs=0.25)


def test_another_rate_meets_the_same_swings():
    slow, fast = (times(r, duration=600, factor={"sigma": 1.0, "tau_s": 60}) for r in (5.0, 50.0))
    counts = [np.histogram(t, bins=10, range=(0, 600))[0] for t in (slow, fast)]
    assert np.corrcoef(*counts)[0, 1] > 0.9


def test_a_day_has_the_shape_of_its_curve():
    drawn = times(2.0, duration=86_400 * 2, day={"curve": "azure2024_code", "from_hour": 0})
    hours = np.histogram(drawn % 86_400, bins=24, range=(0, 86_400))[0] / (2 * 3600 * 2.0)
    assert hours.mean() == pytest.approx(1, abs=0.02)
    assert hours[19] / hours[8] == pytest.approx(2.76 / 0.29, rel=0.25)
    evening = times(2.0, duration=3600, day={"curve": "azure2024_code", "from_hour": 19})
    assert len(evening) > 2 * 2.0 * 3600, "the busiest hour"


def test_bursts_and_silences_keep_the_mean_rate():
    windows = {"on_s": {"dist": "constant", "value": 10}, "off_s": {"dist": "constant", "value": 30}}
    drawn = times(3.0, duration=4_000, on_off=windows)
    assert (drawn % 40 <= 10).all()
    assert len(drawn) / 4_000 == pytest.approx(3.0, rel=0.05)
    irregular = times(3.0, n=30_000, on_off={"on_s": ONE, "off_s": TWO})
    assert 30_000 / irregular[-1] == pytest.approx(3.0, rel=0.15)
    gaps = np.diff(irregular)
    assert gaps.std() / gaps.mean() > 3
    both = times(3.0, duration=2_000, on_off=windows, factor={"sigma": 0.2, "tau_s": 100})
    assert (both % 40 <= 10.001).all()


def test_clusters_come_within_milliseconds_at_the_same_rate():
    drawn = times(4.0, n=20_000, cluster={"size": 2.5, "within_s": 0.003})
    assert (np.diff(drawn) >= 0).all()
    assert 20_000 / drawn[-1] == pytest.approx(4.0, rel=0.05)
    near = np.diff(drawn) < 0.02
    assert near.mean() == pytest.approx(1 - 1 / 2.5, abs=0.05)


@pytest.mark.parametrize(
    "more", [{}, {"factor": {"sigma": 0.3, "tau_s": 50}}, {"on_off": {"on_s": ONE, "off_s": TWO}}]
)
def test_more_requests_begin_with_the_same_times(more):
    few, many = times(n=500, **more), times(n=2_000, **more)
    assert few.tolist() == many[:500].tolist()
    assert times(duration=60, **more).tolist() == [t for t in times(n=2_000, **more) if t <= 60]


def superposed(n=20_000, **arrivals):
    node = workload("tiers")
    node["arrivals"] |= {
        "tenants": {"cv": {"dist": "constant", "value": 1.0}, "weibull_above": 1.5},
        **arrivals,
    }
    for name in node["classes"]:
        node["classes"][name]["tenants"] = {"count": 6, "zipf": 1.1}
    return draw(node, seed=0, requests=n)


def test_tenants_have_their_volumes_and_their_own_burstiness():
    schedule = superposed()
    by = Counter((r.request_class, r.tenant) for r in schedule)
    weights = np.arange(1, 7) ** -1.1
    shares = weights / weights.sum()
    for name, weight in (("interactive", 0.5), ("long_context", 0.3), ("batch", 0.2)):
        for k in range(6):
            assert by[name, f"{name}-{k + 1}"] / 20_000 == pytest.approx(weight * shares[k], abs=0.02)
    bursty = superposed(cv=1.0, tenants={"cv": {"dist": "constant", "value": 5.0}, "weibull_above": 1.5})
    for drawn, cv in ((schedule, 1.0), (bursty, 5.0)):
        own = np.diff([r.arrival_s for r in drawn if r.tenant == "interactive-1"])
        assert own.std() / own.mean() == pytest.approx(cv, rel=0.25)
    short = superposed(n=300)
    assert [r.arrival_s for r in short] == [r.arrival_s for r in schedule][:300]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": {"sigma": -1, "tau_s": 4}}, "arrivals.factor.sigma=-1: needs a number of 0 or more"),
        ({"factor": {"sigma": 9, "tau_s": 4}}, "arrivals.factor.sigma=9: needs 3 at most"),
        ({"factor": 0.2}, "factor=0.2: needs a mapping of settings, such as {sigma: 0.2, tau_s: 420}"),
        ({"day": {"curve": "mars", "from_hour": 0}}, "day.curve=mars: choose from azure2024_conv"),
        ({"day": {"curve": [1, 2], "from_hour": 0}}, "needs 24 numbers"),
        ({"on_off": {"on_s": {"dist": "constant", "value": 0}, "off_s": ONE}}, "needs seconds above 0"),
        ({"cluster": {"size": 0.5, "within_s": 1}}, "cluster.size=0.5: needs a number of 1 or more"),
        ({"factor": {"sigma": 0.1, "tau_s": 9}, "burst": {"factor": 4, "on_s": 1, "off_s": 1}},
         "burst.factor=4: factor, day and on_off swing the rate as well"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(changes, words):
    with pytest.raises(WorkloadError) as caught:
        times(n=10, **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
