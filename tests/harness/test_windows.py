"""Warm-up, steady state and drain of loads whose plateau is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.metrics.latency import chunk_table, per_request
from harness.metrics.run import request_frame
from harness.metrics.summary import build_summary
from harness.metrics.windows import concurrency, counted, in_flight, steady_window
from tests.support.run_factory import request, write_run


def user(first: int, start: float, end: float, *, e2e: float = 1.0, tokens: int = 20) -> list[dict[str, Any]]:
    """One client of a closed loop: its next request leaves when the last one has ended."""
    count = round((end - start) / e2e)
    rows = []
    for i in range(count):
        sent = start + i * e2e
        stamps = [(sent + (k + 1) * e2e / tokens, 1) for k in range(tokens)]
        rows.append(request(first + i, stamps, intended=sent))
    return rows


def ramp(users: int = 10, plateau_s: float = 30.0) -> list[dict[str, Any]]:
    """users join over 10 s, hold for plateau_s, and leave over 5 s: 20 tokens/s each."""
    rows: list[dict[str, Any]] = []
    for i in range(users):
        joins, leaves = 10.0 * i / users, 10.0 + plateau_s + 5.0 * i / users
        rows += user(1000 * i, joins, joins + round(leaves - joins))
    return rows


@pytest.mark.parametrize("plateau_s", [20.0, 30.0, 60.0])
def test_the_steady_window_has_the_plateaus_throughput(tmp_path: Path, plateau_s: float) -> None:
    """10 s of ramp: steady throughput is the plateau's to 1 %, the whole run's is lower, both have bounds."""
    summary = build_summary(write_run(tmp_path, ramp(plateau_s=plateau_s)))
    steady, whole = summary["steady"], summary["throughput"]
    assert steady["throughput"]["output_tokens_per_s"] == pytest.approx(200, rel=0.01)
    assert whole["output_tokens_per_s"] < 0.93 * 200
    assert steady["window"]["start_s"] == pytest.approx(9.0, abs=0.1)
    assert steady["window"]["end_s"] == pytest.approx(10 + plateau_s, abs=1.0)
    assert summary["warmup"]["start_s"] == summary["window"]["start_s"] == 0.0
    assert summary["warmup"]["end_s"] == steady["window"]["start_s"]
    assert summary["drain"]["start_s"] == steady["window"]["end_s"]
    assert summary["drain"]["end_s"] == summary["window"]["end_s"]
    for what in ("requests", "completed", "output_tokens"):
        parts = [summary["warmup"], steady["window"], summary["drain"]]
        assert sum(part[what] for part in parts) == summary["window"][what] > 100
        assert steady["window"][what] > 0
    assert steady["latency_ms"]["e2e"]["from_intended"]["n"] == steady["window"]["requests"]


def test_an_open_loop_that_speeds_up(tmp_path: Path) -> None:
    """10 s at 1 request/s, then 20 s at 10/s: the plateau's rate, not the run's."""
    slow = [request(i, [(i + 0.5, 5), (i + 1.0, 5)], intended=float(i)) for i in range(10)]
    fast = [
        request(10 + i, [(10 + i * 0.1 + 0.5, 5), (10 + i * 0.1 + 1.0, 5)], intended=10 + i * 0.1)
        for i in range(200)
    ]
    summary = build_summary(write_run(tmp_path, [*slow, *fast]))
    window = summary["steady"]["window"]
    assert window["start_s"] == pytest.approx(10.9, abs=0.05)
    assert window["end_s"] == pytest.approx(30.0, abs=0.2)
    assert summary["steady"]["throughput"]["output_tokens_per_s"] == pytest.approx(100, rel=0.02)
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(2100 / 30.9, rel=0.01)


def test_poisson_arrivals_keep_nearly_all_of_their_run() -> None:
    """Noise is no ramp: 200 s at 4 requests/s of 2 s each."""
    for seed in range(10):
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(0.25, 800))
        rows = [request(i, [(t + 1, 1), (t + 2, 1)], intended=float(t)) for i, t in enumerate(arrivals)]
        requests = request_frame(rows)
        end = float(arrivals[-1]) + 2
        window = steady_window(per_request(requests), {"start_s": float(arrivals[0]), "end_s": end})
        assert window["end_s"] - window["start_s"] > 0.93 * (end - arrivals[0])


def test_a_load_that_only_grows_or_only_falls_is_not_steady(tmp_path: Path) -> None:
    growing = [request(i, [(30.0, 1), (30.1 + i * 0.5, 1)], intended=i * 0.3) for i in range(100)]
    summary = build_summary(write_run(tmp_path / "grows", growing))
    assert summary["steady"]["latency_ms"] is None
    assert summary["steady"]["window"]["start_s"] is summary["warmup"]["end_s"] is None
    for path in ("steady.window", "warmup", "drain"):
        assert "no steady state: in-flight" in summary["null_reasons"][path]
    burst = [request(i, [(0.5 + i * 0.2, 1), (1.0 + i * 0.2, 1)]) for i in range(100)]
    summary = build_summary(write_run(tmp_path / "burst", burst))
    assert "sent at one time" in summary["null_reasons"]["steady.window"]
    straggler = request(100, [(20.5, 1), (21.0, 1)], intended=20.0)
    summary = build_summary(write_run(tmp_path / "falls", [*burst, straggler]))
    assert "in-flight falls from" in summary["null_reasons"]["steady.window"]


def test_in_flight_is_half_open() -> None:
    """One request ends when the next is sent: never two at once."""
    frame = per_request(request_frame([request(i, [(i + 1.0, 1)], intended=float(i)) for i in range(3)]))
    times, level = in_flight(frame)
    assert level.tolist() == [1, 1, 1, 0]
    assert times.tolist() == [0, 1, 2, 3]
    window = {"start_s": 0.0, "end_s": 3.0}
    assert steady_window(frame, window)["end_s"] == pytest.approx(2.0)  # the last send
    assert concurrency(frame, window)[0] == {"peak": 1, "mean": pytest.approx(1.0)}


def test_the_peak_is_that_of_any_moment_and_the_mean_is_by_time() -> None:
    """Three of 3 s, 1 s apart: 1, 2, 3, 2, 1 under way; whole-second buckets would count four."""
    rows = [request(i, [(i + 3.0, 1)], intended=float(i)) for i in range(3)]
    found, reasons = concurrency(per_request(request_frame(rows)), {"start_s": 0.0, "end_s": 5.0})
    assert found == {"peak": 3, "mean": pytest.approx(9 / 5)}
    assert reasons == {}


def test_a_cut_off_requests_tokens_count_by_their_own_time() -> None:
    rows = [
        request(0, [(1.0, 3), (2.0, 3)]),
        request(1, [(1.5, 4), (2.5, 4)], outcome="cut_off", reason="in_flight", intended=1.2),
    ]
    requests = request_frame(rows)
    part = counted({"start_s": 1.0, "end_s": 2.0, "rule": ""}, per_request(requests), chunk_table(requests))
    assert (part["requests"], part["completed"], part["output_tokens"]) == (1, 0, 7)
