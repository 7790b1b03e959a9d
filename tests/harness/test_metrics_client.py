"""How the client itself did, what became of hang-ups, and what arrived: on runs whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.metrics.arrivals import MOST_IDS, most_within
from harness.metrics.cancellations import next_admission_ns
from harness.metrics.engine import NO_ENGINE
from harness.metrics.run import engine_frame, request_frame
from harness.metrics.summary import build_summary
from tests.support.run_factory import (
    T0_NS,
    default_meta,
    engine_request,
    ns,
    request,
    steady_requests,
    write_run,
)


def client(folder: Path, rows: list[dict[str, Any]], **recorded: Any) -> dict[str, Any]:
    """summary.client, and null_reasons as its "null"."""
    meta = {**default_meta()["client"], **recorded}
    summary = build_summary(write_run(folder, rows, client=meta))
    return {**summary["client"], "null": summary["null_reasons"]}


def test_what_the_client_recorded(tmp_path: Path) -> None:
    calibration = {"ttft_error_ms": {"p50": 0.1}}
    found = client(
        tmp_path,
        steady_requests(40),
        backend="lean",
        stamps="kernel",
        processes=2,
        read_lag_ms=[0.1, 0.2, 0.9],
        calibration=calibration,
    )
    assert (found["backend"], found["stamps"], found["processes"]) == ("lean", "kernel", 2)
    assert (found["read_lag_ms"]["n"], found["read_lag_ms"]["max"]) == (3, 0.9)
    assert found["calibration"] == calibration
    assert found["cpu_s_per_1k_tokens"] == pytest.approx(0.5 / 440 * 1000, rel=1e-5)
    assert not {"client.stamps", "client.calibration", "client.read_lag_ms"} & set(found["null"])


def test_what_it_did_not_record_is_null_with_a_reason(tmp_path: Path) -> None:
    found = client(tmp_path, steady_requests(40), stamps="reader", read_lag_ms=[])
    assert found["calibration"] is found["coalesced_share"] is found["processes"] is None
    assert "the reader stamps" in found["null"]["client.read_lag_ms"]
    assert found["null"]["client.calibration"] == "not calibrated"
    assert found["null"]["client.coalesced_share"] == "reads were not counted"


def test_chunks_that_share_a_read(tmp_path: Path) -> None:
    """Ten answers of 11 chunks: 2 of each came in one read with an earlier one."""
    rows = [{**row, "reads": 9, "coalesced": 2} for row in steady_requests(10)]
    found = client(tmp_path, rows)
    assert found["coalesced_share"] == pytest.approx(2 / 11)
    assert found["tokens_per_chunk"] == pytest.approx(1.0)
    assert found["gaps_under_0.1ms_share"] == 0.0


def test_chunks_of_a_server_that_counts_by_usage(tmp_path: Path) -> None:
    """Each chunk claims 1 token, usage says 40 in 10 chunks."""
    rows = [
        request(i, [(1 + 0.1 * k, 1) for k in range(10)], output_tokens=40, token_source="usage")
        for i in range(3)
    ]
    assert client(tmp_path, rows)["tokens_per_chunk"] == pytest.approx(4.0)


def test_only_the_final_attempt_is_measured(tmp_path: Path) -> None:
    """Reset at once, reset again, then served: latency counts from the first intended arrival."""
    attempts = [
        request(0, outcome="failed", attempt=1, final=False, reason="reset"),
        request(0, outcome="failed", attempt=2, final=False, reason="reset", send_ns=ns(0.5)),
        request(0, [(2.0, 1), (2.1, 1)], attempt=3, send=1.5),
    ]
    for order in (attempts, attempts[::-1]):
        folder = tmp_path / str(order is attempts)
        summary = build_summary(write_run(folder, order))
        assert summary["counts"]["scheduled"] == summary["counts"]["completed"] == 1
        assert summary["client"]["retries"] == 2
        assert summary["latency_ms"]["ttft"]["from_intended"]["max"] == pytest.approx(2000)
        assert summary["latency_ms"]["ttft"]["from_send"]["max"] == pytest.approx(500)
        assert summary["valid"]


def test_tokens_by_channel(tmp_path: Path) -> None:
    thinking = [{**row, "reasoning_tokens": 4, "stop_after": 10} for row in steady_requests(10, tokens=11)]
    plain = [{**row, "id": f"p{i}"} for i, row in enumerate(steady_requests(10, tokens=11))]
    summary = build_summary(write_run(tmp_path / "a", [*thinking, *plain]))
    found = {"planned": 210, "counted": 220, "off": 10, "reasoning": 40, "other": 70}
    assert summary["output_tokens"] == found
    summary = build_summary(write_run(tmp_path / "b", plain))
    assert summary["output_tokens"]["reasoning"] is None
    assert "usage" in summary["null_reasons"]["output_tokens.reasoning"]


def test_arrivals_add_up_to_the_schedule(tmp_path: Path) -> None:
    gone = {"outcome": "cut_off", "send_ns": None, "dispatch_ns": None, "end_ns": None}
    rows = steady_requests(40)
    rows = [{**r, "send_ns": r["send_ns"] + ns(0.15), "dispatch_ns": r["send_ns"] + ns(0.15)} for r in rows]
    rows += [{**request(100 + i, intended=5.0, reason="shed"), **gone} for i in range(3)]
    rows += [{**request(200 + i, intended=6.0, reason="not_sent"), **gone} for i in range(2)]
    rows += [{**request(300, intended=6.0, reason="session_ended"), **gone}]
    rows += [request(400, [(9.0, 1)], intended=6.0, outcome="cut_off", reason="in_flight")]
    found = build_summary(write_run(tmp_path, rows))["arrivals"]
    assert (found["sent"], found["deferred"], found["shed"], found["dropped"]) == (41, 40, 3, 3)
    assert found["sent"] + found["shed"] + found["dropped"] == len(rows)
    assert found["shed_ids"] == ["r000100", "r000101", "r000102"]
    assert found["dropped_ids"] == ["r000200", "r000201", "r000300"]
    assert found["deferred_ids"] == [f"r{i:06d}" for i in range(MOST_IDS)]


def test_most_arrivals_within_a_second() -> None:
    assert most_within(np.array([]), 1.0) == 0
    assert most_within(np.array([0.0, 0.9, 1.0, 1.8, 1.9, 5.0]), 1.0) == 3  # 0.9 to 1.8
    assert most_within(np.array([0.0, 1.0, 2.0]), 1.0) == 1  # half-open


def test_later_turns_are_no_part_of_the_drawn_rate(tmp_path: Path) -> None:
    """Turn 1 leaves when its session lets it, whatever arrival the schedule notes for its order."""
    rows = steady_requests(60)
    rows += [{**request(100 + i, [(30.5, 1)], intended=30.0), "turn": 1} for i in range(20)]
    found = build_summary(write_run(tmp_path, rows))["arrivals"]
    assert (found["due"], found["sent_of_due"]) == (60, 60)
    assert found["rate_error"] == pytest.approx(0, abs=1e-9)


def hang_ups(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Four hang-ups at 1.0 s; two requests wait from 0.9 s and come in at 1.2 s and 3.0 s."""
    rows = [request(i, [(0.5, 7)], outcome="cancelled", end_ns=ns(1.0)) for i in range(4)]
    rows += [request(10 + i, [(4.0, 1), (5.0, 1)], intended=0.9) for i in range(2)]
    released = ("queued", 1.01), ("prefill", 1.1), ("decode", 1.3), ("held", 2.0)
    engine = [
        engine_request(row, admitted=0.1, finish_reason="abort", finish_ns=T0_NS + ns(at))
        | {"abort_state": state, "wasted_tokens": 100, "admitted_ns": None if state == "queued" else T0_NS}
        for row, (state, at) in zip(rows[:4], released, strict=True)
    ]
    engine += [engine_request(rows[4], admitted=1.2), engine_request(rows[5], admitted=3.0)]
    summary = build_summary(write_run(folder, rows, engine=engine))
    return summary["cancellations"], summary["null_reasons"]


def test_release_and_reuse_by_state(tmp_path: Path) -> None:
    """A held row of a static batch is let go with the batch, and its room is taken after that."""
    found, reasons = hang_ups(tmp_path)
    release = {state: block["p50"] for state, block in found["release_ms_by_state"].items()}
    assert release == {
        state: pytest.approx(ms)
        for state, ms in (("queued", 10), ("prefill", 100), ("decode", 300), ("held", 1000))
    } | {"preempted": None}
    reuse = {state: block["p50"] for state, block in found["reuse_ms_by_state"].items()}
    assert reuse == {
        "prefill": pytest.approx(200),
        "decode": pytest.approx(2000),
        "held": pytest.approx(2000),
    }
    assert found["reuse_ms"]["n"] == 3  # who never left the queue held no slot
    assert found["wasted_tokens"] == 400
    assert found["received_tokens"] == 28
    unknown = [path for path in reasons if path.startswith("cancellations")]
    assert unknown == ["cancellations.release_ms_by_state.preempted"]


def test_nobody_was_waiting(tmp_path: Path) -> None:
    rows = [request(0, [(0.5, 7)], outcome="cancelled", end_ns=ns(1.0)), request(1, [(2.0, 1)], intended=1.5)]
    engine = [
        engine_request(rows[0], admitted=0.1, finish_reason="abort", finish_ns=T0_NS + ns(1.1))
        | {"abort_state": "decode"},
        engine_request(rows[1], admitted=1.6),
    ]
    summary = build_summary(write_run(tmp_path / "a", rows, engine=engine))
    assert summary["cancellations"]["release_ms"]["n"] == 1
    assert summary["cancellations"]["reuse_ms"]["n"] == 0
    reasons = summary["null_reasons"]
    assert "nobody was waiting" in reasons["cancellations.reuse_ms"]
    assert "nobody was waiting" in reasons["cancellations.reuse_ms_by_state.decode"]
    assert "none was aborted in state held" in reasons["cancellations.reuse_ms_by_state.held"]
    foreign = build_summary(write_run(tmp_path / "b", rows))
    assert foreign["null_reasons"]["cancellations.reuse_ms_by_state"] == NO_ENGINE
    assert foreign["cancellations"]["received_tokens"] == 7


def test_the_next_admission_against_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    lines = []
    for i in range(300):
        arrival = float(rng.uniform(0, 10))
        line = engine_request(
            request(i, [(20.0, 1)], send=arrival), admitted=arrival + float(rng.exponential(0.02))
        )
        lines.append(line if i % 7 else {**line, "admitted_ns": None})
    engine = engine_frame(pd.DataFrame(lines).convert_dtypes(), T0_NS, "synthetic")
    free = rng.uniform(0, 11e9, 200)
    pairs = [p for p in zip(engine["arrival_ns"], engine["admitted_ns"], strict=True) if np.isfinite(p[1])]
    plain = [min((b for a, b in pairs if a <= t <= b), default=np.nan) for t in free]
    found = next_admission_ns(engine, free)
    np.testing.assert_array_equal(found, np.array(plain))
    assert 50 < np.isfinite(found).sum() < 200


def test_stalls_and_fluidity_by_class_add_up(tmp_path: Path) -> None:
    """One class pauses for 2 s in each answer; both are held to one threshold."""
    smooth = steady_requests(20, tokens=20)
    bumpy = [
        request(
            100 + i, [(i + 0.2 + 0.02 * k + (2.0 if k >= 10 else 0), 1) for k in range(20)], intended=float(i)
        )
        | {"request_class": "rag"}
        for i in range(5)
    ]
    summary = build_summary(write_run(tmp_path / "a", [*smooth, *bumpy], slo={"ttft_ms": 500, "tpot_ms": 50}))
    chat, rag = summary["by_class"]["chat"], summary["by_class"]["rag"]
    assert (chat["stalls"]["count"], rag["stalls"]["count"], summary["stalls"]["count"]) == (0, 5, 5)
    assert rag["stalls"]["seconds"] == pytest.approx(5 * 2.02)
    assert chat["stalls"]["longest_ms"] == pytest.approx(20)
    assert {part["stalls"]["threshold_ms"] for part in (chat, rag, summary)} == {100.0}
    assert chat["fluidity"] == 1.0 > summary["fluidity"] > rag["fluidity"]
    # One factor for all: at 150 median gaps a pause of 2.02 s is none.
    lax = write_run(tmp_path / "b", [*smooth, *bumpy], config={"slo": {"stall_factor": 150}})
    assert build_summary(lax)["stalls"]["threshold_ms"] == pytest.approx(3000)
    assert build_summary(lax)["by_class"]["rag"]["stalls"]["count"] == 0


def test_energy_from_the_counter_and_what_the_server_says_of_itself(tmp_path: Path) -> None:
    """100 tokens in 2 s; the counter rises by 50 J/s, so 1 J a token, whatever the power readings say."""
    rows = [request(0, [(1.0, 50), (2.0, 50)])]
    empty = dict.fromkeys(("server_cpu_pct", "server_rss_mb", "client_cpu_pct", "client_rss_mb"))
    telemetry = [
        {"t_ns": ns(0.1 * i), "gpu_power_w": 70.0, "gpu_util_pct": 1.0, "gpu_memory_gb": 1.0, **empty}
        | {"gpu_energy_j": 9000.0 + 5.0 * i}
        for i in range(-5, 30)
    ]
    metrics = [
        {"t_ns": ns(0.5 * i), "running": i, "waiting": 2, "kv_usage": 0.1 * i, "preemptions_total": 10 + i}
        | {"generation_tokens_total": 1000 + 25 * i, "prompt_tokens_total": None}
        | {"prefix_cache_hits_total": 50 + 5 * i, "prefix_cache_queries_total": 200 + 20 * i}
        for i in range(-1, 7)
    ]
    summary = build_summary(
        write_run(tmp_path, rows, telemetry=telemetry, server_metrics=metrics, device="cuda")
    )
    used = summary["utilization"]
    assert used["power_w"] == 70
    assert used["energy_j"] == pytest.approx(100)
    assert used["energy_j_per_token"] == pytest.approx(1.0)
    said = summary["server_metrics"]
    assert said["running"] == {"mean": 2.0, "max": 4.0}
    assert said["kv_usage"]["max"] == pytest.approx(0.4)
    assert (said["preemptions"], said["generation_tokens"]) == (4, 100)
    assert said["prefix_cache_hit_rate"] == pytest.approx(0.25)
    assert said["prompt_tokens"] is None
    assert "server_metrics.prompt_tokens" in summary["null_reasons"]


def test_a_server_that_was_not_scraped_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [request(0, [(1.0, 50), (2.0, 50)])])
    recorded = {"server_metrics": {"rows": 0, "reasons": {"server_metrics": "GET /metrics: 404"}}}
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **recorded}))
    summary = build_summary(folder)
    assert summary["server_metrics"]["running"]["mean"] is None
    assert summary["null_reasons"]["server_metrics.running"] == "GET /metrics: 404"


def test_what_was_drawn_stands_beside_what_was_sent(tmp_path: Path) -> None:
    """A constant schedule, sent in jitter: the plan's CV is 0, the sends' is not."""
    jitter = np.random.default_rng(0).uniform(0, 0.05, 200)
    rows = [{**r, "send_ns": r["send_ns"] + ns(j)} for r, j in zip(steady_requests(200), jitter, strict=True)]
    found = build_summary(write_run(tmp_path / "a", rows))["arrivals"]
    assert found["planned_cv"] < 0.01 < 0.1 < found["cv"]
    assert found["planned_iod"]["1s"] == pytest.approx(0, abs=0.06)
    closed = build_summary(write_run(tmp_path / "b", rows, config={"load": {"kind": "closed"}}))
    assert closed["arrivals"]["planned_cv"] is None
    assert "closed loop" in closed["null_reasons"]["arrivals.planned_cv"]


def test_a_reading_weighs_as_long_as_it_stands_for(tmp_path: Path) -> None:
    """Ten readings of 100 % in the first second, one of 50 % for the second: the mean is 75 %."""
    empty = dict.fromkeys(("server_rss_mb", "client_cpu_pct", "client_rss_mb"))
    rows = [{"t_ns": ns(0.1 * i), "server_cpu_pct": 100.0, **empty} for i in range(11)]
    rows.append({"t_ns": ns(2.0), "server_cpu_pct": 50.0, **empty})
    summary = build_summary(write_run(tmp_path, [request(0, [(1.0, 1), (2.0, 1)])], telemetry=rows))
    assert summary["utilization"]["cpu_pct"] == pytest.approx(75)


def test_the_attempt_that_says_it_is_final_is_the_one() -> None:
    rows = [request(0, attempt=2, final=False, outcome="failed"), request(0, [(1.0, 1)], attempt=1)]
    for order in (rows, rows[::-1]):
        assert request_frame(order)["outcome"].tolist() == ["completed"]
