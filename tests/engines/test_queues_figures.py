"""What the orders are for, on fixed seeds in virtual time (python -m engines.bench_queues)."""

from __future__ import annotations

import pytest

from engines import bench_queues

SEEDS = (0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_edf_misses_fewer_deadlines_than_fcfs(seed: int) -> None:
    just_above = bench_queues.deadlines(seed, 15.0, 20.0)
    far_above = bench_queues.deadlines(seed, 19.0, 20.0)
    assert just_above["fcfs"].missed > 0
    assert just_above["deadline"].missed < just_above["fcfs"].missed / 2
    assert far_above["deadline"].missed <= far_above["deadline, nobody dropped"].missed
    assert far_above["deadline, pace=usual"].missed < far_above["fcfs"].missed * 0.7
    assert far_above["deadline, pace=usual"].dropped > 0
    assert far_above["deadline, nobody dropped"].dropped == far_above["fcfs"].dropped == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_fair_shares_bound_what_a_heavy_tenant_takes(seed: int) -> None:
    found = bench_queues.tenants(seed)
    fcfs, fair = found["fcfs"], found["fair"]
    assert fair.heavy_share < fcfs.heavy_share - 0.1
    assert fair.light_wait_p99_s < fcfs.light_wait_p99_s / 10
    assert fair.heavy_wait_p99_s < 1.5 * fcfs.heavy_wait_p99_s


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_let_short_prompts_pass_long_ones(seed: int) -> None:
    found = bench_queues.lanes(seed, 30.0)
    one, lanes = found["one queue"], found["lanes"]
    assert lanes.interactive_p99_s < one.interactive_p99_s / 2
    assert lanes.long_p50_s < 1.5 * one.long_p50_s
    assert lanes.end_s == pytest.approx(one.end_s, rel=0.02)  # work-conserving


def test_the_same_seed_gives_the_same_figures() -> None:
    assert bench_queues.lanes(3, 5.0) == bench_queues.lanes(3, 5.0)
