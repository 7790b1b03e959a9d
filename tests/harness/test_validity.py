"""Which runs may not be believed, which carry a warning, and which are sound."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.metrics.run import load_run
from harness.metrics.summary import build_summary, summarize
from harness.validity import LIMITS, clock_step_ns, lag_faults, lag_limit_ms
from tests.support.run_factory import SECOND, default_meta, ns, request, steady_requests, write_run

OPEN = {"load": {"kind": "open", "concurrency": None}}


def client(**changes: Any) -> dict[str, Any]:
    return {**default_meta()["client"], **changes}


def judged(folder: Path, rows: list[dict[str, Any]], **meta: Any) -> tuple[str, str]:
    """(invalid_reasons, warnings) of a run, each in one line."""
    summary = build_summary(write_run(folder, rows, **meta))
    assert summary["valid"] is (not summary["invalid_reasons"])
    return " | ".join(summary["invalid_reasons"]), " | ".join(summary["warnings"])


def late(rows: list[dict[str, Any]], by: float, count: int) -> list[dict[str, Any]]:
    """The first `count` requests leave `by` seconds late."""
    return [{**row, "send_ns": row["send_ns"] + ns(by)} if i < count else row for i, row in enumerate(rows)]


GOOD = steady_requests(150, tokens=2)


def test_a_sound_run(tmp_path: Path) -> None:
    assert judged(tmp_path, GOOD, config=OPEN) == ("", "")


def test_every_limit_has_a_unit_and_a_reason_and_none_can_be_changed() -> None:
    for limit in LIMITS.values():
        assert limit.unit
        assert len(limit.reason) > 20
        with pytest.raises(dataclasses.FrozenInstanceError):
            limit.value = 9.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        LIMITS["lag_ms"] = LIMITS["rate_error"]  # type: ignore[index]


def test_incomplete_and_failed_runs(tmp_path: Path) -> None:
    assert (
        "incomplete: server_died"
        in judged(tmp_path / "a", GOOD, complete=False, incomplete_reason="server_died")[0]
    )
    killed = judged(tmp_path / "k", GOOD, complete=False, incomplete_reason="running")[0]
    assert "incomplete: the run did not record its end" in killed
    refused = [request(i, outcome="rejected") for i in range(5)]
    assert "no request completed" in judged(tmp_path / "b", refused)[0]
    failed = [request(150 + i, outcome="failed") for i in range(2)]
    assert "errors: 2 of 152" in judged(tmp_path / "c", [*GOOD, *failed])[0]
    assert judged(tmp_path / "d", [*GOOD, failed[0]])[0] == ""
    cut = [request(200 + i, outcome="cut_off", reason="in_flight") for i in range(50)]
    assert judged(tmp_path / "e", [*GOOD, failed[0], *cut])[0] == ""  # the run's end is nobody's error


def test_records_that_do_not_add_up(tmp_path: Path) -> None:
    strange = [*GOOD, {**request(200), "outcome": "vanished"}]
    assert "conservation: 1 of 151 records have no known outcome" in judged(tmp_path / "a", strange)[0]
    folder = write_run(tmp_path / "b", steady_requests(20))
    lines = (folder / "requests.jsonl").read_text().splitlines(keepends=True)
    (folder / "requests.jsonl").write_text("".join(lines[:-2]))  # the last record and the footer are gone
    summary = build_summary(folder)
    assert "conservation: 20 requests were scheduled, 19 ended" in summary["invalid_reasons"]
    assert "records: requests.jsonl has no footer" in summary["invalid_reasons"]
    assert summary["latency_ms"]["tpot"]["n"] == 19  # what there is, is still reported
    stranger = json.dumps(request(999, [(1.0, 1)])) + "\n"
    footer = json.dumps({"type": "footer", "records": 20}) + "\n"
    (folder / "requests.jsonl").write_text("".join([*lines[:-2], stranger, footer]))
    found = build_summary(folder)["invalid_reasons"]
    assert found == ["conservation: 1 of 20 records are of requests never scheduled"]


def test_the_lag_limit_follows_ttft_between_its_floor_and_its_ceiling() -> None:
    top, floor, share = (LIMITS[name].value for name in ("lag_ms", "lag_floor_ms", "lag_share"))
    assert lag_limit_ms(None) == lag_limit_ms(2000.0) == lag_limit_ms(top / share) == top
    assert lag_limit_ms(0.0) == lag_limit_ms(floor / share) == floor
    assert lag_limit_ms(80.0) == pytest.approx(4.0)


def test_a_client_that_sends_late(tmp_path: Path) -> None:
    """TTFT is 200 ms, so the limit is 5 ms; 150 sends may hold one that is late, and two are over 1 %."""
    assert (
        "client_bound: send lag p99 is 60.0 ms, 150 of 150"
        in judged(tmp_path / "a", late(GOOD, 0.06, 150))[0]
    )
    assert judged(tmp_path / "b", late(GOOD, 0.0049, 150))[0] == ""
    assert judged(tmp_path / "c", late(GOOD, 0.06, 1))[0] == ""
    assert "2 of 150 over 5 ms" in judged(tmp_path / "d", late(GOOD, 0.06, 2))[0]
    quick = steady_requests(150, tokens=2, ttft=0.05)
    assert judged(tmp_path / "e", late(quick, 0.0022, 150))[0] == ""
    assert "client_bound: send lag" in judged(tmp_path / "f", late(quick, 0.0035, 150))[0]


def test_a_late_client_is_told_what_would_help(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, late(GOOD, 0.06, 150)))

    def told(cpu_s: float, threads: int | None) -> str:
        own = {**run.meta["client"], "cpu_s": cpu_s, "processes": 2}
        meta = {**run.meta, "client": own, "duration_s": 10.0, "engine_cpu_cores": threads}
        return summarize(dataclasses.replace(run, meta=meta))["invalid_reasons"][0].partition(
            "(limit 1 %): "
        )[2]

    assert told(12.0, 4) == "it was busy 60% of the time; raise load.processes=2"
    waited = "it waited for a core; end what else runs on this machine"
    assert told(8.0, 4) == f"{waited}, or lower engine.threads=4"
    assert told(8.0, 1) == told(8.0, None) == waited


def test_a_burst_is_no_fault_and_a_stall_within_it_is(tmp_path: Path) -> None:
    burst = [{**row, "intended_ns": 0, "send_ns": ns(0.001 * (i + 1))} for i, row in enumerate(GOOD)]
    assert judged(tmp_path / "a", burst)[0] == ""  # 150 ms for 150 sends that are due at once
    stalled = [{**row, "send_ns": row["send_ns"] + ns(0.06 * (i // 25))} for i, row in enumerate(burst)]
    assert "client_bound: send lag p99 is 61.0 ms" in judged(tmp_path / "b", stalled)[0]


def test_a_retry_leaves_late_by_design(tmp_path: Path) -> None:
    first = [
        {**row, "attempt": 1, "final": False, "outcome": "rejected", "chunk_ns": [], "chunk_tokens": []}
        for row in GOOD[:30]
    ]
    second = [{**row, "attempt": 2, "send_ns": row["send_ns"] + ns(0.1)} for row in GOOD[:30]]
    summary = build_summary(write_run(tmp_path, [*first, *second, *GOOD[30:]]))
    assert summary["valid"]
    assert summary["client"]["retries"] == 30
    assert summary["counts"]["completed"] == 150
    assert summary["counts"]["rejected"] == 0
    assert summary["client"]["own_lag_ms"]["n"] == 120


def test_waiting_under_a_cap_is_not_the_clients_fault(tmp_path: Path) -> None:
    rows = [{**row, "dispatch_ns": row["send_ns"]} for row in late(steady_requests(50), 0.2, 50)]
    run = load_run(write_run(tmp_path, rows))
    assert not summarize(run)["valid"]
    capped = dataclasses.replace(run, config={"load": {"kind": "open", "concurrency": 4}})
    assert summarize(capped)["valid"]
    assert summarize(capped)["arrivals"]["deferred"] == 50


def test_a_late_loop_is_a_fault_where_it_stamps_and_a_warning_where_the_kernel_does(tmp_path: Path) -> None:
    lag = [80.0] * 50
    reader = client(stamps="reader", loop_lag_ms=lag)
    kernel = client(stamps="kernel", loop_lag_ms=lag, read_lag_ms=lag)
    assert "client_bound: loop lag p99 is 80.0 ms" in judged(tmp_path / "a", GOOD, client=reader)[0]
    invalid, warned = judged(tmp_path / "b", GOOD, client=kernel)
    assert invalid == ""
    assert "client: loop lag p99 is 80.0 ms" in warned
    assert "client: read lag p99 is 80.0 ms" in warned
    assert lag_faults({"loop lag": np.array([0.1] * 40 + [80.0])}, "reader", None, "") == []


@pytest.mark.parametrize("slow", [0.98, 1.0, 1.01, 1.03])
def test_the_realised_rate_is_held_to_the_drawn_one(tmp_path: Path, slow: float) -> None:
    """The schedule says 10/s; the client stretches it. Latency from the intended arrival would not show it
    were the intended times moved too, so the rate is compared with the schedule's file."""
    rows = [
        {**row, "intended_ns": round(row["intended_ns"] * slow), "send_ns": round(row["send_ns"] * slow)}
        for row in GOOD
    ]
    folder = write_run(tmp_path, rows, config=OPEN)
    write_run(tmp_path / "plan", GOOD)
    (folder / "schedule.parquet").write_bytes((tmp_path / "plan" / "schedule.parquet").read_bytes())
    summary = build_summary(folder)
    assert summary["arrivals"]["rate_error"] == pytest.approx(1 / slow - 1, abs=1e-4)
    assert any(reason.startswith("rate:") for reason in summary["invalid_reasons"]) is (slow in (0.98, 1.03))


def test_sends_that_are_missing_lower_the_rate_and_those_after_the_end_do_not(tmp_path: Path) -> None:
    def unsent(row: dict[str, Any]) -> dict[str, Any]:
        gone = {"outcome": "cut_off", "reason": "not_sent", "chunk_ns": [], "chunk_tokens": []}
        return {**row, **gone, "send_ns": None, "dispatch_ns": None, "end_ns": None, "output_tokens": None}

    holes = [unsent(row) if i % 20 == 10 else row for i, row in enumerate(GOOD)]
    invalid, _ = judged(tmp_path / "a", holes, config=OPEN)
    assert "rate: realised -4.7% off the drawn rate, 143 of 150 due requests sent (limit 2%)" in invalid
    cut = [*GOOD[:90], *(unsent(row) for row in GOOD[90:])]
    assert judged(tmp_path / "c", cut, config=OPEN)[0] == ""
    assert build_summary(tmp_path / "c")["arrivals"]["due"] == 90
    closed = {"load": {"kind": "closed", "concurrency": 8}}
    summary = build_summary(write_run(tmp_path / "d", holes, config=closed))
    assert summary["valid"]
    assert summary["arrivals"]["rate_error"] is None
    assert "closed loop" in summary["null_reasons"]["arrivals.rate_error"]


@pytest.mark.parametrize(
    ("jump_ns", "found"), [(0, None), (4_000_000, None), (10_000_000, None), (50_000_000, 50_000_000)]
)
def test_a_clock_that_slews_is_fine_and_one_that_steps_is_not(jump_ns: int, found: int | None) -> None:
    """10 s apart: 5 ms + 0.1 % of 10 s may be lost to slewing."""
    pairs = [
        [0, 1000],
        [10 * SECOND, 1000 + 10 * SECOND + jump_ns],
        [20 * SECOND, 1000 + 20 * SECOND + jump_ns],
    ]
    assert clock_step_ns(pairs) == found


def test_a_clock_step_is_a_fault_whoever_saw_it(tmp_path: Path) -> None:
    pairs = [[0, 0], [SECOND, 2 * SECOND]]
    assert "stepped by 1000.0 ms" in judged(tmp_path / "a", GOOD, clock_pairs=pairs)[0]
    seen = client(clock_offset_step_ns=-30_000_000)
    assert "stepped by 30.0 ms" in judged(tmp_path / "b", GOOD, client=seen)[0]
    assert judged(tmp_path / "c", GOOD, client=client(clock_offset_step_ns=4_000_000))[0] == ""


def test_tokens_that_come_together_are_a_warning(tmp_path: Path) -> None:
    bundles = [request(i, [(i + 1.0 + 0.4 * k, 20) for k in range(5)], intended=float(i)) for i in range(30)]
    invalid, warned = judged(tmp_path / "a", bundles)
    assert invalid == ""
    assert "ITL is chunked: 20 tokens a chunk" in warned
    pairs = [
        request(i, [(i + t, 1) for t in (0.5, 0.50005, 0.6, 0.60005)], intended=float(i)) for i in range(30)
    ]
    summary = build_summary(write_run(tmp_path / "b", pairs))
    assert summary["client"]["gaps_under_0.1ms_share"] == pytest.approx(2 / 3)
    assert "66.7% of the gaps are under 0.1 ms" in summary["warnings"][0]


def test_other_lengths_than_planned_are_a_warning(tmp_path: Path) -> None:
    longer = [{**row, "prompt_tokens": 130} for row in GOOD]
    invalid, warned = judged(tmp_path / "a", longer)
    assert invalid == ""
    assert "lengths: prompts held 1.3 times the tokens planned (150 are off)" in warned
    one = [{**GOOD[0], "prompt_tokens": 101}, *GOOD[1:]]
    summary = build_summary(write_run(tmp_path / "b", one))
    assert summary["warnings"] == []
    assert summary["prompt_tokens"] == {"planned": 15000, "counted": 15001, "off": 1}
    short = [{**row, "stop_after": 4} for row in GOOD]
    assert "answers held 0.5 times the tokens planned (150 are off)" in judged(tmp_path / "c", short)[1]


def test_an_invalid_run_exits_3_and_says_why_last(tmp_path: Path) -> None:
    write_run(tmp_path, late(GOOD, 0.06, 150))
    done = subprocess.run(
        [sys.executable, "-m", "harness.report", "--from", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "INVALID client_bound: send lag p99" in done.stdout
