"""Long runs under load, and every combination of the decisions that a preset can be given: the same checks as
in test_invariants.py, from fixed seeds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from engines import queues
from engines.config import PREEMPTIONS, RESERVATIONS, VICTIMS
from tests.support.cases import PRESETS, Seeded, check_answers, play, random_case

LOADED: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 24,
    "max_num_batched_tokens": 40,
    "block_size": 4,
    "queue_timeout_ms": None,
    "max_waiting_requests": 12,
    "max_waiting_tokens": None,
    "kv_high_watermark": None,
    "kv_reject_watermark": None,
}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seed", [0, 1])
def test_thousands_of_iterations_under_load(name: str, seed: int) -> None:
    """A pool for one and a half of the longest requests, and a queue that is seldom empty: KV runs out all
    the time, except within a slice."""
    fixed = {**LOADED, "prefix_cache": bool(seed), "reservation": "on_demand" if seed else "prompt"}
    case = random_case(Seeded(seed), name, requests=(250, 250), ticks=600, **fixed)
    case = replace(case, num_kv_blocks=10, limits={}, fail_at=(20, 200))
    driver, accepted = play(case)
    check_answers(case, driver, accepted)
    assert len(driver.log.steps) > 400
    assert len(accepted) > 60
    assert (driver.engine.stats().kv_exhausted > 0) == (name != "sliced")


def combinations() -> list[tuple[str, str, str, bool, str, str]]:
    """Every preset with every order of the queue and every reservation; of the eight other combinations each
    pair of those gets one, in turn."""
    rest = itertools.cycle(itertools.product([True, False], PREEMPTIONS, VICTIMS))
    return [
        (name, queue, reservation, *next(rest))
        for reservation in RESERVATIONS
        for queue in queues.names()
        for name in PRESETS
    ]


@pytest.mark.parametrize("queue", queues.names())
@pytest.mark.parametrize("name", PRESETS)
def test_every_combination_of_the_decisions(name: str, queue: str) -> None:
    for seed, chosen in enumerate(combinations()):
        if chosen[:2] == (name, queue):
            reservation, prefix_cache, preemption, victim = chosen[2:]
            case = random_case(
                Seeded(seed),
                name,
                requests=(3, 7),
                queue=queue,
                reservation=reservation,
                prefix_cache=prefix_cache,
                preemption=preemption,
                victim=victim,
            )
            check_answers(case, *play(case))
