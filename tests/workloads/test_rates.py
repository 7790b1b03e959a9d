"""Ramps and steps of the rate: exact in the mean, Poisson at every moment."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.conf import compose
from tests.support.workload_configs import workload
from workloads import WorkloadError, draw
from workloads.arrivals import Arrivals, draw_arrivals
from workloads.fitting.arrivals import index_of_dispersion
from workloads.rates import RateProfile, Stretch, read_rate
from workloads.settings import Settings

STEADY = {"arrivals__factor": None}
RAMP = {"kind": "ramp", "from": 2, "to": 20, "over_s": 200}
STEPS = {"kind": "steps", "steps": [[2, 100], [8, 100], [0, 50], [4, 100]]}


def profile(values) -> RateProfile:
    read = read_rate(Settings({"rate": values}, "workload"))
    assert isinstance(read, RateProfile)
    return read


def times(kind, rate, n=None, duration=None, seed=0, cv=1.0):
    return draw_arrivals(seed, Arrivals(kind, cv=cv), rate=rate, requests=n, duration_s=duration)


def within(count, expected, cv=1.0):
    """Five standard deviations of a renewal count: a wrong rate of a tenth would not pass."""
    return abs(count - expected) <= 5 * cv * math.sqrt(expected) + 1


KINDS = [("poisson", 1.0), ("gamma", 0.5), ("gamma", 1.5), ("constant", 0.0)]


def counted(t, edges):
    """Arrivals in (edge, next edge]: equal gaps put one exactly on the end of a step."""
    return np.diff(np.searchsorted(t, edges, side="right"))


@pytest.mark.parametrize(("kind", "cv"), KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_step_has_its_count(kind, cv, seed):
    t = times(kind, profile(STEPS), duration=350, seed=seed, cv=max(cv, 1e-3))
    counts = counted(t, [0, 100, 200, 250, 350])
    assert counts[2] == 0, "a pause is a pause"
    for count, expected in zip(counts[[0, 1, 3]], (200, 800, 400), strict=True):
        assert within(count, expected, cv), (counts, expected)


def test_equal_gaps_stay_equal_within_a_step():
    t = times("constant", profile(STEPS), duration=350)
    for start, end, rate in ((0, 100, 2), (100, 200, 8), (250, 350, 4)):
        gaps = np.diff(t[(t > start) & (t <= end)])
        assert len(gaps) > 100
        assert gaps == pytest.approx(np.full(len(gaps), 1 / rate), rel=1e-9)
        assert gaps.std() / gaps.mean() < 0.01
    assert len(t) == 1400


@pytest.mark.parametrize("seed", range(4))
def test_a_ramp_rises_in_a_straight_line(seed):
    t = times("poisson", profile(RAMP), duration=200, seed=seed)
    counts = np.histogram(t, np.arange(0, 201, 20))[0]
    for number, count in enumerate(counts):
        middle = 2 + 18 * (20 * number + 10) / 200
        assert within(count, 20 * middle), (number, count, 20 * middle)
    line = stats.linregress(np.arange(10, 200, 20), counts / 20)
    assert line.slope == pytest.approx(18 / 200, rel=0.15)
    equal = np.histogram(times("constant", profile(RAMP), duration=200), np.arange(0, 201, 20))[0]
    assert np.abs(equal - 20 * (2 + 18 * np.arange(10, 200, 20) / 200)).max() <= 1


@pytest.mark.parametrize("rate", [RAMP, STEPS, {"kind": "ramp", "from": 0, "to": 5, "over_s": 50}])
def test_arrivals_stay_poisson_at_every_moment(rate):
    """Taken back through the expected counts, the gaps are exponential of mean 1 (time rescaling)."""
    shape = profile(rate)
    t = times("poisson", shape, n=20_000)
    unit = np.diff([shape.expected(float(x)) for x in t])
    assert unit.mean() == pytest.approx(1, abs=0.03)
    assert stats.kstest(unit, "expon").statistic < stats.kstwo.ppf(0.999, len(unit))
    assert len(np.unique(np.diff(t))) == len(t) - 1, "gaps are distinct"


@pytest.mark.parametrize("window_s", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_dispersion_of_a_long_poisson_schedule_is_one_at_every_width(window_s, seed):
    t = times("poisson", 20.0, n=60_000, seed=seed)
    dispersion = index_of_dispersion(t, window_s)
    assert dispersion is not None
    assert 0.8 <= dispersion <= 1.25
    assert len(t) == 60_000
    assert len(np.unique(np.diff(t))) == len(t) - 1


def test_equal_gaps_have_no_spread():
    gaps = np.diff(times("constant", 7.0, n=50_000))
    assert gaps.std() / gaps.mean() < 0.01


@settings(max_examples=80, deadline=None)
@given(
    stretches=st.lists(
        st.builds(Stretch, st.floats(0, 50), st.floats(0, 50), st.floats(0.1, 60)), min_size=1, max_size=5
    ),
    last=st.floats(0.1, 50),
    counts=st.lists(st.floats(0.001, 5000), min_size=1, max_size=30),
)
def test_placing_is_the_inverse_of_counting(stretches, last, counts):
    shape = RateProfile((*stretches, Stretch(last, last, 1.0)))
    counts = np.sort(np.array(counts))
    placed = shape.place(counts)
    assert np.all(np.diff(placed) >= -1e-9)
    assert np.all(placed >= 0)
    for count, moment in zip(counts, placed, strict=True):
        assert shape.expected(float(moment)) == pytest.approx(count, rel=1e-6, abs=1e-6)


def test_a_profile_ends_the_requests_unless_the_load_says_how_many():
    alone = draw(workload("chat", rate=RAMP, **STEADY), seed=0)
    assert 190 < alone.requests[-1].arrival_s <= 200
    assert within(len(alone), 2200, cv=1.07)
    assert alone.notes == draw(workload("chat", **STEADY), seed=0).notes or "workload.rate" not in " ".join(
        alone.notes
    )
    exact = draw(workload("chat", rate=RAMP, **STEADY), seed=0, requests=3000)
    assert len(exact) == 3000
    assert len(draw(workload("chat", rate=RAMP, **STEADY), seed=0, requests=50)) == 50
    (note,) = [n for n in exact.notes if "workload.rate" in n]
    beyond = sum(r.arrival_s > 200 for r in exact)
    assert note.startswith(f"{beyond} of 3000 requests come after the 200 s of workload.rate, at its last")
    early = draw(workload("chat", rate=RAMP, **STEADY), seed=0, requests=50)
    assert any(note.startswith("the requests end at ") for note in early.notes)
    assert draw(workload("chat", rate=RAMP, **STEADY), seed=0, duration_s=30).requests[-1].arrival_s <= 30


@pytest.mark.parametrize("rate", [5, RAMP, STEPS])
def test_the_planned_rate_is_that_of_the_drawn_schedule(rate):
    schedule = draw(workload("chat", **STEADY, rate=rate), seed=3)
    arrivals = [r.arrival_s for r in schedule]
    assert schedule.planned_rate == pytest.approx((len(arrivals) - 1) / (arrivals[-1] - arrivals[0]))


def test_only_the_times_depend_on_the_profile():
    plain, ramp = (draw(workload("rag", rate=r), seed=3, requests=80) for r in (5, RAMP))
    names = ("request_class", "segments", "stop_after", "max_tokens", "cancel_kind", "cancel_value")
    for name in names:
        assert [getattr(r, name) for r in plain] == [getattr(r, name) for r in ramp]
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(ramp))


@pytest.mark.parametrize(
    "override",
    [
        "workload.rate={kind: ramp, from: 2, to: 20, over_s: 200}",
        "workload.rate={kind:steps,steps:[[2,100],[8,100],[0,50],[4,100]]}",
    ],
)
def test_a_profile_is_one_setting_of_the_command_line(override):
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(compose(["workload=chat", override]).workload)
    assert node["rate"] in (RAMP, STEPS)


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ({"from": 1}, r"workload\.rate=\{'from': 1\}: needs a number, or \{kind: ramp"),
        ({"kind": "sine"}, "workload.rate.kind=sine: choose from ramp, steps"),
        ({"kind": "ramp", "from": 1, "to": 2}, "workload.rate.over_s is missing"),
        ({**RAMP, "from": -1}, "workload.rate.from=-1: needs a number of 0 or more"),
        ({**RAMP, "to": 0}, "workload.rate.to=0: needs a number above 0"),
        ({**RAMP, "to": float("nan")}, "workload.rate.to=nan"),
        ({**RAMP, "over_s": 0}, "workload.rate.over_s=0: needs a number above 0"),
        ({**RAMP, "steps": []}, "workload.rate.steps is not a setting"),
        ({"kind": "steps", "steps": []}, "workload.rate.steps=.*needs a list of rows of 2 numbers"),
        ({"kind": "steps", "steps": [[1, 2, 3]]}, "needs a list of rows of 2 numbers"),
        ({"kind": "steps", "steps": [[-1, 3]]}, "needs rows of requests/s"),
        ({"kind": "steps", "steps": [[1, 0]]}, "needs rows of requests/s"),
        ({"kind": "steps", "steps": [[1, 3], [0, 3]]}, "needs rows of requests/s"),
        ({"kind": "steps", "steps": [[1, float("inf")]]}, "needs a list of rows of 2 numbers"),
        ([1, 2], r"workload\.rate=\[1, 2\]: needs a number"),
    ],
)  # fmt: skip
def test_wrong_profiles_are_one_line(rate, words):
    with pytest.raises(WorkloadError, match=words) as caught:
        draw(workload("chat", **STEADY, rate=rate), seed=0)
    assert "\n" not in str(caught.value)


def test_what_does_not_go_together_is_refused(tmp_path):
    burst = workload("chat", rate=RAMP, **STEADY, arrivals__burst__factor=3)
    with pytest.raises(WorkloadError, match=r"burst\.factor=3: workload.rate is a profile"):
        draw(burst, seed=0)
    with pytest.raises(WorkloadError, match=r"arrivals\.kind=at_once has no rate"):
        draw(workload("batch", rate=RAMP), seed=0)
    path = tmp_path / "azure.csv"
    rows = ["2024-05-12 00:00:00.0,9,9", "2024-05-12 00:00:01.0,9,9"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    with pytest.raises(WorkloadError, match=r"workload\.rate=.*a trace brings its own times"):
        draw(workload("trace", path=str(path), rate=RAMP), seed=0)
