"""Results of other tools: what lands in which field, what is refused and why, and round trips of ours."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from harness.comparison import compare, shown_rows
from harness.comparison import main as compare_main
from harness.dashboard.page import DashboardError, write_dashboard
from harness.exchange import reading
from harness.exchange.command import main
from harness.exchange.reading import imported
from harness.exchange.result import ResultError
from harness.metrics.summary import build_summary
from harness.report import main as report_main
from harness.table import lookup, why_null
from tests.support.run_factory import request, steady_requests, write_run

SCHEMA = Path(__file__).parents[1] / "conformance" / "summary_schema.txt"

VLLM: dict[str, Any] = {
    "date": "20260102-030405",
    "endpoint_type": "openai-chat",
    "backend": "openai-chat",
    "model_id": "m",
    "num_prompts": 4,
    "request_rate": 2.0,
    "duration": 10.0,
    "completed": 4,
    "failed": 0,
    "total_input_tokens": 40,
    "total_output_tokens": 404,
    "request_throughput": 0.4,
    "request_goodput": 0.4,
    "output_throughput": 40.4,
    "total_token_throughput": 44.4,
    **{f"{q}_ttft_ms": v for q, v in (("mean", 1000.0), ("median", 990.0), ("p99", 1200.0))},
    **{f"{q}_tpot_ms": v for q, v in (("mean", 16.2), ("median", 16.0), ("p99", 17.0))},
    **{f"{q}_itl_ms": v for q, v in (("mean", 400.0), ("median", 400.0), ("p99", 401.0))},
    **{f"{q}_e2el_ms": v for q, v in (("mean", 3000.0), ("median", 2990.0), ("p99", 3100.0))},
}
DETAILED = {
    "endpoint_type": "openai",
    "output_lens": [3, 3, 0, 3],
    "ttfts": [1.0, 1.2, 0.0, 1.4],
    "itls": [[0.02, 0.04], [0.02, 0.04], [], [0.02, 0.04]],
    "errors": ["", "", "refused", ""],
    "completed": 3,
    "failed": 1,
}
SGLANG = {
    "backend": "sglang-oai",
    "request_rate": 2.0,
    "duration": 10.0,
    "completed": 50,
    "total_input_tokens": 100,
    "total_output_tokens": 500,
    "total_output_tokens_retokenized": 499,
    "request_throughput": 5.0,
    "input_throughput": 10.0,
    "output_throughput": 50.0,
    "total_throughput": 60.0,
    "mean_ttft_ms": 100.0,
    "median_ttft_ms": 90.0,
    "mean_tpot_ms": 20.0,
    "median_itl_ms": 21.0,
    "mean_itl_ms": 20.5,
    "mean_e2e_latency_ms": 300.0,
    "median_e2e_latency_ms": 290.0,
}


def guide_row(i: int, iterations: int = 5) -> dict[str, Any]:
    """Due at i, sent 0.5 s late, first token 1 s later, five tokens 20 ms apart, 100 ms to the end."""
    stamps = {"targeted_start": i, "request_start": i + 0.5, "first_token_iteration": i + 1.5}
    stamps |= {"last_token_iteration": i + 1.58, "request_end": i + 1.68, "token_iterations": iterations}
    return {"output_tokens": 5, "prompt_tokens": 10, "info": {"timings": stamps}}


def guidellm(rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    def block(mean: float) -> dict[str, Any]:
        told = {"mean": mean, "max": 2 * mean, "count": 40, "percentiles": {"p50": mean, "p99": 1.5 * mean}}
        return {"successful": told}

    means = {"time_to_first_token_ms": 1000.0, "time_per_output_token_ms": 29.7}
    means |= {"inter_token_latency_ms": 20.0, "request_latency": 3.0}
    made = {"successful": 40, "errored": 0, "incomplete": 0, "total": 40}
    benchmark = {
        "config": {"backend": {"model": "m"}},
        "scheduler_metrics": {"requests_made": made},
        "metrics": {name: block(mean) for name, mean in means.items()},
        "duration": 41.0,
        "requests": None if rows is None else {"successful": rows, "errored": [], "incomplete": []},
    }
    return {"metadata": {"version": 2, "guidellm_version": "0.4.0"}, "benchmarks": [benchmark]}


def ms(avg: float, n: int = 40) -> dict[str, Any]:
    return {"unit": "ms", "avg": avg, "p50": avg, "p90": avg, "p95": avg, "p99": avg, "max": avg, "count": n}


AIPERF = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "time_to_first_token": ms(1000.0),
    "request_latency": {"unit": "s", "avg": 3.0, "p50": 3.0, "count": 40},
    "inter_token_latency": ms(20.0),
    "inter_chunk_latency": ms(400.0, 160),
    "request_count": {"unit": "requests", "avg": 40.0},
    "error_request_count": {"unit": "requests", "avg": 0.0},
    "request_throughput": {"unit": "requests/sec", "avg": 4.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 80.0},
    "is_complete": True,
}


def record(i: int, gaps: list[float], tokens: int, **metadata: Any) -> dict[str, Any]:
    told = {"x_request_id": str(i), "benchmark_phase": "profiling", "request_start_ns": i * 10**9}
    told |= {"request_end_ns": i * 10**9 + 2 * 10**9, "was_cancelled": False}
    values = {"time_to_first_token": 1000.0, "inter_chunk_latency": gaps, "request_latency": 1150.0}
    metrics = {name: {"value": value, "unit": "ms"} for name, value in values.items()}
    metrics["output_sequence_length"] = {"value": tokens, "unit": "tokens"}
    return {"metadata": {**told, **metadata}, "metrics": metrics, "error": None}


def saved(folder: Path, *values: Any, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(value) for value in values))
    return path


def block(summary: dict[str, Any], path: str) -> dict[str, Any]:
    found = lookup(summary, f"latency_ms.{path}")
    assert isinstance(found, dict)
    return found


def refused(summary: dict[str, Any], path: str) -> str:
    assert block(summary, path)["mean"] is None, path
    reason = why_null(summary, f"latency_ms.{path}")
    assert reason, path
    return reason


def test_vllm_flat_lands_only_where_its_definitions_hold(tmp_path: Path) -> None:
    summary = imported(saved(tmp_path, VLLM))
    first = block(summary, "ttfc.from_send")
    assert (first["mean"], first["p50"], first["p99"], first["n"]) == (1000.0, 990.0, 1200.0, 4)
    assert first["p90"] is None
    assert not any(first["reliable"].values())
    assert "role" in refused(summary, "ttft.from_send")
    assert "n - 1" in refused(summary, "tpot")
    assert "icl" in refused(summary, "itl")
    for path in ("ttft.from_intended", "e2e.from_intended", "normalized"):
        assert "intended" in refused(summary, path)
    icl = block(summary, "icl")
    assert (icl["mean"], icl["n"]) == (400.0, None)
    assert block(summary, "e2e.from_send")["p50"] == 2990.0
    assert summary["throughput"]["output_tokens_per_s"] == 40.4
    assert summary["throughput"]["goodput_rps"] is None
    assert summary["counts"] | {"x": 0} == {
        **dict.fromkeys(("failed", "timed_out", "rejected", "x"), 0),
        "scheduled": 4,
        "completed": 4,
        "cancelled": None,
        "cut_off": None,
    }
    assert summary["valid"] is False
    assert summary["invalid_reasons"]
    assert summary["run"]["source"] == {"tool": "vllm bench serve", "version": None, "assumed": []}
    assert summary["run"]["length_mode"] is None
    assert why_null(summary, "run.length_mode")


def test_an_assumption_lets_figures_in_and_stands_in_the_summary(tmp_path: Path) -> None:
    summary = imported(saved(tmp_path, VLLM), ("one_token",))
    assert block(summary, "tpot")["mean"] == 16.2
    assert block(summary, "ttft.from_send")["p50"] == 990.0
    assert any("assumed" in warning for warning in summary["warnings"])
    assert summary["run"]["source"]["assumed"] == ["one_token"]
    assert block(summary, "ttft.from_intended")["mean"] is None


def test_vllm_detailed_shows_by_itself_whether_events_held_one_token(tmp_path: Path) -> None:
    summary = imported(saved(tmp_path, VLLM | DETAILED))
    assert block(summary, "ttft.from_send")["mean"] == pytest.approx(1200)  # not the failed request's 0
    assert block(summary, "tpot")["p50"] == pytest.approx(30)
    assert block(summary, "itl")["n"] == 6
    assert block(summary, "e2e.from_send")["max"] == pytest.approx(1460)
    assert summary["counts"]["failed"] is None
    assert summary["counts"]["scheduled"] == 4
    assert summary["throughput"]["output_tokens_per_s"] is None
    bundled = VLLM | DETAILED | {"output_lens": [30, 30, 0, 30]}
    summary = imported(saved(tmp_path, bundled))
    assert "several tokens" in refused(summary, "tpot")
    assert block(summary, "icl")["n"] == 6
    refused(summary, "itl")


def test_sglang_ends_with_done_and_counts_no_failures(tmp_path: Path) -> None:
    path = saved(tmp_path, SGLANG, name="runs.jsonl")
    summary = imported(path)
    assert block(summary, "ttft.from_send")["n"] == 50
    assert "[DONE]" in refused(summary, "e2e.from_send")
    assert "[DONE]" in refused(summary, "tpot")
    assert block(summary, "icl")["mean"] == 20.5
    assert summary["throughput"]["output_tokens_per_s"] is None
    assert summary["counts"]["scheduled"] is None
    summary = imported(path, ("one_token", "no_trailer", "all_completed"))
    assert block(summary, "tpot")["mean"] == 20.0
    assert block(summary, "e2e.from_send")["mean"] == 300.0
    assert summary["throughput"]["output_tokens_per_s"] == 50.0
    native = imported(saved(tmp_path, SGLANG | {"backend": "sglang"}))
    assert "evenly" in refused(native, "icl")


def test_guidellm_with_requests_gives_latency_from_the_intended_arrival(tmp_path: Path) -> None:
    summary = imported(saved(tmp_path, guidellm([guide_row(i) for i in range(40)])))
    assert block(summary, "ttft.from_intended")["p50"] == pytest.approx(1500)
    assert block(summary, "ttft.from_send")["p50"] == pytest.approx(1000)
    assert block(summary, "e2e.from_send")["p50"] == pytest.approx(1080)  # to the last token, not the end
    assert block(summary, "tpot")["mean"] == pytest.approx(20)
    assert block(summary, "normalized")["mean"] == pytest.approx(1580 / 5)
    assert block(summary, "ttft.from_send")["reliable"]["p90"] is True
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(200 / 40.68, rel=1e-5)
    assert summary["run"]["source"]["version"] == "0.4.0"
    assert any("wall clock" in reason for reason in summary["invalid_reasons"])
    summary = imported(saved(tmp_path, guidellm([guide_row(i, iterations=2) for i in range(40)])))
    refused(summary, "tpot")


def test_guidellm_without_requests_never_takes_time_per_output_token_for_tpot(tmp_path: Path) -> None:
    path = saved(tmp_path, guidellm(None))
    summary = imported(path)
    assert block(summary, "ttft.from_send")["n"] == 40
    for field in ("tpot", "normalized", "e2e.from_send", "ttft.from_intended"):
        refused(summary, field)
    assert block(imported(path, ("one_token",)), "tpot")["mean"] == 20.0


def test_aiperf_export_and_its_records(tmp_path: Path) -> None:
    summary = imported(saved(tmp_path, AIPERF))
    assert block(summary, "ttft.from_send")["n"] == 40
    assert block(summary, "icl")["n"] == 160
    assert "last response" in refused(summary, "e2e.from_send")
    assert summary["throughput"]["output_tokens_per_s"] == 80.0
    assumed = imported(saved(tmp_path, AIPERF), ("one_token", "no_trailer"))
    assert block(assumed, "e2e.from_send")["mean"] == 3000.0  # its unit was seconds
    assert block(assumed, "tpot")["mean"] == 20.0
    lines = [record(i, [20.0, 40.0], 3) for i in range(8)] + [record(9, [1.0], 2, was_cancelled=True)]
    summary = imported(saved(tmp_path, *lines, name="profile_export.jsonl"))
    assert block(summary, "tpot")["mean"] == pytest.approx(30)
    assert block(summary, "e2e.from_send")["mean"] == pytest.approx(1060)  # without the 90 ms after the last
    assert (summary["counts"]["completed"], summary["counts"]["cancelled"]) == (8, 1)
    bundled = imported(saved(tmp_path, *[record(i, [400.0], 40) for i in range(8)]))
    refused(bundled, "tpot")
    assert block(bundled, "icl")["mean"] == 400.0


def test_every_null_has_a_reason_and_every_key_is_of_the_contract(tmp_path: Path) -> None:
    known = {line.partition(" ")[0] for line in SCHEMA.read_text().splitlines()}
    groups = {name.partition(".")[0] for name in known}
    files = (VLLM, VLLM | DETAILED, SGLANG, guidellm(None), guidellm([guide_row(0)]), AIPERF)
    for i, value in enumerate(files):
        summary = imported(saved(tmp_path, value, name=f"{i}.json"))
        assert set(summary) <= groups
        json.dumps(summary, allow_nan=False)
        for path in nulls(summary):
            assert why_null(summary, path), f"{i}: {path}"


def nulls(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        skip = ("null_reasons", "setup")
        inner = [nulls(v, f"{path}.{k}".lstrip(".")) for k, v in value.items() if k not in skip]
        return [name for names in inner for name in names]
    return [path] if value is None else []


def our_run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_run(folder, rows)


@pytest.mark.parametrize("to", ["vllm", "aiperf"])
def test_what_is_exported_comes_back_the_same(tmp_path: Path, to: str, capsys: Any) -> None:
    run = our_run(tmp_path / "run", steady_requests(40))
    ours = build_summary(run)
    assert main(["export", str(run), "--to", to, "-o", str(tmp_path / "out.json")]) == 0
    assert "results:" in capsys.readouterr().out
    theirs = imported(tmp_path / "out.json", ("one_token", "no_trailer"))
    paths = ["ttft.from_send", "e2e.from_send", "icl"] + ([] if to == "vllm" else ["tpot"])
    for path in paths:
        for name in ("mean", "p50", "p90", "p95", "p99"):
            assert block(theirs, path)[name] == block(ours, path)[name] is not None, (path, name)
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        assert theirs["throughput"][name] == ours["throughput"][name]
    assert theirs["counts"]["completed"] == 40
    refused(theirs, "ttft.from_intended")


def test_export_leaves_out_what_the_format_defines_otherwise(tmp_path: Path) -> None:
    rows = [request(i, [(i * 0.1 + 0.2 + k * 0.1, 5) for k in range(4)], intended=i * 0.1) for i in range(40)]
    rows[7] = request(7, [(0.9, 5)], intended=0.7, outcome="cancelled")
    run = our_run(tmp_path / "run", rows)
    main(["export", str(run), "--to", "vllm", "-o", str(tmp_path / "v.json")])
    os.mkfifo(tmp_path / "pipe")
    assert main(["export", str(run), "--to", "vllm", "-o", str(tmp_path / "pipe")]) == 2
    assert (tmp_path / "pipe").is_fifo()  # a device would have become a file
    main(["export", str(run), "--to", "aiperf", "-o", str(tmp_path / "a.json")])
    vllm = json.loads((tmp_path / "v.json").read_text())
    assert "mean_tpot_ms" not in vllm
    assert vllm["mean_itl_ms"] == pytest.approx(100)
    assert "output_throughput" not in vllm
    assert "num_prompts" not in vllm
    assert "request_goodput" not in vllm
    aiperf = json.loads((tmp_path / "a.json").read_text())
    assert aiperf["inter_token_latency"]["avg"] == pytest.approx(20)
    assert not any(math.isnan(v) for v in aiperf["inter_token_latency"].values() if isinstance(v, float))


def test_a_result_stands_beside_our_runs_in_every_table(tmp_path: Path, capsys: Any) -> None:
    run, file = our_run(tmp_path / "run", steady_requests(40)), saved(tmp_path, VLLM)
    assert main(["import", str(file), "-o", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "INVALID" in shown
    assert "2990" in shown
    kept = Path(shown.splitlines()[-1].removeprefix("results: "))
    assert build_summary(kept) == imported(file)
    for other in (file, kept):
        comparison = compare([run, other])
        assert not comparison.comparable
        assert "latency_ms.ttfc.from_send.p50" in {row.path for row in shown_rows(comparison)}
        assert compare_main([str(run), str(other)]) == 3
        assert report_main(["--from", str(other)]) == 3
    page = write_dashboard([run, file], tmp_path / "page.html").read_text()
    assert "first event from send p50, ms" in page
    assert "openai-chat" in capsys.readouterr().out
    assert "from_send" not in " ".join(row.path for row in shown_rows(compare([run])))


BAD = {
    "empty": ("", "empty"),
    "blank": (" \n", "empty"),
    "truncated": (json.dumps(VLLM)[:200], "cut off"),
    "other": ('{"rps": 3}', "not a result of"),
    "number": ("3", "not a result of"),
    "nan": (json.dumps(VLLM | {"mean_ttft_ms": float("nan")}), "NaN"),
    "deep": ("[" * 200_000, "nested too deeply"),
    "version": ('{"aiperf_version": "9", "schema_version": "2.0"}', "schema_version 2.0; 1.x is read"),
    "two": (json.dumps(VLLM) * 2, "holds 2 results"),
    "packed": (gzip.compress(json.dumps(VLLM).encode()), "unpack it first"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_line_and_exit_2(tmp_path: Path, kind: str, capsys: Any) -> None:
    content, told = BAD[kind]
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", str(path), "-o", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert str(path) in error
    assert not (tmp_path / "runs").exists()
    assert compare_main([str(path)]) == 2
    with pytest.raises(DashboardError):
        write_dashboard([path], tmp_path / "page.html")


def test_figures_that_are_none_are_refused_one_by_one(tmp_path: Path) -> None:
    odd = VLLM | {"mean_ttft_ms": "fast", "median_ttft_ms": 1, "p99_ttft_ms": -4, "duration": None}
    odd |= {"completed": True, "model_id": "x\x1b[31m\n" + "y" * 500, "output_throughput": 10**400}
    summary = imported(saved(tmp_path, odd))
    first = block(summary, "ttfc.from_send")
    assert (first["mean"], first["p50"], first["p99"], first["n"]) == (None, 1, None, None)
    assert summary["throughput"]["output_tokens_per_s"] is None
    assert len(summary["model"]) == 100
    assert summary["model"].isprintable()
    zero = imported(
        saved(tmp_path, VLLM | {f"{q}_tpot_ms": 0.0 for q in ("mean", "median", "p99")}), ("one_token",)
    )
    assert "0 stands for" in refused(zero, "tpot")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shift", [0, 3, 200])
def test_figures_near_the_end_of_the_numbers_are_none_and_warn_of_nothing(tmp_path: Path, shift: int) -> None:
    """1.2e308 is a number and no latency: a mean of some is none any more."""
    huge = [1.4, 1.7e308, *(1.2 * 10.0 ** (308 - shift) for _ in range(30))]
    gaps = [[0.02, value] for value in huge]
    odd = {**VLLM, **DETAILED, "ttfts": huge, "itls": gaps, "output_lens": [3] * 32, "errors": [""] * 32}
    summary = imported(saved(tmp_path, odd | {"duration": 1e308, "output_throughput": 1.7e308}))
    assert block(summary, "ttft.from_send")["n"] == block(summary, "ttft.from_send")["max"] / 1400 == 1
    assert block(summary, "icl")["max"] == 1400
    assert summary["run"]["duration_s"] is summary["throughput"]["output_tokens_per_s"] is None
    json.dumps(summary, allow_nan=False)


def test_choosing_among_results_and_other_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = saved(tmp_path, SGLANG, SGLANG | {"mean_ttft_ms": 7.0}, name="runs.jsonl")
    assert block(imported(f"{path}#2"), "ttft.from_send")["mean"] == 7.0
    for wrong in (f"{path}#3", f"{path}#0"):
        with pytest.raises(ResultError, match="2 results"):
            imported(wrong)
    with pytest.raises(ResultError, match="unknown; choose from"):
        imported(f"{path}#1", ("luck",))
    assert main(["export", str(path), "--to", "vllm", "-o", str(tmp_path / "o")]) == 2
    assert main(["export", str(tmp_path / "none"), "--to", "vllm", "-o", str(tmp_path / "o")]) == 2
    assert main(["import", str(tmp_path / "none")]) == 2
    capsys.readouterr()
    assert main(["import", f"{path}#1", "-o", str(path)]) == 2
    assert capsys.readouterr().err == f"error: -o {path}: cannot be written (Not a directory)\n"
    monkeypatch.setattr(reading, "MAX_BYTES", 10)
    with pytest.raises(ResultError, match="at most 10"):
        imported("/dev/zero")  # it has a size of 0 and no end
    with pytest.raises(ResultError, match="at most 10"):
        imported(path)
