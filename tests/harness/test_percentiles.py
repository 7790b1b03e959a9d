"""Percentiles, their intervals, and when they are too uncertain to be used."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics import percentiles
from harness.metrics.percentiles import (
    LEVELS,
    bootstrap_quantiles,
    describe,
    describe_censored,
    describe_pooled,
    floor_samples,
    hold_to_floor,
    interval_ranks,
    requests_needed,
    weighted_quantiles,
)

FLOORS = {"p50": 6, "p90": 36, "p95": 72, "p99": 368}


@pytest.mark.parametrize(("name", "floor"), FLOORS.items())
def test_the_floors_follow_from_the_interval(name: str, floor: int) -> None:
    q = LEVELS[name]
    assert floor_samples(q) == floor
    assert interval_ranks(floor - 1, q) is None
    assert interval_ranks(floor, q) is not None
    assert describe(np.arange(floor - 1.0))["reliable"][name] is False
    assert describe(np.arange(float(floor)))["reliable"][name] is True
    assert describe(np.arange(floor - 1.0))["ci95"][name] is None


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("n", [40, 150, 400, 1000])
def test_interval_is_equal_tailed_and_not_wider_than_needed(name: str, n: int) -> None:
    q = LEVELS[name]
    ranks = interval_ranks(n, q)
    if n < FLOORS[name]:
        assert ranks is None
        return
    assert ranks is not None
    low, high = ranks

    def below(k: int) -> float:  # P(Binomial(n, q) <= k), summed term by term: independent of the code's way
        terms = (math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(k + 1))
        return sum(math.exp(t + i * math.log(q) + (n - i) * math.log1p(-q)) for i, t in enumerate(terms))

    assert below(low - 1) <= 0.025 < below(low)
    assert 1 - below(high - 1) <= 0.025
    assert 1 - below(high - 2) > 0.025


@pytest.mark.parametrize(("name", "n"), [("p50", 50), ("p90", 60), ("p95", 120), ("p99", 400)])
def test_interval_covers_the_truth(name: str, n: int) -> None:
    """2,000 draws from an exponential distribution: at least 95 % cover, less the noise of the simulation."""
    rng = np.random.default_rng(1)
    truth = -math.log(1 - LEVELS[name])
    covered = 0
    for _ in range(2000):
        low, high = describe(rng.exponential(size=n))["ci95"][name]
        covered += low <= truth <= high
    assert covered / 2000 > 0.94


def test_percentiles_interpolate_linearly() -> None:
    block = describe([30.0, 10.0, 20.0, 40.0])
    assert (block["p50"], block["p90"], block["max"], block["mean"], block["n"]) == (
        25.0,
        37.0,
        40.0,
        25.0,
        4,
    )


def test_no_sample_is_null_and_never_zero() -> None:
    for block in (
        describe([]),
        describe([math.nan, math.inf]),
        describe_censored([math.nan]),
        describe_pooled(np.array([]), np.array([], dtype=np.int64)),
    ):
        assert block["n"] == 0
        assert [block[name] for name in ("mean", "p50", "p90", "p95", "p99", "max")] == [None] * 6
        assert not any(block["reliable"].values())


def test_failures_are_infinitely_late() -> None:
    """30 % fail at once: p50 is worse than among the survivors, and p90 is beyond any number."""
    served = np.arange(1.0, 71.0)
    block = describe_censored(np.concatenate([served, np.full(30, np.inf)]))
    assert block["p50"] == 50.0 > describe(served)["p50"]
    assert block["p90"] is block["p99"] is block["max"] is block["mean"] is None
    assert block["ci95"]["p90"] == [None, None]
    assert block["ci95"]["p50"][0] == pytest.approx(40, abs=1)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=40),
    st.floats(0.01, 0.99),
)
@settings(max_examples=60, deadline=None)
def test_weights_are_repetitions(rows: list[tuple[float, int, int]], q: float) -> None:
    rows.sort()
    values = np.array([v for v, _, _ in rows])
    counts = np.array([float(c) for _, c, _ in rows])
    spread = np.repeat(values, counts.astype(int))
    assert weighted_quantiles(values, counts, [q])[0] == pytest.approx(
        np.quantile(spread, q), rel=1e-9, abs=1e-9
    )
    block = describe_pooled(values, np.array([o for _, _, o in rows]), counts)
    assert block["n"] == spread.size
    assert block["mean"] == pytest.approx(spread.mean())


def test_pooled_gaps_get_wider_intervals_than_independent_ones() -> None:
    """40 answers of 50 gaps, each answer with a pace of its own: 2,000 gaps know as little as 40 answers
    do."""
    rng = np.random.default_rng(3)
    pace = rng.uniform(10, 30, 40)
    values = np.repeat(pace, 50) + rng.normal(0, 0.1, 2000)
    pooled = describe_pooled(values, np.repeat(np.arange(40), 50))
    naive = describe(values)
    width = [b["ci95"]["p50"][1] - b["ci95"]["p50"][0] for b in (pooled, naive)]
    assert width[0] > 2 * width[1]
    assert pooled["p50"] == pytest.approx(naive["p50"])
    assert pooled == describe_pooled(values, np.repeat(np.arange(40), 50))  # the seed is fixed


def test_the_bootstrap_draws_whole_requests() -> None:
    """Against a plain one that builds every resample in full: the same draws, to within one cut."""
    rng = np.random.default_rng(4)
    owner = rng.integers(0, 30, 5000)
    order = np.argsort(values := rng.exponential(20, 5000))
    values, owner = values[order], owner[order]
    counts = rng.integers(1, 4, 5000).astype(np.float64)
    fast = bootstrap_quantiles(values, counts, owner, [0.5, 0.99])
    again = np.random.default_rng(percentiles.BOOTSTRAP_SEED)
    for row in fast:
        chosen = again.integers(0, 30, 30)
        parts = [np.repeat(values[owner == i], counts[owner == i].astype(int)) for i in chosen]
        plain = np.quantile(np.concatenate(parts), [0.5, 0.99], method="lower")
        assert row[0] == pytest.approx(plain[0], rel=0.01)
        assert row[1] == pytest.approx(plain[1], rel=0.02)
    short = np.flatnonzero(np.arange(5000) < 2000)  # few enough for no cuts: exact
    exact = bootstrap_quantiles(values[short], np.ones(2000), owner[short], [0.5])
    chosen = np.random.default_rng(percentiles.BOOTSTRAP_SEED).integers(0, 30, 30)
    parts = [values[short][owner[short] == i] for i in chosen]
    assert exact[0, 0] == np.quantile(np.concatenate(parts), 0.5, method="lower")


def test_many_gaps_of_few_answers_are_not_reliable() -> None:
    values = np.linspace(1, 2, 2000)
    assert not any(describe_pooled(values, np.arange(2000) % 19)["reliable"].values())
    assert all(describe_pooled(values, np.arange(2000) % 20)["reliable"].values())


@pytest.mark.parametrize(
    ("name", "floor"),
    [("p50", 11), ("p90", 64), ("p95", 130), ("p97", 219), ("p99", 662), ("p99.9", 6636)],
)
def test_mlperfs_floors(name: str, floor: int) -> None:
    assert requests_needed([name], "mlperf") == floor
    assert requests_needed([float(name[1:]) / 100], "mlperf") == floor


def test_requests_needed_is_that_of_the_hardest_percentile() -> None:
    for name, q in LEVELS.items():
        assert requests_needed([name]) == floor_samples(q)
    assert requests_needed(["p50", "p99", "p90"]) == 368
    assert requests_needed(["p50", "p99"], "mlperf") == 662
    assert requests_needed([]) == 0
    with pytest.raises(ValueError, match="percentile_floor=median"):
        requests_needed(["p50"], "median")
    with pytest.raises(ValueError, match="p100"):
        requests_needed(["p100"])


def test_the_stricter_floor_makes_fewer_percentiles_reliable() -> None:
    """100 samples: p95 has an interval (72), but not MLPerf's floor (130)."""
    found = {"ttft": {"from_send": describe(np.arange(100.0))}, "other": [1, None]}
    loose = describe(np.arange(100.0))
    hold_to_floor(found, "interval")
    assert found["ttft"]["from_send"] == loose
    hold_to_floor(found, "mlperf")
    block = found["ttft"]["from_send"]
    assert block["reliable"] == {"p50": True, "p90": True, "p95": False, "p99": False}
    assert block["ci95"]["p95"] is None
    assert block["ci95"]["p90"] == loose["ci95"]["p90"]
    assert loose["reliable"]["p95"]
    assert block["p95"] == loose["p95"]
