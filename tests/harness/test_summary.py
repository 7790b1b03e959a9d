"""summary.json: every key of the contract is there, strict, deterministic, and survives any damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics import build_summary, write_summary
from tests.support.run_factory import (
    SECOND,
    engine_request,
    ns,
    request,
    steady_requests,
    step,
    write_run,
    write_step_stream,
)

BLOCK = {"n", "mean", "p50", "p90", "p95", "p99", "max", "ci95", "reliable"}
LEVELS = {"p50", "p90", "p95", "p99"}
BLOCKS = (
    *("ttft.from_intended", "ttft.from_send", "tpot", "itl", "icl", "e2e.from_intended", "e2e.from_send"),
    *("normalized", "queue_delay", "prefill", "decode", "adj_ttft", "adj_e2e"),
)
OUTCOMES = ("completed", "failed", "timed_out", "rejected", "cancelled", "cut_off")
THROUGHPUT = {
    *("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "prefill_tokens_per_s"),
    *("goodput_rps", "slo_attainment"),
}
CONTRACT: dict[str, set[str]] = {
    "": {
        *("schema_version", "valid", "invalid_reasons", "null_reasons", "run", "engine", "workload", "model"),
        *("device", "counts", "refusals", "deadline_misses", "window", "latency_ms", "throughput", "steady"),
        *("by_class", "by_tenant", "arrivals", "token_source", "stalls", "fluidity", "attribution", "steps"),
        "queue_reasons",
        *("prefix_cache", "utilization", "cancellations", "client"),
    },
    "run": {
        *("id", "started_at", "duration_s", "complete", "incomplete_reason", "seed", "length_mode"),
        "fingerprint",
    },
    "run.fingerprint": {"schedule", "config", "host", "device"},
    "counts": {"scheduled", *OUTCOMES},
    "window": {"start_s", "end_s", "rule"},
    "latency_ms": {path.partition(".")[0] for path in BLOCKS},
    "throughput": THROUGHPUT,
    "steady": {"window", "latency_ms", "throughput"},
    "arrivals": {"planned_rate", "rate", "cv", "iod", "deferred", "shed"},
    "arrivals.iod": {"0.2s", "1s", "5s"},
    "token_source": {"usage", "ids", "retokenised", "mismatches"},
    "stalls": {"count", "seconds", "longest_ms"},
    "steps": {
        *("count", "useful_token_fraction", "padded_token_fraction", "recomputed_tokens", "preemptions"),
        *("batch_size_mean", "kv_live_mean", "kv_live_max", "kv_live_end", "host_gap_ms"),
    },
    "steps.host_gap_ms": BLOCK,
    "prefix_cache": {"hit_rate_tokens"},
    "utilization": {
        *("device_busy", "gpu_util_pct", "gpu_memory_gb", "mfu", "mbu", "cpu_pct", "power_w"),
        "energy_j_per_token",
    },
    "cancellations": {"count", "by_state", "wasted_tokens", "release_ms"},
    "cancellations.by_state": {"queued", "prefill", "decode", "preempted", "held"},
    "cancellations.release_ms": BLOCK,
    "client": {"backend", "send_lag_ms", "loop_lag_ms", "cpu_s_per_1k_tokens"},
    "client.send_lag_ms": BLOCK,
    "client.loop_lag_ms": BLOCK,
    **{f"latency_ms.{path}": BLOCK for path in BLOCKS},
    **{f"latency_ms.{path}.ci95": LEVELS for path in BLOCKS},
    **{f"latency_ms.{path}.reliable": LEVELS for path in BLOCKS},
}


def full_run(folder: Path, count: int = 40) -> Path:
    rows = steady_requests(count)
    for i, row in enumerate(rows):
        row["request_class"] = "chat" if i % 2 else "rag"
        row["tenant"] = "a" if i % 4 else "b"
    rows.append(request(count, outcome="cancelled", intended=1.0))
    engine = [engine_request(row, admitted=row["send_ns"] / SECOND + 0.05) for row in rows]
    engine[-1] |= {"finish_reason": "abort", "abort_state": "queued"}
    telemetry = [
        {"t_ns": ns(0.25 * i), "server_cpu_pct": 90.0, "server_rss_mb": 100.0, "client_cpu_pct": 5.0}
        | {"client_rss_mb": 50.0, "gpu_util_pct": None, "gpu_memory_gb": None, "gpu_power_w": None}
        for i in range(16)
    ]
    return write_run(
        folder, rows, engine=engine, steps=[step(i, i * 0.1, 0.05) for i in range(40)], telemetry=telemetry
    )


def at(summary: dict[str, Any], path: str) -> Any:
    for name in filter(None, path.split(".")):
        summary = summary[name]
    return summary


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


def check(summary: dict[str, Any]) -> None:
    """What holds for the summary of any run."""
    json.dumps(summary, allow_nan=False)
    for path, keys in CONTRACT.items():
        assert keys <= set(at(summary, path)), path
    for group in ("by_class", "by_tenant"):
        for part in summary[group].values():
            names = {"counts", "latency_ms", "throughput", "stalls", "fluidity"}
            assert set(part) == names | {"attribution", "queue_reasons"}
            assert set(part["counts"]) == {"scheduled", *OUTCOMES}
    assert summary["valid"] is (not summary["invalid_reasons"])
    ended = sum(summary["counts"][name] for name in OUTCOMES)
    if summary["valid"]:
        assert summary["counts"]["scheduled"] == ended
    reasons = summary["null_reasons"]
    for path, value in leaves(summary):
        if value is not None or path.startswith(("setup.", "null_reasons.")) or ".ci95." in path:
            continue
        parts = path.split(".")
        assert any(".".join(parts[: i + 1]) in reasons for i in range(len(parts))), (
            f"{path} is null without a reason"
        )


def test_every_key_is_there(tmp_path: Path) -> None:
    summary = build_summary(full_run(tmp_path))
    check(summary)
    assert summary["valid"]
    assert summary["counts"]["completed"] == 40
    assert summary["latency_ms"]["ttft"]["from_intended"]["p50"] == pytest.approx(200)
    assert summary["latency_ms"]["tpot"]["ci95"]["p90"] == [20.0, 20.0]
    assert {"rag", "chat"} == set(summary["by_class"])
    assert summary["by_class"]["rag"]["counts"]["scheduled"] == 20
    assert summary["by_tenant"]["b"]["latency_ms"]["queue_delay"]["n"] == 10
    assert summary["steady"]["latency_ms"]["tpot"]["n"] > 20
    assert summary["cancellations"]["by_state"]["queued"] == 1
    assert summary["utilization"]["cpu_pct"] == 90


def test_rebuilding_gives_the_same_bytes_also_elsewhere(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "a")
    write_summary(folder)
    first = (folder / "summary.json").read_bytes()
    write_summary(folder)
    assert (folder / "summary.json").read_bytes() == first
    moved = tmp_path / "b"
    shutil.copytree(folder, moved)
    write_summary(moved)
    assert (moved / "summary.json").read_bytes() == first
    assert json.loads(first)["counts"]["completed"] == 40
    assert not list(folder.glob("*.partial"))


def test_floats_are_short(tmp_path: Path) -> None:
    for path, value in leaves(build_summary(full_run(tmp_path))):
        if isinstance(value, float):
            assert value == float(f"{value:.6g}"), path


RUNS: dict[str, list[dict[str, Any]]] = {
    "empty": [],
    "one": [request(0, [(0.5, 1), (0.6, 1)])],
    "one token": [request(0, [(0.5, 1)])],
    "drained": [request(i, [(2.0, 30)]) for i in range(5)],
    "not streamed": [request(i, [(2.0, 30)], stream=False) for i in range(5)],
    "all failed": [request(i, outcome="failed", error="boom") for i in range(5)],
    "all cut off": [
        request(i, outcome="cut_off", reason="not_sent", send_ns=None, end_ns=None, dispatch_ns=None)
        for i in range(5)
    ],
    "all cancelled": [request(i, outcome="cancelled") for i in range(5)],
    "no tokens": [request(i, []) for i in range(5)],
    "at once": [request(i, [(0.0, 1)], end_ns=0) for i in range(5)],
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("engine", [False, True])
def test_odd_runs(tmp_path: Path, name: str, engine: bool) -> None:
    rows = RUNS[name]
    records: dict[str, Any] = {}
    if engine:
        records = {
            "engine": [engine_request(row, admitted=0.1) for row in rows if row["send_ns"] is not None],
            "steps": [step(0, 0.1, 0.1)],
        }
    summary = build_summary(write_run(tmp_path, rows, **records))
    check(summary)
    assert summary["valid"] is (summary["counts"]["completed"] > 0)


@pytest.mark.parametrize("strange", ["x", 7, [1], True, {"ttft_ms": "fast"}])
@pytest.mark.parametrize("part", ["fingerprint", "server", "slo", "planned", "client", "clock_pairs"])
def test_a_part_of_meta_that_is_something_else_costs_only_itself(
    tmp_path: Path, part: str, strange: Any
) -> None:
    folder = write_run(tmp_path, steady_requests(20))
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, part: strange}))
    summary = build_summary(folder)
    assert summary["counts"]["completed"] == 20
    assert summary["latency_ms"]["ttft"]["from_intended"]["n"] == 20


def test_an_empty_folder_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no records of a run"):
        build_summary(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        build_summary(tmp_path / "nowhere")
    (tmp_path / "meta.json").touch()  # a run that a full disk ended at its beginning
    summary = build_summary(tmp_path)
    check(summary)
    assert not summary["valid"]


@pytest.mark.parametrize(
    "name", ["requests.jsonl", "engine_requests.jsonl", "telemetry.jsonl", "meta.json", "steps.arrow"]
)
@given(share=st.floats(0, 1))
@settings(max_examples=4, deadline=None)
def test_files_cut_off_anywhere(tmp_path_factory: pytest.TempPathFactory, name: str, share: float) -> None:
    folder = full_run(tmp_path_factory.mktemp("run"), count=12)
    (folder / "steps.parquet").unlink()
    write_step_stream(folder / "steps.arrow", [step(i, i * 0.1, 0.05) for i in range(12)])
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(len(whole) * share)])
    check(build_summary(folder))


@pytest.mark.parametrize(
    "name", ["requests.jsonl", "meta.json", "config.yaml", "steps.parquet", "schedule.parquet"]
)
def test_files_of_garbage(tmp_path: Path, name: str) -> None:
    folder = full_run(tmp_path)
    (folder / name).write_bytes(b"\x00garbage: [\xff\n" * 20)
    summary = build_summary(folder)
    check(summary)
    assert not summary["valid"]
    assert any(name.partition(".")[0] in reason for reason in summary["invalid_reasons"])
    assert str(tmp_path) not in json.dumps(summary)
