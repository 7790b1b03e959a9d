"""How hard a probe pressed on its limits, from requests that are written down."""

import math

import numpy as np
import pandas as pd
import pytest

from harness.capacity.point import (
    LEAST,
    Limits,
    Point,
    Sample,
    growth_pressure,
    pressures,
    sample_of,
    slo_pressure,
)


def sample(arrivals, stay, scores=None):
    arrivals = np.asarray(arrivals, dtype=float)
    scores = np.full(arrivals.size, 0.5) if scores is None else np.asarray(scores, dtype=float)
    return Sample(arrivals, arrivals + stay, np.ones(arrivals.size, bool), scores)


@pytest.mark.parametrize("n", [1, 7, 100, 101, 250])
@pytest.mark.parametrize("attainment", [0.5, 0.9, 0.99, 1.0])
def test_the_slo_holds_iff_its_pressure_is_at_most_one(n, attainment):
    rng = np.random.default_rng(n)
    for _ in range(30):
        seen = sample(range(n), 1.0, rng.lognormal(-0.5, 0.5, n))
        assert (slo_pressure(seen, attainment) <= 1) == (seen.attainment >= attainment - 1e-9)


def test_an_unserved_request_is_infinitely_late_and_an_unjudged_one_does_not_count():
    seen = sample(range(100), 1.0)
    seen.score[:2] = np.inf
    assert slo_pressure(seen, 0.99) == math.inf
    assert slo_pressure(seen, 0.98) == 0.5
    seen.judged[0] = False
    assert slo_pressure(seen, 0.98) == 0.5
    assert seen.attainment == pytest.approx(98 / 99)


def test_a_steady_queue_does_not_grow_and_one_that_outruns_its_server_does():
    arrivals = np.arange(300) / 10
    assert growth_pressure(sample(arrivals, 1.0), 0.05) < 0.5
    service = 0.1 * 1.15  # served one after the other, 15 % slower than they come
    ends = service * (1 + np.arange(300))
    growing = Sample(arrivals, ends, np.ones(300, bool), np.full(300, 0.5))
    assert growth_pressure(growing, 0.05) > 1
    # The latency limit is far: without this criterion the rate would have passed.
    found = pressures(growing, Limits(attainment=0.99))
    assert found["slo"] < 1 < found["growth"]


def test_filling_an_engine_whose_answers_take_long_is_no_growth():
    """Each stays for a quarter of the probe: the first third fills it."""
    arrivals = np.arange(200) / 10
    assert growth_pressure(sample(arrivals, 5.0), 0.05) < 0.5


def test_one_that_never_left_is_under_way_to_the_end():
    arrivals = np.arange(300) / 10
    ends = arrivals + 1
    ends[::4] = np.nan
    stuck = Sample(arrivals, ends, np.ones(300, bool), np.full(300, 0.5))
    assert growth_pressure(stuck, 0.05) > 1


def test_requests_that_come_at_once_have_no_growth():
    assert growth_pressure(sample(np.zeros(10), 1.0), 0.05) == LEAST


def test_criteria_whose_limit_or_figure_is_missing_are_left_out():
    seen = sample(range(50), 1.0)
    limits = Limits(0.99, queue_delay_p50_ms=100, itl_p99_ms=50)
    assert pressures(seen, limits, queue_delay_p50=150, itl_p99=25).items() >= {
        ("queue_delay", 1.5),
        ("itl", 0.5),
    }
    assert set(pressures(seen, limits)) == {"slo", "growth"}
    assert set(pressures(seen, Limits(0.99), queue_delay_p50=1e9, itl_p99=1e9)) == {"slo", "growth"}


def test_scores_are_the_worse_of_ttft_and_tpot_and_classes_have_their_own_limits():
    frame = pd.DataFrame(
        {
            "intended_s": [1.0, 0.0, 2.0, 3.0],
            "end_s": [3.0, 1.0, 4.0, 5.0],
            "outcome": ["completed", "completed", "rejected", "completed"],
            "request_class": ["chat", "code", "chat", "chat"],
            "ttft_ms": [500.0, 500.0, np.nan, np.nan],
            "e2e_ms": [1500.0, 900.0, np.nan, 800.0],  # the last came whole: its first token was its last
            "tpot_ms": [150.0, 10.0, np.nan, np.nan],
            "judged": True,
        }
    )
    slo = {"ttft_ms": 1000, "tpot_ms": 100, "classes": {"code": {"ttft_ms": 250, "tpot_ms": 100}}}
    seen = sample_of(frame, slo)
    assert seen.arrival_s.tolist() == [0, 1, 2, 3]
    assert seen.score.tolist() == pytest.approx([2.0, 1.5, math.inf, 0.8])


def test_what_flows_at_a_rate_that_held_is_what_came_in():
    flow = {"output_tokens_per_s": 70.0, "total_tokens_per_s": 700.0, "tokens_per_request": (20.0, 120.0)}
    held = Point(4.0, 0, 0, 100, {"slo": 0.5}, **flow)
    over = Point(4.0, 0, 0, 100, {"slo": 1.5}, **flow)
    assert held.sustained == (80.0, 480.0)
    assert over.sustained == (70.0, 700.0)
    assert over.to_json()["over"] == ["slo"]
    assert Point(1.0, 0, 0, 1, {"slo": math.inf}).to_json()["pressure"] is None
