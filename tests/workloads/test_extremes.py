"""Whatever number a setting gets, a schedule comes of it or one line that says which setting cannot be."""

import warnings

import numpy as np
import pytest

from tests.support.workload_configs import workload as preset
from workloads import WorkloadError, draw
from workloads.fitting.arrivals import index_of_dispersion

EXTREMES = (0, 1e-308, 1e7, 1e308, 10**400)


def numbers(node, path=()):
    """The path of every number in a configuration."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, (dict, list)):
            yield from numbers(value, (*path, key))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*path, key)


def put(node, path, value):
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def attempt(node):
    try:
        return draw(node, seed=1, requests=3), ""
    except WorkloadError as error:
        return None, str(error)


@pytest.mark.parametrize(("name", "capped"), [("chat", False), ("rag", True)])
def test_an_extreme_number_is_drawn_or_refused_in_one_line(name, capped):
    drawn = refused = 0
    for path in numbers(preset(name)):
        for value in EXTREMES:
            node = preset(name)
            if not capped:
                node["input"]["cap"] = node["output"]["cap"] = None
            put(node, path, value)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a warning on standard error is no one line
                schedule, said = attempt(node)
            if schedule is None:
                refused += 1
                assert "\n" not in said
                assert said.startswith(("workload.", "load.")), (path, value, said)
                continue
            drawn += 1
            assert all(0 <= r.arrival_s < np.inf and 0 < r.prompt_tokens <= 10_000_000 for r in schedule)
    assert drawn > 60
    assert refused > 60


def test_a_count_that_fits_no_memory_is_refused_also_when_all_come_at_once():
    with pytest.raises(WorkloadError, match=r"^load\.requests=10000000000: needs \d+ at most$"):
        draw(preset("batch"), seed=1, requests=10**10)


def test_dispersion_needs_no_memory_for_a_gap_of_millennia():
    times = np.array([0.0, 1.0, 1.5, 2.5e11])
    assert index_of_dispersion(times, 1.0) == pytest.approx(5 / 3, rel=1e-6)
    rng = np.random.default_rng(5)
    dense = np.sort(rng.uniform(0, 100, 300))
    counts = np.histogram(dense, bins=np.arange(0, int(dense[-1]) + 1))[0]
    assert index_of_dispersion(dense, 1.0) == pytest.approx(counts.var() / counts.mean())
