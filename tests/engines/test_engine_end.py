"""The last call to an engine: whatever it was doing, nothing may be left, and a leak is told."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.step_log import Ending, StepLog
from tests.support.engine_driver import SCHEDULERS, Driver, config

Action = tuple[str, int, int]
actions = st.lists(
    st.tuples(st.sampled_from(["add", "step", "abort"]), st.integers(0, 9), st.integers(1, 6)),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=40, deadline=None)
@given(actions=actions)
def test_nothing_is_left_wherever_the_requests_were(scheduler: str, actions: list[Action]) -> None:
    driver = Driver(config(scheduler, prefill_chunk_size=4 if scheduler == "chunked" else None))
    ids: list[int] = []
    for action, a, b in actions:
        if action == "add":
            ids.append(driver.add(1 + a, b))
        elif action == "abort" and ids:
            driver.engine.abort(ids[a % len(ids)])
        elif driver.engine.has_work:
            driver.step()
    left = set(ids) - set(driver.log.requests)
    ending = driver.engine.end()
    assert ending == Ending(
        at_ns=round(driver.clock.now * 1e9),
        aborted=len(left),
        running=0,
        waiting=0,
        kv_live=0,
        kv_cached=0,
        kv_free=99,
        integrity="ok",
    )
    assert set(driver.log.requests) == set(ids), "every request has its line"
    assert all(driver.log.requests[seq_id].finish_ns is not None for seq_id in left)
    assert not driver.engine.has_work


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_engine_that_is_idle_has_nothing_to_abort(scheduler: str) -> None:
    driver = Driver(config(scheduler))
    for _ in range(5):
        driver.add(4, 3)
    driver.run()
    ending = driver.engine.end()
    assert (ending.aborted, ending.kv_live, ending.integrity) == (0, 0, "ok")
    assert set(driver.reasons().values()) == {"length"}


def test_a_block_that_nobody_gave_back_is_told() -> None:
    driver = Driver(config("continuous"))
    driver.add(4, 3)
    driver.run()
    driver.engine.pool.grow(array("i"), 9)  # three blocks, whose table is forgotten
    ending = driver.engine.end()
    assert ending.kv_live == 3
    assert ending.integrity.startswith("block ")
    assert "is in 0 tables and counts 1" in ending.integrity


def test_the_file_has_the_fields_of_the_contract(tmp_path: Path) -> None:
    driver = Driver(config("static"))
    driver.add(4, 3)
    log = StepLog(tmp_path)
    log.end(driver.engine.end())
    log.close()
    found = json.loads((tmp_path / "engine_end.json").read_text())
    assert list(found) == [f.name for f in fields(Ending)]
    assert (found["aborted"], found["waiting"]) == (1, 0)
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    contract = text[text.index("`engine_end.json` (one object") :].split("\n\n")[0]
    assert all(name in contract for name in found)
