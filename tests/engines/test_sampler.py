"""The sampler: greedy is exact, drawing follows the distribution, and only (seed, step) moves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import Sampling
from engines.sampler import _likeliest, sample, uniform


def sampling(
    temperature: list[float], top_p: float = 1.0, seed: list[int] | None = None, step: list[int] | None = None
) -> Sampling:
    n = len(temperature)
    return Sampling(
        np.array(temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.array(seed if seed is not None else range(n), np.int64),
        np.array(step if step is not None else [0] * n, np.int64),
    )


def test_greedy_takes_the_largest_and_the_lowest_of_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -1.0, -9.0]])
    assert sample(logits, None).tolist() == [1, 0, 2]
    wide = torch.zeros(8, 50_000)
    wide[:, 40_000] = wide[:, 12_345] = 1.0
    assert sample(wide, None).tolist() == [12_345] * 8
    assert sample(torch.empty(0, 7), None).tolist() == []


def test_drawn_tokens_follow_the_distribution() -> None:
    n = 8_000
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125])).repeat(n, 1)
    counts = np.bincount(sample(logits, sampling([1.0] * n)), minlength=4) / n
    # Four standard errors of a share near 1/2 at n draws.
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 4 * 0.5 / n**0.5
    hot = np.bincount(sample(logits, sampling([0.5] * n)), minlength=4) / n
    expected = np.array([0.5, 0.25, 0.125, 0.125]) ** 2
    assert np.abs(hot - expected / expected.sum()).max() < 4 * 0.5 / n**0.5


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    n = 400
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1])).repeat(n, 1)
    assert set(sample(logits, sampling([1.0] * n, top_p=0.5)).tolist()) == {1}
    assert set(sample(logits, sampling([1.0] * n, top_p=0.6)).tolist()) == {1, 2}
    assert set(sample(logits, sampling([1.0] * n, top_p=0.85)).tolist()) == {0, 1, 2}
    assert set(sample(logits, sampling([1.0] * n, top_p=0.0)).tolist()) == {1}


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**31),
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.05, 1.0),
    row=st.integers(0, 3),
    neighbour=st.integers(0, 10),
)
def test_a_row_is_independent_of_its_neighbours_and_its_place(
    seed: int, step: int, temperature: float, top_p: float, row: int, neighbour: int
) -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))
    mine = logits[0].clone()
    alone = sample(mine[None], sampling([temperature], top_p, [seed], [step]))[0]
    logits[row] = mine
    seeds, steps, temperatures = [neighbour] * 4, [3] * 4, [0.0, 1.0, 0.0, 1.0]
    seeds[row], steps[row], temperatures[row] = seed, step, temperature
    assert sample(logits, sampling(temperatures, top_p, seeds, steps))[row] == alone


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), top_p=st.floats(0.01, 0.999), spread=st.sampled_from([0.0, 0.1, 1.0, 8.0])
)
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(
    seed: int, top_p: float, spread: float
) -> None:
    weights = np.exp(spread * np.round(np.random.default_rng(seed).normal(size=3000), 1))  # with many ties
    mass = top_p * float(weights.sum())
    got = _likeliest(weights, mass)
    order = np.argsort(-weights, kind="stable")
    assert got.tolist() == order[: len(got)].tolist()
    assert weights[got].sum() >= mass * (1 - 1e-12)
    assert weights[got[:-1]].sum() < mass * (1 + 1e-12)


def test_greedy_rows_stay_greedy_beside_drawn_ones() -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(3))
    mixed = sample(logits, sampling([0.0, 5.0, 0.0, 5.0, 0.0, 5.0]))
    assert mixed[::2].tolist() == logits.argmax(-1)[::2].tolist()
    assert mixed[1::2].tolist() != logits.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(3)) * 30
    assert (sample(logits, sampling([temperature] * 16)) == logits.argmax(-1).numpy()).all()


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 6), -torch.inf)
    logits[:, 2], logits[:, 4] = 0.0, 0.0
    assert set(sample(logits, sampling([2.0] * 500)).tolist()) == {2, 4}


def test_the_stream_is_uniform_and_moves_with_seed_and_step() -> None:
    by_step = np.array([uniform(5, step) for step in range(4000)])
    by_seed = np.array([uniform(seed, 5) for seed in range(4000)])
    for values in (by_step, by_seed):
        assert ((values >= 0) & (values < 1)).all()
        assert abs(values.mean() - 0.5) < 4 * 0.2887 / 4000**0.5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / 4000**0.5
    assert len(np.unique(np.concatenate((by_step, by_seed)))) == 7999  # (5, 5) is in both
