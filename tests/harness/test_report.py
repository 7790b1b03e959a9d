"""The run's table: complete at 80 columns, without colour, with what is unreliable or missing marked as
such."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import comparison
from harness.gate.command import main as gate_main
from harness.gate.rules import DEFAULT
from harness.metrics import build_summary
from harness.report import main, print_summary
from harness.table import figure, lookup, number, percent, why_null
from tests.support.run_factory import SECOND, engine_request, request, steady_requests, step, write_run


def printed(summary: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=width, highlight=False, emoji=False))
    return out.getvalue()


def engine_run(folder: Path, rows: list[dict[str, Any]], **meta: Any) -> dict[str, Any]:
    engine = [engine_request(row, admitted=row["send_ns"] / SECOND + 0.05) for row in rows]
    (folder / "config.yaml").parent.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        "engine: {scheduler: continuous, max_num_seqs: 16, num_kv_blocks: null, reservation: on_demand}\n"
        "load: {kind: open, concurrency: null}\n"
    )
    steps = [step(i, i * 0.1, 0.05, preemptions=i % 2) for i in range(40)]
    return build_summary(write_run(folder, rows, engine=engine, steps=steps, **meta))


def test_everything_a_reader_wants_is_there(tmp_path: Path) -> None:
    rows = steady_requests(400, every=0.01)
    rows += [request(400, outcome="rejected", reason="queue_full"), request(401, outcome="cancelled")]
    text = " ".join(printed(engine_run(tmp_path, rows)).split())
    for wanted in (
        "chat at 10.0 requests/s, workload.length_scale=1",
        "continuous, model tiny on cpu",
        "reservation=on_demand, max_num_seqs=16, num_kv_blocks=101",
        "402 scheduled: 400 completed, 0 failed, 0 timed out, 1 rejected, 1 cancelled, 0 cut off",
        "1 queue_full",
        "TTFT 400 200 200 200 200 200 200",
        "TPOT 400 20.0 20.0 20.0 20.0 20.0 20.0",
        "normalized (E2E/token) 400 36.4",
        "attainment 99.8 % (TTFT 2000 ms, TPOT 200 ms)",
        "0 over 100 ms (0 s), longest gap 20.0 ms, fluidity 1.000",
        "batch 1.00 mean, useful tokens 100 %, recomputed 0, preemptions 20",
        "host gap p50 1.00 p99 ~1.00 ms",
        "10.0 mean, 10 max of 101",
        "send lag p99 0 ms",
    ):
        assert wanted in text, wanted
    assert "INVALID" not in text


def test_unreliable_figures_carry_a_mark_and_reliable_ones_do_not(tmp_path: Path) -> None:
    text = printed(engine_run(tmp_path, steady_requests(40)))
    row = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert row.split() == ["TTFT", "40", "200", "200", "200", "~200", "~200", "200"]
    assert "too few samples" in text


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3, 1e6])
def test_no_figure_is_truncated_at_80_columns(tmp_path: Path, scale: float) -> None:
    """From microseconds to weeks: no line is longer than 80 columns and nothing ends in an ellipsis."""
    rows = [request(i, [(0.5 * scale, 1), (0.5123 * scale, 1), (0.6 * scale, 7)]) for i in range(40)]
    text = printed(engine_run(tmp_path, rows))
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    row = next(line for line in text.splitlines() if line.startswith("E2E"))
    assert len(row.split()) == 8
    shown = float(row.split()[3])
    assert shown == pytest.approx(600 * scale, rel=0.05)


def test_logs_without_a_terminal_hold_no_colour_codes(tmp_path: Path) -> None:
    engine_run(tmp_path, steady_requests(10))
    done = subprocess.run(
        [sys.executable, "-m", "harness.report", "--from", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"results: {tmp_path}"
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80


def test_why_rows_are_missing_and_why_a_run_is_invalid(tmp_path: Path) -> None:
    rows = [request(i, [(2.0, 30)]) for i in range(10)]
    summary = build_summary(write_run(tmp_path, rows, complete=False, incomplete_reason="[server_died] gone"))
    text = printed(summary)
    assert "- TPOT, ITL: drained: every answer came in one chunk" in text
    assert text.rstrip().endswith("INVALID incomplete: [server_died] gone")  # brackets are not markup
    row = next(line for line in text.splitlines() if line.startswith("TPOT"))
    assert row.split() == ["TPOT", *["-"] * 7]


def test_failures_are_shown_by_reason_with_their_first_error(tmp_path: Path) -> None:
    failed = {"outcome": "failed", "status": 400, "reason": "never_fits"}
    rows = [request(i, **failed, error=f"needs {i} blocks") for i in (7, 8)]
    rows.append(request(9, outcome="failed", status=500))
    summary = build_summary(write_run(tmp_path, rows))
    assert summary["failures"] == {
        "http_500": {"count": 1, "example": ""},
        "never_fits": {"count": 2, "example": "needs 7 blocks"},
    }
    assert "2 never_fits: needs 7 blocks" in printed(summary)


def test_prompts_of_another_length_than_planned_are_mentioned(tmp_path: Path) -> None:
    rows = [request(i, [(0.5, 1), (1.0, 1)], prompt_tokens=400) for i in range(5)]  # 100 were planned
    summary = build_summary(write_run(tmp_path / "a", rows))
    assert summary["prompt_tokens"] == {"planned": 500, "counted": 2000, "off": 5}
    assert "prompts held 4 times the tokens planned" in printed(summary)
    assert "times the tokens" not in printed(build_summary(write_run(tmp_path / "b", steady_requests(5))))


def test_answers_that_were_not_streamed_are_mentioned(tmp_path: Path) -> None:
    rows = [request(i, [(0.5, 1), (1.0, 1)], stream=i < 3) for i in range(5)]
    assert "3 of 5 answers were streamed" in printed(build_summary(write_run(tmp_path / "a", rows)))
    assert "were streamed" not in printed(build_summary(write_run(tmp_path / "b", rows[:3])))


def test_a_run_without_records_prints_a_table_too(tmp_path: Path) -> None:
    (tmp_path / "meta.json").touch()
    text = printed(build_summary(tmp_path))
    assert "0 scheduled" in text
    assert "INVALID no request completed" in text


def test_the_report_rebuilds_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_run(tmp_path, steady_requests(20))
    assert main(["--from", str(tmp_path)]) == 0
    first = (tmp_path / "summary.json").read_bytes()
    shown = capsys.readouterr().out
    (tmp_path / "summary.json").write_text("{}")  # never read
    assert main(["--from", str(tmp_path)]) == 0
    assert (tmp_path / "summary.json").read_bytes() == first
    assert capsys.readouterr().out == shown
    assert json.loads(first)["latency_ms"]["tpot"]["p50"] == 20.0


def test_a_summary_that_cannot_be_written_is_shown_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_run(tmp_path, steady_requests(20))
    (tmp_path / "summary.json").mkdir()  # as a full disk or a folder of somebody else's
    assert main(["--from", str(tmp_path)]) == 3
    shown = capsys.readouterr()
    assert "20 scheduled" in shown.out
    assert shown.err.startswith(f"error: cannot write {tmp_path / 'summary.json'}: ")
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.glob("*.partial"))


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "meta.json").touch()
    assert main(["--from", str(tmp_path / "cut")]) == 3
    assert main(["--from", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nowhere: no such folder" in error


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (0, "0"), (0.0, "0"), (7, "7"), (12345, "12345"), (1.0, "1.00"), (20.04, "20.0")),
        *((0.0042, "0.004"), (0.04, "0.04"), (199.6, "200"), (2345678.0, "2345678"), (6e8, "6.0e+08")),
        *((0.0000123, "1e-05"), (-12.34, "-12.3")),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
    assert len(text) <= 8


def test_shares() -> None:
    assert [percent(v) for v in (None, 0.0, 1.0, 0.9996, 0.5)] == ["-", "0 %", "100 %", "100.0 %", "50.0 %"]


def test_lookup_and_reasons() -> None:
    summary = {"a": {"b": {"c": 1}}, "null_reasons": {"x.y": "because"}}
    assert lookup(summary, "a.b.c") == 1
    assert lookup(summary, "a.z.c") is None
    assert why_null(summary, "x.y.z.p50") == "because"
    assert why_null(summary, "x") is None
    assert figure({"p50": 3.0, "reliable": {"p50": False}}, "p50").plain == "~3.00"
    assert figure(None, "p50").plain == "-"


def test_a_run_that_may_not_be_believed_is_red_and_a_warning_is_not(tmp_path: Path) -> None:
    bundles = [request(i, [(i + 1.0 + 0.4 * k, 20) for k in range(5)], intended=float(i)) for i in range(30)]
    summary = build_summary(write_run(tmp_path, bundles, complete=False, incomplete_reason="interrupted"))
    for width in (80, 100):
        out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
        print_summary(summary, out)
        lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
        red = [line for line in lines if "\x1b[1;31m" in line or "\x1b[31m" in line]
        assert len(red) == 1
        assert "INVALID" in red[0]
        assert "interrupted" in red[0]
        assert any("\x1b[1;33mWARNING" in line and "ITL is chunked" in line for line in lines)
        assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width for line in lines)


def test_the_table_names_the_windows_and_what_the_client_did(tmp_path: Path) -> None:
    summary = build_summary(write_run(tmp_path / "a", steady_requests(100)))
    text = " ".join(printed(summary).split())
    assert "0.0 to 10.3 s, 100 requests: all figures but those of the steady part" in text
    assert "warm-up 0.3 s (3), drain 0.4 s (1)" in text
    assert "steady 0.3 to 9.9 s, 96 requests: 10.0 requests/s" in text
    assert "10.0/s (+0.0% off the schedule), CV " in text
    assert "in flight 3.88 mean, 4 most" in text
    burst = [request(i, [(0.5 + i, 1), (1.0 + i, 1)]) for i in range(9)]
    assert "no steady state: all requests were sent at one time" in printed(
        build_summary(write_run(tmp_path / "b", burst))
    )


def test_a_folder_that_is_no_run_is_a_mistake_and_gets_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """results/ given for a run below it: a summary.json there would pass for a run from then on."""
    (tmp_path / "notes.txt").write_text("mine")
    folder, rules = str(tmp_path), str(DEFAULT["base-ref"])
    for command, words in (
        (main, ["--from", folder]),
        (comparison.main, [folder]),
        (gate_main, [folder, "--rules", rules]),
    ):
        assert command(words) == 2
        assert capsys.readouterr().err == (
            f"error: {tmp_path}: holds no records of a run; give the directory of a run\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
