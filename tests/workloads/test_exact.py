"""Functions with the same bits everywhere: right, and made of operations that are rounded one way."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from tests.support.workload_configs import PRESETS, workload
from workloads import draw, exact
from workloads.gaps import Renewal, unit_gaps, weibull_shape
from workloads.streams import stream


def test_they_agree_with_the_mathematics_library():
    x = np.concatenate([np.linspace(-700, 700, 9_001), np.linspace(-1e-3, 1e-3, 99)])
    assert np.abs(exact.exp(x) / np.exp(x) - 1).max() < 1e-15
    assert exact.exp(np.array([-1e9, 800.0])).tolist() == [0, np.inf]
    positive = np.exp(x)
    assert np.abs(exact.log(positive) - np.log(positive)).max() < 2e-13
    assert exact.log(np.ones(1)).tolist() == [0]
    u = np.concatenate([np.linspace(1e-12, 1 - 1e-12, 9_001), 10.0 ** -np.arange(1, 12)])
    assert np.abs(exact.normal_quantile(u) - special.ndtri(u)).max() < 1e-13
    z = np.linspace(-8, 8, 4_001)
    assert np.abs(exact.normal_share(z) - special.ndtr(z)).max() < 1e-14
    points, values = np.array([0.0, 1.0, 4.0]), np.array([1.0, 5.0, 6.0])
    at = np.linspace(-1, 5, 301)
    assert np.abs(exact.interpolate(at, points, values) - np.interp(at, points, values)).max() < 1e-14


def bits() -> str:
    """A digest that is the same on every machine; where it is not, neither are schedules."""
    u = stream(0, "bits").random(20_000)
    drawn = [exact.exp(20 * u - 10), exact.log(u), exact.normal_quantile(u), exact.normal_share(8 * u - 4)]
    drawn += [
        unit_gaps(stream(0, kind), Renewal(kind, cv), 5_000)
        for kind, cv in (("poisson", 1.0), ("gamma", 0.5), ("gamma", 2.0), ("weibull", 3.0))
    ]
    return hashlib.sha256(np.concatenate(drawn).astype("<f8").tobytes()).hexdigest()[:16]


def test_their_bits_are_fixed():
    assert bits() == "82b3eb854236c8a8"


def test_a_processor_without_wide_vectors_draws_the_same():
    """numpy has loops of its own for each kind of processor, and reads what to leave out at its start."""
    code = "from tests.workloads.test_exact import bits; print(bits())"
    env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(np._core._multiarray_umath.__cpu_dispatch__)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == bits(), out.stderr


ROOT = Path(__file__).parents[2]
SCHEDULES = {
    "chat": "52e9ccf38da1",
    "rag": "435f9f2fa201",
    "summarize": "4f7fa772c893",
    "code": "dc6876a4a288",
    "agent": "f6e5edfc7d6c",
    "toolcall": "7501ac8644ce",
    "batch": "7fb842b9ff65",
    "reasoning": "30276ef0b937",
    "mixed": "ffe2283711c3",
    "tiers": "da9265e00a9b",
}


@pytest.mark.parametrize("kind", ["gamma", "weibull"])
@pytest.mark.parametrize("cv", [0.3, 0.94, 1.07, 2.0, 4.3])
def test_gaps_have_their_mean_and_variation(kind, cv):
    n = 60_000
    gaps = unit_gaps(stream(1, kind), Renewal(kind, cv), n)
    assert gaps.min() >= 0
    if kind == "gamma":
        shape = 1 / cv**2
        assert stats.kstest(gaps, stats.gamma(shape, scale=1 / shape).cdf).pvalue > 1e-4
    else:
        k = weibull_shape(cv)
        assert stats.kstest(gaps, stats.weibull_min(k, scale=1 / special.gamma(1 + 1 / k)).cdf).pvalue > 1e-4
        assert stats.weibull_min(k).std() / stats.weibull_min(k).mean() == pytest.approx(cv, rel=1e-6)
    assert gaps.mean() == pytest.approx(1, abs=6 * cv / np.sqrt(n))


@pytest.mark.parametrize("kind", ["poisson", "gamma", "weibull"])
def test_more_gaps_begin_with_the_same(kind):
    few, many = (unit_gaps(stream(2, kind), Renewal(kind, 1.7), n) for n in (100, 1_000))
    assert few.tolist() == many[:100].tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_on_every_machine(name):
    """The digests change with the presets; a difference between two machines does not."""
    assert draw(workload(name), seed=0).sha256()[:12] == SCHEDULES[name]
