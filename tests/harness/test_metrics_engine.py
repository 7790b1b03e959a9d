"""Figures from the engine's records, windows, rates, arrivals and machine, on runs whose truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.metrics.arrivals import index_of_dispersion
from harness.metrics.engine import thrashing
from harness.metrics.run import load_run
from harness.metrics.summary import build_summary
from harness.metrics.throughput import output_series
from tests.support.run_factory import (
    SECOND,
    T0_NS,
    engine_request,
    ns,
    request,
    steady_requests,
    step,
    write_run,
)


def test_queue_prefill_decode_and_where_the_time_went(tmp_path: Path) -> None:
    """Sent 10 ms late, 100 ms in the queue, first token at 300 ms, last at 500 ms, seen 5 ms later."""
    rows = [request(i, [(i + 0.305, 1), (i + 0.505, 1)], intended=float(i), send=i + 0.01) for i in range(10)]
    engine = [
        engine_request(
            row,
            admitted=i + 0.11,
            first_token_ns=T0_NS + ns(i + 0.3),
            finish_ns=T0_NS + ns(i + 0.5),
        )
        for i, row in enumerate(rows)
    ]
    summary = build_summary(write_run(tmp_path, rows, engine=engine))
    latency, parts = summary["latency_ms"], summary["attribution"]
    assert latency["queue_delay"]["p50"] == pytest.approx(100)
    assert latency["prefill"]["p50"] == pytest.approx(190)
    assert latency["decode"]["p50"] == pytest.approx(200)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["client_wait"] == pytest.approx(10 / 505, rel=1e-4)
    assert parts["queue"] == pytest.approx(100 / 505, rel=1e-4)
    assert parts["transport_out"] == pytest.approx(5 / 505, rel=1e-4)


def test_other_runs_requests_are_left_out(tmp_path: Path) -> None:
    rows = steady_requests(10)
    engine = [engine_request(row, admitted=row["send_ns"] / SECOND + 0.1) for row in rows]
    warm = engine_request(rows[0], admitted=500.0, run="warmup", id="w0")
    summary = build_summary(write_run(tmp_path, rows, engine=[warm, *engine]))
    assert summary["latency_ms"]["queue_delay"]["n"] == 10
    assert summary["latency_ms"]["queue_delay"]["max"] == pytest.approx(100)


def test_steps(tmp_path: Path) -> None:
    """600 useful tokens of 1,000 computed: 200 ended rows, 100 left pads, 100 recomputed; 7 rows of padding
    apart."""
    steps = [
        step(0, 0.1, 0.3, prefill_tokens=500, decode_tokens=0, left_pad_tokens=100, num_seqs=2, kv_live=10),
        step(1, 0.5, 0.1, decode_tokens=100, ended_rows=200, recomputed_tokens=100, num_seqs=6, kv_live=50)
        | {"backend_pad_rows": 7, "preemptions": 3, "host_gap_ns": None},
    ]
    outside = [step(2, -3.0, 1.0, prefill_tokens=9999), step(3, 99.0, 1.0, prefill_tokens=9999)]
    rows = [request(0, [(0.5, 1), (1.0, 1)])]
    summary = build_summary(write_run(tmp_path, rows, steps=[*outside, *steps]))
    found = summary["steps"]
    assert found["count"] == 2
    assert found["useful_token_fraction"] == pytest.approx(0.6)
    assert found["padded_token_fraction"] == pytest.approx(0.3)
    assert found["recomputed_tokens"] == 100
    assert found["backend_pad_rows"] == 7
    assert found["preemptions"] == 3
    assert found["batch_size_mean"] == pytest.approx((2 * 0.3 + 6 * 0.1) / 0.4)  # by time, not by step
    assert found["kv_live_mean"] == pytest.approx((10 * 0.3 + 50 * 0.1) / 0.4)
    assert found["kv_live_max"] == 50
    assert found["host_gap_ms"]["n"] == 1  # null after idling is no gap
    assert summary["utilization"]["device_busy"] == pytest.approx(0.4)
    assert summary["throughput"]["prefill_tokens_per_s"] == pytest.approx(500)


def test_the_hit_rate_is_of_the_prompt_tokens_that_were_due(tmp_path: Path) -> None:
    rows = [request(0, [(0.5, 1), (1.0, 1)])]
    steps = [step(0, 0.1, 0.3, prefill_tokens=50), step(1, 0.5, 0.1, prefill_tokens=10, decode_tokens=3)]
    steps[0]["cached_tokens"], steps[1]["cached_tokens"] = 100, 40
    off = build_summary(write_run(tmp_path / "off", rows, steps=steps))
    assert off["prefix_cache"] == {"hit_rate_tokens": None}
    assert off["null_reasons"]["prefix_cache.hit_rate_tokens"] == "engine.prefix_cache is off"
    folder = write_run(tmp_path / "on", rows, steps=steps)
    (folder / "config.yaml").write_text("engine: {name: chunked, prefix_cache: true}\n")
    assert build_summary(folder)["prefix_cache"]["hit_rate_tokens"] == pytest.approx(140 / 200)


def test_a_run_that_computes_most_of_it_again_is_said_to_thrash() -> None:
    steps = pd.DataFrame({"prefill_tokens": [60, 0], "decode_tokens": [0, 40], "recomputed_tokens": [0, 50]})
    steps["preemptions"] = [0, 1]
    assert thrashing(steps) is None
    steps.loc[1, "recomputed_tokens"] = 51
    assert thrashing(steps) is not None
    assert "51 tokens were computed again for 100 useful ones" in str(thrashing(steps))
    assert thrashing(steps.iloc[0:0]) is None
    assert thrashing(steps.assign(preemptions=0)) is None, "slices begin anew by design"


def test_the_warning_is_in_the_summary(tmp_path: Path) -> None:
    steps = [step(0, 0.1, 0.3, prefill_tokens=10), step(1, 0.5, 0.1, recomputed_tokens=90, preemptions=2)]
    summary = build_summary(write_run(tmp_path / "run", [request(0, [(0.5, 1), (1.0, 1)])], steps=steps))
    assert [w for w in summary["warnings"] if w.startswith("thrashing: 90 tokens")]


def test_busy_time_is_cut_at_the_window(tmp_path: Path) -> None:
    steps = [step(0, 0.5, 5.0)]  # the load ends at 1.0 s
    summary = build_summary(write_run(tmp_path, [request(0, [(0.5, 1), (1.0, 1)])], steps=steps))
    assert summary["utilization"]["device_busy"] == pytest.approx(0.5)


def test_a_server_without_records_has_no_engine_figures(tmp_path: Path) -> None:
    summary = build_summary(write_run(tmp_path, steady_requests()))
    assert summary["valid"]
    assert summary["steps"]["useful_token_fraction"] is None
    assert summary["steps"]["preemptions"] is None
    assert summary["utilization"]["device_busy"] is None
    assert summary["attribution"]["queue"] is None
    assert "step records" in summary["null_reasons"]["steps.preemptions"]


def test_cancellations(tmp_path: Path) -> None:
    """Three hang-ups at 1.0 s: found in the queue, in decode, and too late to matter."""
    rows = [request(i, [(0.5, 1)], outcome="cancelled", end_ns=ns(1.0)) for i in range(3)]
    rows.append(request(3, [(1.0, 1), (2.0, 1)]))
    engine = [
        engine_request(rows[0], admitted=0.1, finish_reason="abort", finish_ns=T0_NS + ns(1.02))
        | {"abort_state": "queued", "wasted_tokens": 0},
        engine_request(rows[1], admitted=0.1, finish_reason="abort", finish_ns=T0_NS + ns(1.06))
        | {"abort_state": "decode", "wasted_tokens": 130},
        engine_request(rows[2], admitted=0.1, finish_reason="stop", finish_ns=T0_NS + ns(0.9)),
        engine_request(rows[3], admitted=0.1),
    ]
    found = build_summary(write_run(tmp_path, rows, engine=engine))["cancellations"]
    assert found["count"] == 3
    assert found["by_state"] == {"queued": 1, "prefill": 0, "decode": 1, "preempted": 0, "held": 0}
    assert found["wasted_tokens"] == 130
    assert found["release_ms"]["n"] == 2
    assert found["release_ms"]["p50"] == pytest.approx(40)
    assert found["release_ms"]["max"] == pytest.approx(60)


def test_tokens_count_where_they_were_stamped(tmp_path: Path) -> None:
    """A request that the end cuts off keeps the tokens it had; the window runs to the last end."""
    rows = [
        request(0, [(1.0, 10), (2.0, 10)]),
        request(1, [(3.0, 10), (4.0, 10)], outcome="cut_off", reason="in_flight", finish_reason=None),
        request(2, outcome="cut_off", reason="not_sent", intended=9.0, send_ns=None, end_ns=None),
    ]
    summary = build_summary(write_run(tmp_path, rows))
    window = summary["window"]
    assert (window["start_s"], window["end_s"]) == (0.0, 4.0)
    assert (window["requests"], window["completed"], window["output_tokens"]) == (2, 1, 40)
    rate = summary["throughput"]
    assert rate["output_tokens_per_s"] == pytest.approx(10)
    assert rate["total_tokens_per_s"] == pytest.approx(60)
    assert rate["requests_per_s"] == pytest.approx(0.25)
    assert rate["slo_attainment"] == 1.0  # what the end cut off is left out
    assert summary["counts"]["cut_off"] == 2
    assert summary["valid"]


def test_goodput_counts_what_was_not_served(tmp_path: Path) -> None:
    rows = [request(i, [(1.0, 1), (1.1, 1)]) for i in range(6)]
    rows += [request(6, [(3.0, 1), (3.1, 1)]), request(7, outcome="rejected", reason="queue_full")]
    rows += [request(8, outcome="timed_out"), request(9, outcome="cancelled")]
    summary = build_summary(write_run(tmp_path, rows))
    assert summary["throughput"]["slo_attainment"] == pytest.approx(6 / 9)
    assert summary["throughput"]["goodput_rps"] == pytest.approx(6 / 3.1, rel=1e-5)
    assert summary["refusals"] == {"queue_full": 1}


def test_whole_bodies_count_towards_throughput(tmp_path: Path) -> None:
    rows = [request(0, [], stream=False, output_tokens=40, end_ns=ns(2.0))]
    summary = build_summary(write_run(tmp_path, rows))
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(20)
    assert summary["latency_ms"]["e2e"]["from_intended"]["p50"] == pytest.approx(2000)


def test_output_over_time(tmp_path: Path) -> None:
    from harness.metrics.latency import chunk_table

    run = load_run(write_run(tmp_path, [request(0, [(0.5, 4), (2.2, 6), (2.9, 1)])]))
    series = output_series(chunk_table(run.requests))
    assert series["t_s"].tolist() == [0, 1, 2]
    assert series["tokens_per_s"].tolist() == [4, 0, 7]


def test_poisson_and_bursts_have_the_dispersion_they_should() -> None:
    rng = np.random.default_rng(0)
    poisson = np.cumsum(rng.exponential(0.1, 4000))
    for width in (0.2, 1.0, 5.0):
        assert index_of_dispersion(poisson, width) == pytest.approx(1, abs=0.3)
    assert index_of_dispersion(np.arange(2000) * 0.1 + 0.05, 1.0) == pytest.approx(0, abs=0.01)
    in_tens = np.repeat(np.cumsum(rng.exponential(1.0, 400)), 10)
    burst = index_of_dispersion(in_tens, 1.0)
    assert burst is not None
    assert burst > 5
    assert index_of_dispersion(poisson[:50], 5.0) is None


def test_arrivals(tmp_path: Path) -> None:
    rows = [request(i, [(i + 1.0, 1)], intended=float(i), send=i + (0.3 if i == 4 else 0)) for i in range(11)]
    found = build_summary(write_run(tmp_path, rows))["arrivals"]
    assert found["rate"] == pytest.approx(1.0)
    assert found["planned_rate"] == 10.0
    assert found["deferred"] == 1
    assert found["cv"] == pytest.approx(np.std([1, 1, 1, 1.3, 0.7, 1, 1, 1, 1, 1], ddof=1), rel=1e-4)


def test_machine(tmp_path: Path) -> None:
    """Only samples inside the load window count; power over rate is energy per token."""
    rows = [request(0, [(1.0, 50), (2.0, 50)])]
    empty = dict.fromkeys(("server_rss_mb", "client_cpu_pct", "client_rss_mb"))
    telemetry = [
        {
            "t_ns": ns(t),
            "server_cpu_pct": cpu,
            "gpu_util_pct": 50,
            "gpu_memory_gb": mem,
            "gpu_power_w": 100,
            **empty,
        }
        for t, cpu, mem in ((-1.0, 900.0, 99.0), (1.0, 80.0, 2.0), (2.0, 120.0, 3.0), (9.0, 900.0, 99.0))
    ]
    found = build_summary(write_run(tmp_path, rows, telemetry=telemetry, device="cuda"))["utilization"]
    assert found["cpu_pct"] == pytest.approx(100)
    assert found["gpu_util_pct"] == 50
    assert found["gpu_memory_gb"] == 3
    assert found["energy_j_per_token"] == pytest.approx(2.0)
    assert found["mfu"] is None


def test_deadlines(tmp_path: Path) -> None:
    rows = [request(0, [(0.4, 1)]), request(1, [(0.6, 1)]), request(2, outcome="rejected")]
    rows.append(request(3, outcome="cancelled"))
    assert build_summary(write_run(tmp_path, rows, deadline_ms=500.0))["deadline_misses"] == 2
