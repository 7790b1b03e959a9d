from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workloads import WorkloadError
from workloads.lengths import (
    Lognormal,
    LognormalMixture,
    QuantileTable,
    correlate,
    read_answer,
    read_distribution,
    scaled,
)
from workloads.settings import Settings
from workloads.streams import stream
from workloads.tables import tables

ROOT = Path(__file__).parents[2]

SHAREGPT_ANSWERS = ((0.225, 4.052, 1.316), (0.775, 5.707, 0.532))


def uniform(n: int, seed: int = 0) -> np.ndarray:
    return stream(seed, "test").random(n)


def read(**values):
    return read_distribution(Settings(values, "workload.x"))


def ks_bound(n: int) -> float:
    """The distance that a right sample passes with probability 0.999."""
    return float(stats.kstwo.ppf(0.999, n))


def test_lognormal_has_its_distribution():
    sample = Lognormal(5.39, 0.78)(uniform(20_000))
    assert stats.kstest(np.log(sample), "norm", args=(5.39, 0.78)).statistic < ks_bound(20_000)
    assert Lognormal(5.39, 0.78)(np.array([0.5]))[0] == pytest.approx(np.exp(5.39))


def test_mixture_has_its_distribution():
    sample = LognormalMixture(SHAREGPT_ANSWERS)(uniform(20_000))

    def cdf(x):
        return sum(w * stats.norm.cdf((x - mu) / sigma) for w, mu, sigma in SHAREGPT_ANSWERS)

    assert stats.kstest(np.log(sample), cdf).statistic < ks_bound(20_000)
    # What ShareGPT's answers measured: p25 144, p50 266, p75 398, p90 581; the fit's KS was 0.032.
    for measured, share in ((144, 0.25), (266, 0.5), (398, 0.75), (581, 0.9)):
        assert np.mean(sample <= measured) == pytest.approx(share, abs=0.04)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.floats(0.01, 1), st.floats(-1, 12), st.floats(0.01, 3)), min_size=1, max_size=4
    ),
    u=st.lists(st.floats(0, 1), min_size=2, max_size=20),
)
def test_mixture_quantiles_rise_and_invert_the_distribution_function(parts, u):
    mixture = LognormalMixture(tuple(parts))
    shares = np.sort(np.array(u))
    values = mixture(shares)
    assert np.all(np.diff(values) >= 0)
    inside = (shares > 1e-9) & (shares < 1 - 1e-9)
    below = sum(w * stats.norm.cdf((np.log(values[inside]) - mu) / sigma) for w, mu, sigma in parts)
    assert np.allclose(below / sum(w for w, _, _ in parts), shares[inside], atol=1e-6)


def test_quantile_table_meets_its_points_and_is_straight_between():
    table = QuantileTable((0, 50, 100), (10, 20, 120))
    assert table(np.array([0, 0.25, 0.5, 0.75, 1.0])).tolist() == [10, 15, 20, 70, 120]
    sample = table(uniform(20_000))
    assert stats.kstest(sample, lambda x: np.interp(x, [10, 20, 120], [0, 0.5, 1])).statistic < ks_bound(
        20_000
    )


def test_discrete_values_come_in_their_shares():
    sample = read(dist="discrete", values=[6, 2, 0], weights=[7, 2, 1])(uniform(20_000))
    assert np.mean(sample == 6) == pytest.approx(0.7, abs=0.015)
    assert np.mean(sample == 2) == pytest.approx(0.2, abs=0.015)
    assert np.mean(sample == 0) == pytest.approx(0.1, abs=0.015)


def test_clipping_moves_only_what_is_outside():
    u = uniform(5000)
    free, clipped = (
        read(dist="lognormal", mu=4, sigma=1),
        read(dist="lognormal", mu=4, sigma=1, min=20, max=100),
    )
    assert np.array_equal(clipped(u), np.clip(free(u), 20, 100))
    assert (clipped(u) == 100).mean() > 0.2


@settings(max_examples=30, deadline=None)
@given(rho=st.floats(-0.95, 0.95), seed=st.integers(0, 50))
def test_correlate_gives_the_rank_correlation_and_keeps_the_distribution(rho, seed):
    beside = np.exp(stream(seed, "beside").standard_normal(3000))
    u = correlate(uniform(3000, seed), beside, rho)
    assert stats.spearmanr(beside, u).statistic == pytest.approx(rho, abs=0.07)
    assert stats.kstest(u, "uniform").statistic < ks_bound(3000)


def test_no_correlation_leaves_the_draw_alone():
    u = uniform(10)
    assert correlate(u, np.arange(10), 0.0) is u


def test_scaling_rounds_and_keeps_one_token():
    assert scaled(np.array([0.2, 1, 10, 511.9]), 0.25).tolist() == [1, 1, 2, 128]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dist": "normal"}, "workload.x.dist=normal: choose from constant, discrete, lognormal"),
        ({"dist": "lognormal", "mu": 3}, "workload.x.sigma is missing"),
        ({"dist": "lognormal", "mu": float("nan"), "sigma": 1}, "workload.x.mu=nan: needs a number"),
        ({"dist": "lognormal", "mu": 3, "sigma": -1}, "workload.x.sigma=-1: needs a number of 0 or more"),
        ({"dist": "lognormal", "mu": 3, "sigma": 1, "mx": 9}, "workload.x.mx is not a setting"),
        ({"dist": "mixture", "parts": [[1, 2]]}, "workload.x.parts=.*rows of 3 numbers"),
        ({"dist": "mixture", "parts": [[0, 2, 1]]}, "weight and sigma above 0"),
        ({"dist": "quantiles", "points": [[0, 1], [0, 2]]}, "rising"),
        ({"dist": "quantiles", "points": [[0, 5], [50, 2]]}, "not falling"),
        ({"dist": "quantiles", "points": []}, "workload.x.points"),
        ({"dist": "discrete", "values": [1, 2], "weights": [1]}, "one weight"),
        ({"dist": "constant", "tokens": True}, "workload.x.tokens=True"),
        (
            {"dist": "constant", "tokens": 5, "min": 9, "max": 3},
            "workload.x.max=3: needs a number of 9 or more",
        ),
    ],
)
def test_wrong_settings_are_named(values, words):
    with pytest.raises(WorkloadError, match=words):
        read(**values)


@pytest.mark.parametrize("name", tables())
def test_shipped_tables_are_named_sourced_and_drawn(name):
    about = yaml.safe_load((Path(files("workloads") / "data") / f"{name}.yaml").read_text())
    assert about["licence"]
    assert name.split("_")[0] in (ROOT / "NOTICE").read_text(), about["source"]
    prompts = read(dist="quantiles", table=f"{name}/input")(uniform(20_000))
    points = dict(about["input"]["points"])
    for percentile in (5, 50, 95):
        assert np.percentile(prompts, percentile) == pytest.approx(points[percentile], rel=0.08)
    answer = read_answer(Settings({"dist": "joint", "table": name}, "x"))
    answers = answer.draw(uniform(20_000, seed=1), prompts)
    # Every tenth of the prompts has a table of its own, and together they are the answers of all.
    marginal = read(dist="quantiles", table=f"{name}/output")(uniform(20_000))
    assert stats.ks_2samp(answers, marginal).statistic < 0.03
    edges = np.percentile(prompts, [10, 90])
    low, high = (np.median(answers[rows]) for rows in (prompts < edges[0], prompts > edges[1]))
    assert low != high


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("moon", "x.table=moon: no such table; choose from azure2023_code"),
        ("ragpulse/words", "x.table=ragpulse/words: has no such column; choose from ragpulse/input"),
    ],
)
def test_tables_that_are_not_there(table, words):
    with pytest.raises(WorkloadError, match=words):
        read_distribution(Settings({"dist": "quantiles", "table": table}, "x"))
