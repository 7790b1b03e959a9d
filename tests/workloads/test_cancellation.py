from __future__ import annotations

import copy

import numpy as np
import pytest

from workloads import WorkloadError
from workloads.cancellation import draw_cancellations, read_cancellation
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


def test_shares_and_values():
    stops = np.full(N, 200)
    decisions = draw_cancellations(0, read(), stops)
    kinds = np.array([d.kind for d in decisions])
    for kind, share in (
        ("before_first_token", 0.1),
        ("after_tokens", 0.3),
        ("after_s", 0.05),
        ("none", 0.55),
    ):
        assert np.mean(kinds == kind) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / N))
    patience = np.array([d.value for d in decisions if d.kind == "before_first_token"])
    assert np.median(patience) == pytest.approx(20, rel=0.08)
    assert np.log(patience).std() == pytest.approx(0.8, rel=0.08)
    tokens = np.array([d.value for d in decisions if d.kind == "after_tokens"])
    assert tokens.min() >= 10
    assert tokens.max() <= 190
    assert tokens.mean() == pytest.approx(100, rel=0.03)
    assert all(d.value == pytest.approx(60) for d in decisions if d.kind == "after_s")
    assert all(d.value is None for d in decisions if d.kind == "none")


def test_tokens_are_at_least_one_and_within_the_answer():
    for d in draw_cancellations(0, read(after_tokens__share=0.85), np.ones(500, dtype=int)):
        assert d.kind != "after_tokens" or d.value == 1


def test_another_share_moves_no_value():
    stops = np.full(2000, 200)
    few, many = (
        draw_cancellations(0, read(), stops),
        draw_cancellations(0, read(after_tokens__share=0.6), stops),
    )
    both = [(a, b) for a, b in zip(few, many, strict=True) if a.kind == b.kind == "after_tokens"]
    assert len(both) > 300
    assert all(a.value == b.value for a, b in both)


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
