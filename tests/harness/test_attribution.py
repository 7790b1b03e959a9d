"""Where the time went: runs made by hand whose every part is known, and engines of every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engines.step_log import StepRecord
from harness.metrics.attribution import PARTS, QUEUE, lives
from harness.metrics.latency import per_request
from harness.metrics.run import load_run
from harness.metrics.summary import build_summary
from harness.metrics.timeline import REASONS
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.run_factory import T0_NS, engine_request, ns, request, step, write_run

ID = "r{:06d}".format


def pass_of(
    index: int, start: float, end: float, rows: Sequence[tuple[int, int, int]], **more: Any
) -> dict[str, Any]:
    """A step: rows of (seq_id, tokens, kind), kinds 0 prefill, 1 decode, 2 recompute, 3 ended row."""
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    ids, tokens, kind = (list(column) for column in columns)
    row = step(index, start, end - start, ids=ids, tokens=tokens, kind=kind, num_seqs=len(ids), **more)
    return {**row, "duration_ns": ns(end) - ns(start)}


def told(
    index: int, arrived: float, admitted: float, first: float, finish: float, **more: Any
) -> dict[str, Any]:
    """The engine's record; times in seconds."""
    stamps = {"arrival_ns": arrived, "first_token_ns": first, "finish_ns": finish}
    row = request(index, [(first, 1), (finish, 1)])
    at = {name: T0_NS + ns(t) for name, t in stamps.items()}
    return engine_request(row, admitted=admitted, **{**at, **more})


def rows_of(folder: Path) -> pd.DataFrame:
    """lives of a run, by id; every row must add up."""
    run = load_run(folder)
    found = lives(run, per_request(run.requests)).set_index("id")
    assert found[list(PARTS)].sum(axis=1).to_numpy() == pytest.approx(found["e2e_ms"].to_numpy(), abs=1e-6)
    assert found[list(QUEUE)].sum(axis=1).to_numpy() == pytest.approx(found["queue"].to_numpy(), abs=1e-6)
    return found


def parts(row: pd.Series) -> dict[str, float]:
    """The parts that are not 0."""
    return {name: round(float(row[name]), 6) for name in PARTS if abs(row[name]) > 1e-6}


def long_prompt_stalls_two(tmp_path: Path) -> Path:
    """Two answers at 10 ms a token; a prompt of 900 tokens makes one pass of 310 ms, and the next with two
    thirds of its 600 ms more."""
    steps = [
        pass_of(0, 1.000, 1.050, [(0, 50, 0), (1, 50, 0)], host_gap_ns=None),
        pass_of(1, 1.050, 1.060, [(0, 1, 1), (1, 1, 1)]),
        pass_of(2, 1.060, 1.070, [(0, 1, 1), (1, 1, 1)]),
        pass_of(3, 1.070, 1.380, [(0, 1, 1), (1, 1, 1), (2, 900, 0)]),
        pass_of(4, 1.380, 1.390, [(2, 1, 1)]),
        pass_of(5, 1.390, 1.400, [(0, 1, 1), (1, 1, 1)]),
    ]
    # Each stamp reaches the client 1 ms after its pass.
    ticks = [1.051, 1.061, 1.071, 1.381, 1.401]
    client = [request(i, [(t, 1) for t in ticks], intended=0.99, send=0.992) for i in (0, 1)]
    client.append(request(2, [(1.381, 1), (1.391, 1)], intended=1.06) | {"request_class": "rag"})
    engine = [told(i, 0.995, 0.999, 1.05, 1.4) for i in (0, 1)]
    engine.append(told(2, 1.061, 1.069, 1.38, 1.39) | {"request_class": "rag", "prompt_tokens": 900})
    return write_run(tmp_path, client, engine=engine, steps=steps)


def test_one_long_prompt_stalls_two_decoders(tmp_path: Path) -> None:
    found = rows_of(long_prompt_stalls_two(tmp_path))
    for i in (0, 1):
        # 25 ms: half of the pass that computed both prompts; 300 ms: the pass beyond its 10 ms of decodes.
        assert parts(found.loc[ID(i)]) == {
            "client_wait": 2.0,
            "transport_in": 3.0,
            "queue": 4.0,
            "prefill": 25.0,
            "decode": 40.0,
            "stalled": 325.0,
            "skipped": 10.0,  # step 4 is for the newcomer alone
            "host": 1.0,  # from its admission to the pass
            "transport_out": 1.0,
        }
    assert parts(found.loc[ID(2)]) == {
        "transport_in": 1.0,
        "queue": 8.0,
        "prefill": 310.0,
        "decode": 10.0,
        "host": 1.0,
        "transport_out": 1.0,
    }


def test_the_split_is_in_the_summary_by_class(tmp_path: Path) -> None:
    summary = build_summary(long_prompt_stalls_two(tmp_path))
    assert sum(summary["attribution"].values()) == pytest.approx(1, abs=1e-5)
    assert summary["attribution"]["stalled"] == pytest.approx(650 / (2 * 411 + 331), rel=1e-4)
    assert summary["by_class"]["chat"]["attribution"]["stalled"] == pytest.approx(325 / 411, rel=1e-4)
    assert summary["by_class"]["rag"]["attribution"]["stalled"] == 0
    assert summary["by_class"]["rag"]["attribution"]["prefill"] == pytest.approx(310 / 331, rel=1e-4)
    assert set(summary["queue_reasons"]) == set(REASONS)
    assert sum(summary["queue_reasons"].values()) == pytest.approx(summary["attribution"]["queue"], rel=1e-4)


def test_prompts_of_one_pass_share_it_by_their_tokens(tmp_path: Path) -> None:
    """No pass of decodes only to compare with: the decode's token weighs as much as one of a prompt."""
    steps = [pass_of(0, 1.0, 1.1, [(0, 60, 0), (1, 39, 0), (2, 1, 1)])]
    client = [request(i, [(1.1, 1)], intended=1.0) for i in (0, 1)]
    found = rows_of(
        write_run(tmp_path, client, engine=[told(i, 1, 1, 1.1, 1.1) for i in (0, 1)], steps=steps)
    )
    assert parts(found.loc[ID(0)]) == {"prefill": 61.0, "stalled": 39.0}
    assert parts(found.loc[ID(1)]) == {"prefill": 40.0, "stalled": 60.0}


def test_what_the_queue_waited_for(tmp_path: Path) -> None:
    """It comes in the middle of a step, then there is no seat, then no KV, then its batch is being formed."""
    steps = [
        pass_of(0, 1.0, 1.1, [(9, 1, 1)], host_gap_ns=None),
        pass_of(1, 1.1, 1.2, [(9, 1, 1)], waiting=1, blocked="seats"),
        pass_of(2, 1.2, 1.3, [(9, 1, 1)], waiting=1, blocked="kv"),
        pass_of(3, 1.5, 1.6, [(0, 10, 0)], host_gap_ns=None),
    ]
    client = [request(0, [(1.6, 1)], intended=1.04)]
    engine = [told(0, 1.04, 1.5, 1.6, 1.6)]
    for delay, company in ((0, "iteration"), (500, "batch")):
        settings = {"engine": {"max_queue_delay_ms": delay}}
        folder = write_run(tmp_path / str(delay), client, engine=engine, steps=steps, config=settings)
        waited = dict.fromkeys(REASONS, 0.0) | {"iteration": 60.0, "seat": 100.0, "kv": 100.0}
        waited[company] += 200.0
        row = rows_of(folder).loc[ID(0)]
        assert [row[name] for name in QUEUE] == pytest.approx(list(waited.values()), abs=1e-6)


def test_records_without_reasons_are_not_blamed_on_anything(tmp_path: Path) -> None:
    steps = [pass_of(0, 1.0, 1.1, [(9, 1, 1)], waiting=1), pass_of(1, 1.1, 1.2, [(0, 10, 0)])]
    client = [request(0, [(1.2, 1)], intended=1.0)]
    row = rows_of(write_run(tmp_path, client, engine=[told(0, 1.0, 1.1, 1.2, 1.2)], steps=steps)).loc[ID(0)]
    assert row["queue_unknown"] == pytest.approx(100)


def test_a_preempted_sequence(tmp_path: Path) -> None:
    """It is left out once, then loses its seat, comes back at 1.4 s, and computes 12 tokens again."""
    steps = [
        pass_of(0, 1.0, 1.1, [(0, 10, 0)]),
        pass_of(1, 1.1, 1.2, [(9, 100, 0)]),
        pass_of(2, 1.2, 1.3, [(9, 1, 1)], preempted=[0]),
        pass_of(3, 1.3, 1.4, [(9, 1, 1)]),
        pass_of(4, 1.4, 1.5, [(0, 12, 2)]),
        pass_of(5, 1.5, 1.6, [(0, 1, 1)]),
    ]
    client = [request(0, [(1.1, 1), (1.5, 1), (1.6, 1)], intended=1.0)]
    engine = [told(0, 1.0, 1.0, 1.1, 1.6, preemptions=1, recomputed_tokens=12)]
    found = rows_of(write_run(tmp_path, client, engine=engine, steps=steps))
    assert parts(found.loc[ID(0)]) == {
        "prefill": 100.0,
        "stalled": 100.0,
        "preempted": 200.0,
        "recompute": 100.0,
        "decode": 100.0,
    }


def test_a_drained_answer_is_held(tmp_path: Path) -> None:
    steps = [
        pass_of(0, 1.0, 1.1, [(0, 10, 0), (1, 10, 0)]),
        pass_of(1, 1.1, 1.2, [(0, 1, 1), (1, 1, 1)]),
        pass_of(2, 1.2, 1.3, [(0, 1, 3), (1, 1, 1)]),
    ]
    client = [request(0, [(1.31, 2)], intended=1.0), request(1, [(1.31, 3)], intended=1.0)]
    engine = [told(0, 1.0, 1.0, 1.1, 1.3), told(1, 1.0, 1.0, 1.1, 1.3)]
    found = rows_of(write_run(tmp_path, client, engine=engine, steps=steps))
    both = {"prefill": 50.0, "stalled": 50.0, "transport_out": 10.0}
    assert parts(found.loc[ID(0)]) == {**both, "decode": 100.0, "held": 100.0}
    assert parts(found.loc[ID(1)]) == {**both, "decode": 200.0}


def test_between_slices_it_waits_for_its_batch(tmp_path: Path) -> None:
    steps = [
        pass_of(0, 1.0, 1.1, [(0, 10, 0)]),
        pass_of(1, 1.1, 1.3, [(9, 10, 0)], waiting=1, blocked="batch"),
        pass_of(2, 1.3, 1.4, [(0, 11, 2)]),
    ]
    client = [request(0, [(1.1, 1), (1.4, 1)], intended=1.0)]
    facts = {"server": {"scheduler": "sliced"}}
    row = rows_of(write_run(tmp_path, client, engine=[told(0, 1, 1, 1.1, 1.4)], steps=steps, **facts)).loc[
        ID(0)
    ]
    assert parts(row) == {"prefill": 100.0, "queue": 200.0, "recompute": 100.0}
    assert row["queue_batch"] == pytest.approx(200)


def test_hang_ups_in_every_state(tmp_path: Path) -> None:
    """In the queue, in the middle of its prompt, while preempted, and while its answer is held."""
    steps = [
        pass_of(0, 1.0, 1.1, [(1, 10, 0), (2, 10, 0), (3, 10, 0)], waiting=1, blocked="seats"),
        pass_of(1, 1.1, 1.3, [(1, 10, 0), (3, 1, 3)], preempted=[2], waiting=2, blocked="kv"),
    ]
    client = [request(i, [], intended=1.0, outcome="cancelled", end_ns=ns(1.2)) for i in range(4)]
    ends = dict(zip(range(4), ("queued", "prefill", "preempted", "held"), strict=True))
    engine = [
        told(i, 1.0, 1.0, 1.1, 1.3, finish_reason="abort", abort_state=state) for i, state in ends.items()
    ]
    engine[0] |= {"admitted_ns": None, "first_token_ns": None, "finish_ns": T0_NS + ns(1.2)}
    engine[3] |= {"finish_reason": "stop", "abort_state": None}
    folder = write_run(tmp_path, client, engine=engine, steps=steps)
    found = rows_of(folder)
    third = 100 / 3
    shared = {"prefill": pytest.approx(third), "stalled": pytest.approx(2 * third)}
    assert parts(found.loc[ID(0)]) == {"queue": 200.0}
    assert parts(found.loc[ID(1)]) == {**shared, "prefill": pytest.approx(third + 100)}
    assert parts(found.loc[ID(2)]) == {**shared, "preempted": 100.0}
    assert parts(found.loc[ID(3)]) == {**shared, "held": 100.0}
    assert build_summary(folder)["attribution"]["queue"] is None  # of completed requests, and there is none


def test_without_steps_its_own_stamps_split_it(tmp_path: Path) -> None:
    client = [request(0, [(1.3, 1), (1.6, 1)], intended=1.0)]
    found = rows_of(write_run(tmp_path, client, engine=[told(0, 1.0, 1.1, 1.3, 1.6)]))
    assert parts(found.loc[ID(0)]) == {"queue": 100.0, "prefill": 200.0, "decode": 300.0}


def test_steps_of_another_life_are_not_believed(tmp_path: Path) -> None:
    steps = [pass_of(0, 5.0, 5.1, [(0, 10, 0)])]
    client = [request(0, [(1.3, 1), (1.6, 1)], intended=1.0)]
    found = rows_of(write_run(tmp_path, client, engine=[told(0, 1.0, 1.1, 1.3, 1.6)], steps=steps))
    assert parts(found.loc[ID(0)]) == {"queue": 100.0, "prefill": 200.0, "decode": 300.0}


TIGHT = ("chunked", "continuous", "prefill_first")
"""Strategies that get so little KV that they have to preempt."""


def drive(folder: Path, scheduler: str, **changes: Any) -> Path:
    """Twelve requests through an engine whose passes take 1 ms and 0.1 ms a token; the client has each token
    0.5 ms later."""
    driver = Driver(config(scheduler, **changes), num_kv_blocks=7 if scheduler in TIGHT else 12)
    driver.clock.now = T0_NS / 1e9 + 1.0
    forward = driver.runner.run

    def run(batch: Any) -> Any:
        driver.clock.now += 0.001 + 0.0001 * len(batch.token_ids)
        return forward(batch)

    driver.runner.run = run  # type: ignore[method-assign]
    client: dict[int, dict[str, Any]] = {}
    coming = list(range(12))
    for _ in range(3000):
        if not coming and not driver.engine.has_work:
            break
        now = driver.clock.now - T0_NS / 1e9
        while coming and 1.0 + 0.004 * coming[0] <= now:
            i = coming.pop(0)
            due = 1.0 + 0.004 * i
            label = {"run": "synthetic", "id": ID(i), "attempt": 0}
            seq = driver.add(3 + 2 * (i % 4), 2 + i % 7, label=label, request_class="ab"[i % 2])
            row = request(i, [], intended=due, send=now, request_class="ab"[i % 2])
            client[seq] = {**row, "chunk_ns": [], "chunk_tokens": []}
        outputs = driver.step()
        seen = ns(driver.clock.now - 0.001 + 0.0005) - T0_NS
        for output in outputs:
            if output.token_ids:
                client[output.seq_id]["chunk_ns"].append(seen)
                client[output.seq_id]["chunk_tokens"].append(len(output.token_ids))
                client[output.seq_id]["end_ns"] = seen
        if coming and not driver.engine.has_work:
            driver.clock.now = max(driver.clock.now, T0_NS / 1e9 + 1.0 + 0.004 * coming[0] + 1e-6)
    engine = [asdict(record) for record in driver.log.requests.values()]
    steps: list[StepRecord] = driver.log.steps
    facts = {"server": {"scheduler": scheduler}}
    return write_run(folder, list(client.values()), engine=engine, steps=[asdict(s) for s in steps], **facts)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_strategy_adds_up(tmp_path: Path, scheduler: str) -> None:
    folder = drive(tmp_path, scheduler, **({"policy": {"slice_tokens": 2}} if scheduler == "sliced" else {}))
    found = rows_of(folder)
    assert len(found) == 12
    assert (found[[*PARTS, *QUEUE]] > -1e-4).all(axis=None)  # the clock ticks in fractions of a ns
    engine = load_run(folder).engine.set_index("id")
    assert found["queue"].sum() > 0
    assert found["prefill"].gt(0).all()
    # What the engine counted and what the time says must be of the same requests.
    assert (found["preempted"] > 1e-4).equals(engine["preemptions"].reindex(found.index) > 0)
    assert (found["recompute"] > 1e-4).equals(engine["recomputed_tokens"].reindex(found.index) > 0)
    assert (found["held"] > 1e-4).any() == (scheduler in ("static", "dynamic", "sliced"))
    assert found["queue_unknown"].sum() == 0
    assert scheduler not in TIGHT or (found["preempted"] > 1e-4).any()
