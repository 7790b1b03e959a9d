"""Runs side by side: ratios only between runs of one schedule, one stall threshold, unlike answers named."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.comparison import (
    ROWS,
    column_names,
    compare,
    comparison_rows,
    folded,
    judge,
    main,
    print_comparison,
)
from tests.support.run_factory import (
    SECOND,
    default_meta,
    engine_request,
    request,
    steady_requests,
    step,
    write_run,
)


def write(folder: Path, rows: list[dict[str, Any]], engine: str, useful: int = 100, **meta: Any) -> Path:
    records = [engine_request(row, admitted=row["send_ns"] / SECOND + 0.01) for row in rows]
    steps = [step(0, 0.1, 0.5, decode_tokens=useful, ended_rows=100 - useful)]
    return write_run(folder, rows, engine=records, steps=steps, name=engine, **meta)


def printed(*runs: Path) -> str:
    out = io.StringIO()
    print_comparison(runs, Console(file=out, width=80, highlight=False, emoji=False))
    return out.getvalue()


def cells(runs: list[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """By (path, run)."""
    return {(cell["path"], cell["run"]): cell for cell in comparison_rows(compare(runs))}


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    drained = [request(i, [(i * 0.1 + 2.0, 11)], intended=i * 0.1) for i in range(40)]
    return [
        write(tmp_path / "s", drained, "static", useful=60),
        write(tmp_path / "c", steady_requests(40), "continuous"),
        write(tmp_path / "k", steady_requests(40, gap=0.03, ttft=0.1), "chunked"),
    ]


def test_ratios_and_arrows(three: list[Path]) -> None:
    text = printed(*three)
    lines = {line[:32].strip(): line[32:].split() for line in text.splitlines()}
    assert lines["useful token fraction"] == ["60.0", "%", "100", "%", "1.67x", "▲", "100", "%", "1.67x", "▲"]
    assert lines["TTFT p50, ms"] == ["2000", "200", "0.10x", "▲", "100", "0.05x", "▲"]
    # A drained answer has no pace: the next run is what the others are held against.
    assert lines["TPOT p50, ms"] == ["-", "20.0", "30.0", "1.50x", "▼"]
    assert lines["longest gap, ms"] == ["-", "20.0", "30.0", "1.50x", "▼"]
    assert lines["normalized latency p50, ms/token"] == ["182", "36.4", "0.20x", "▲", "36.4", "0.20x", "▲"]
    assert "- static: TPOT p50, TPOT p99, longest gap, stalls, stalled, fluidity: drained" in " ".join(
        text.split()
    )
    assert "NOT COMPARABLE" not in text
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_where_many_runs_do_not_fit_they_are_the_rows(tmp_path: Path) -> None:
    names = [f"engine_number_{i}" for i in range(6)]
    runs = [
        write(tmp_path / name, steady_requests(40, gap=0.02 + 0.01 * i), name) for i, name in enumerate(names)
    ]
    text = printed(*runs)
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    lines = [line.split() for line in text.splitlines() if line.startswith("engine_number_")]
    blocks = [lines[i : i + 6] for i in range(0, len(lines), 6)]
    assert len(blocks) > 1
    assert all([line[0] for line in block] == names for block in blocks)
    tpot = blocks[0][3].index("50.0")
    assert [block[tpot] for block in blocks[0][:1]] == ["20.0"]
    assert blocks[0][3][tpot : tpot + 2] == ["50.0", "▼"], "a mark, and no ratio"


def test_a_figure_that_no_run_can_have_is_no_row(three: list[Path]) -> None:
    assert "deadline misses" not in printed(*three)


def test_runs_that_lack_the_same_for_the_same_reason_share_a_line(tmp_path: Path) -> None:
    drained = [request(i, [(i * 0.1 + 2.0, 11)], intended=i * 0.1) for i in range(40)]
    runs = [write(tmp_path / name, drained, name) for name in ("static", "sliced")]
    lines = [line for line in printed(*runs).splitlines() if line.startswith("- ")]
    assert len([line for line in lines if line.startswith("- static, sliced: TPOT p50")]) == 1


def test_worse_points_down(three: list[Path]) -> None:
    found = cells([three[1], three[2]])
    assert found["latency_ms.tpot.p50", "chunked"] | {"reliable": True} == {
        "metric": "TPOT p50, ms",
        "path": "latency_ms.tpot.p50",
        "run": "chunked",
        "value": 30.0,
        "reliable": True,
        "ratio": 1.5,
        "verdict": "worse",
    }
    assert found["latency_ms.ttft.from_intended.p50", "chunked"]["verdict"] == "better"
    assert found["latency_ms.e2e.from_intended.p50", "chunked"]["verdict"] == "same"
    assert found["steps.batch_size_mean", "chunked"]["verdict"] is None


def test_every_row_names_a_figure_of_the_summary(three: list[Path]) -> None:
    rows = comparison_rows(compare([three[1], three[1]]))
    assert len(rows) == 2 * len([row for row in ROWS if not (row.optional or row.foreign)])
    assert [c["path"] for c in rows if c["value"] is None] == []


def test_other_schedules_get_no_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prints = {**default_meta()["fingerprint"], "schedule": "other"}
    runs = [
        write(tmp_path / "a", steady_requests(40), "continuous"),
        write(tmp_path / "b", steady_requests(40), "chunked", fingerprint=prints),
    ]
    text = printed(*runs)
    assert "NOT COMPARABLE chunked: fingerprint.schedule differs" in text
    assert not any(c["ratio"] or c["verdict"] for c in comparison_rows(compare(runs)))
    assert main([str(run) for run in runs]) == 3
    assert main([str(runs[0]), str(runs[0])]) == 0
    assert main([str(runs[0]), str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_runs_of_several_schedules_stand_against_the_first_of_their_own(tmp_path: Path) -> None:
    """As a sweep over rates leaves them: two engines at two rates, and one more alone."""
    runs = []
    for schedule, engines in (("slow", "ab"), ("fast", "ab"), ("alone", "c")):
        prints = {**default_meta()["fingerprint"], "schedule": schedule}
        for engine in engines:
            rows = steady_requests(40, gap=0.02 if engine == "a" else 0.03)
            runs.append(write(tmp_path / f"{schedule}{engine}", rows, engine, fingerprint=prints))
    comparison = compare(runs)
    assert comparison.references == (0, 0, 2, 2, 4)
    tpot = [c for c in comparison_rows(comparison) if c["path"] == "latency_ms.tpot.p50"]
    assert [c["ratio"] for c in tpot] == [None, pytest.approx(1.5), None, pytest.approx(1.5), None]
    assert [c["verdict"] for c in tpot] == [None, "worse", None, "worse", None]
    lone, pair = comparison.names[4], comparison.names[2:4]
    assert not comparison.comparable
    assert [text.partition(": fingerprint.schedule differs")[0] for text in comparison.mismatches] == [
        ", ".join(pair),
        lone,
    ]
    assert comparison.mismatches[0].endswith(f"; compared with {pair[0]} instead")
    assert "the first run of the same requests that has the figure" in " ".join(printed(*runs).split())


def test_runs_without_a_known_schedule_are_not_comparable(tmp_path: Path) -> None:
    unknown = {**default_meta()["fingerprint"], "schedule": None}
    runs = [write(tmp_path / n, steady_requests(9), n, fingerprint=unknown) for n in ("a", "b")]
    assert not compare(runs).comparable


def test_unlike_answers_and_machines_are_named(tmp_path: Path) -> None:
    longer = steady_requests(40)
    for row in longer[:7]:
        row["output_tokens"] = 12
    prints = {**default_meta()["fingerprint"], "host": "elsewhere"}
    runs = [
        write(tmp_path / "a", steady_requests(40), "continuous"),
        write(tmp_path / "b", longer, "chunked", fingerprint=prints, length_mode="exact"),
    ]
    comparison = compare(runs)
    assert comparison.comparable
    assert "chunked: 7 of 40 answers have another token count than with continuous" in comparison.notes
    assert any("fingerprint.host differs" in note for note in comparison.notes)
    assert "chunked: length mode is exact, not stop_after" in comparison.notes


def test_stalls_are_held_to_one_threshold(tmp_path: Path) -> None:
    """Gaps of 150 ms all along: by the slow run's own median none is a stall, by the fast run's all are."""
    runs = [
        write(tmp_path / "a", steady_requests(10, gap=0.02), "continuous"),
        write(tmp_path / "b", steady_requests(10, gap=0.15), "chunked"),
    ]
    found = cells(runs)
    assert found["stalls.count", "continuous"]["value"] == 0
    assert found["stalls.count", "chunked"]["value"] == 100
    assert cells([runs[1], runs[1]])["stalls.count", "chunked #2"]["value"] == 0


def test_invalid_runs_are_named_and_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(tmp_path / "a", steady_requests(10), "continuous"),
        write(
            tmp_path / "b", steady_requests(10), "chunked", complete=False, incomplete_reason="interrupted"
        ),
    ]
    assert main([str(run) for run in runs]) == 3
    assert "chunked: INVALID incomplete: interrupted" in capsys.readouterr().out


def test_one_engine_twice_is_numbered(tmp_path: Path) -> None:
    run = write(tmp_path / "a", steady_requests(10), "continuous")
    assert compare([run, run]).names == ("continuous #1", "continuous #2")


@pytest.mark.parametrize(
    ("value", "reference", "better", "verdict"),
    [
        *((98.1, 100, "lower", "same"), (97, 100, "lower", "better"), (97, 100, "higher", "worse")),
        *((0, 0, "lower", "same"), (1, 0, "lower", "worse"), (5, 1, None, None)),
    ],
)
def test_judge(value: float, reference: float, better: str | None, verdict: str | None) -> None:
    assert judge(value, reference, better) == verdict


def test_runs_of_one_engine_are_named_by_what_differs() -> None:
    def names(*runs: tuple[str, dict]) -> list[str]:
        return column_names(
            [{"engine": engine, "run": {"id": "x"}} for engine, _ in runs], [c for _, c in runs]
        )

    small, large = ({"engine": {"num_kv_blocks": n, "block_size": 16}} for n in (120, None))
    assert names(("continuous", small), ("continuous", large)) == ["num_kv_blocks=120", "num_kv_blocks=null"]
    assert names(("static", small), ("chunked", large)) == ["static", "chunked"]
    assert names(("static", small), ("chunked", small), ("chunked", large)) == [
        "static",
        "chunked, num_kv_blocks=120",
        "chunked, num_kv_blocks=null",
    ]
    assert names(("chunked", small), ("chunked", small)) == ["chunked #1", "chunked #2"]
    assert names(("chunked", {}), ("chunked", {"output": {"dir": "elsewhere"}})) == [
        "chunked #1",
        "chunked #2",
    ]


def test_a_result_of_another_tool_is_named_by_it() -> None:
    ours = {"engine": "static", "run": {"id": "x"}}
    theirs = {"engine": "static", "run": {"id": "y", "source": {"tool": "vllm bench serve"}}}
    settings = {"workload": {"name": "rag"}}
    assert column_names([ours, theirs], [settings, {}]) == ["static", "static, vllm bench serve"]
    other = {"engine": "chunked", "run": {"id": "z"}}
    assert column_names([other, theirs], [settings, {}]) == ["chunked", "static"]


def test_heads_of_columns_lose_nothing() -> None:
    assert folded("chunked, num_kv_blocks=120") == "chunked\nnum_kv_blocks\n=120"
    assert folded("max_num_batched_tokens=512") == "max_num_\nbatched_\ntokens=512"
    for name in ("static", "a=1", "seed=3", "chunked #2", "max_waiting_requests=null"):
        assert folded(name).replace("\n", "") == name


def test_a_terminal_that_is_not_utf8_costs_the_arrows_only(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / name, steady_requests(40, gap=gap), name)
        for name, gap in (("static", 0.04), ("chunked", 0.02))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness.comparison", *map(str, runs)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"0.50x ?" in done.stdout


def test_a_runs_warnings_stand_under_the_comparison(tmp_path: Path) -> None:
    bundles = [request(i, [(i + 1.0 + 0.4 * k, 20) for k in range(5)], intended=float(i)) for i in range(20)]
    runs = [write(tmp_path / "a", bundles, "static"), write(tmp_path / "b", steady_requests(20), "chunked")]
    notes = compare(runs).notes
    assert [note.partition(":")[0] for note in notes if "ITL is chunked" in note] == ["static"]
    assert not any("INVALID" in note for note in notes)
