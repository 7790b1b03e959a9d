from __future__ import annotations

import copy

import numpy as np
import pytest

from workloads import WorkloadError
from workloads.cancellation import Cancellation, Decisions, draw_cancellations, read_cancellation
from workloads.settings import Settings

NODE = {
    "before_first_token": {"share": 0.1, "p50_s": 20, "sigma": 0.8},
    "after_tokens": {"share": 0.3, "fraction": [0.05, 0.95]},
    "after_s": {"share": 0.05, "p50_s": 60, "sigma": 0},
}
N = 20_000


def read(**changes):
    node = copy.deepcopy(NODE)
    for key, value in changes.items():
        part, name = key.split("__")
        node[part][name] = value
    return read_cancellation(Settings(node, "workload.cancel"))


def decide(cancel: Cancellation, stops: np.ndarray) -> Decisions:
    """Of one class."""
    return draw_cancellations(0, [cancel], np.zeros(len(stops), dtype=int), stops)


def test_shares_and_values():
    stops = np.full(N, 200)
    decisions = decide(read(), stops)
    kinds = np.array(decisions.kind.list())
    for kind, share in (
        ("before_first_token", 0.1),
        ("after_tokens", 0.3),
        ("after_s", 0.05),
        ("none", 0.55),
    ):
        assert np.mean(kinds == kind) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / N))
    patience = decisions.value[kinds == "before_first_token"]
    assert np.median(patience) == pytest.approx(20, rel=0.08)
    assert np.log(patience).std() == pytest.approx(0.8, rel=0.08)
    tokens = decisions.value[kinds == "after_tokens"]
    assert tokens.min() >= 10
    assert tokens.max() <= 190
    assert tokens.mean() == pytest.approx(100, rel=0.03)
    assert np.allclose(decisions.value[kinds == "after_s"], 60)
    assert np.isnan(decisions.value[kinds == "none"]).all()
    assert np.isnan(decisions.timeout_s).all()


def test_each_class_has_its_own_and_a_client_may_have_a_time_out():
    patient = read_cancellation(Settings({**NODE, "timeout": {"share": 0.25, "s": 30}}, "workload.cancel"))
    hasty = read(after_s__share=0.6)
    member = np.arange(N) % 2
    decisions = draw_cancellations(0, [patient, hasty], member, np.full(N, 200))
    kinds = np.array(decisions.kind.list())
    assert np.mean(kinds[member == 0] == "after_s") == pytest.approx(0.05, abs=0.01)
    assert np.mean(kinds[member == 1] == "after_s") == pytest.approx(0.6, abs=0.02)
    assert np.nanmean(decisions.timeout_s) == 30
    assert np.isnan(decisions.timeout_s[member == 1]).all()
    assert np.isfinite(decisions.timeout_s[member == 0]).mean() == pytest.approx(0.25, abs=0.02)


def test_tokens_are_at_least_one_and_within_the_answer():
    decisions = decide(read(after_tokens__share=0.85), np.ones(500, dtype=int))
    midway = np.array(decisions.kind.list()) == "after_tokens"
    assert midway.sum() > 300
    assert set(decisions.value[midway]) == {1}


def test_another_share_moves_no_value():
    stops = np.full(2000, 200)
    few, many = decide(read(), stops), decide(read(after_tokens__share=0.6), stops)
    one, other = (np.array(d.kind.list()) == "after_tokens" for d in (few, many))
    assert (one & other).sum() > 300
    assert (few.value[one & other] == many.value[one & other]).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"before_first_token__share": 0.9}, "sum to 1.25, needs 1 at most"),
        ({"after_tokens__share": 1.5}, "workload.cancel.after_tokens.share=1.5: needs a share"),
        ({"after_tokens__fraction": [0.5, 0.2]}, "workload.cancel.after_tokens.fraction"),
        ({"after_s__p50_s": 0}, "workload.cancel.after_s.p50_s=0: needs a number above 0"),
    ],
)
def test_wrong_settings_are_named(changes, words):
    with pytest.raises(WorkloadError, match=words):
        read(**changes)
