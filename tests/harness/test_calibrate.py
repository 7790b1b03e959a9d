"""harness.calibrate from end to end: real processes, a real server, figures that are there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.calibrate.command import main
from harness.calibrate.compare import compare
from harness.calibrate.omission import View
from harness.calibrate.store import cache_dir, load_calibration, rate_bucket, save_calibration
from harness.cli import guard
from harness.request_log import RequestRecord
from tests.support.run_factory import request

ROOT = Path(__file__).parents[2]
MS = 1_000_000

needs_truth_server = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not (shutil.which("g++") or shutil.which("c++")),
    reason="the truth server needs Linux and a C++ compiler",
)


def calibrate(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    # The lock of measured runs lies in TMPDIR: a test waits for nobody. The compiled server stays cached.
    return subprocess.run(
        [sys.executable, "-m", "harness.calibrate", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)} | env,
        timeout=120,
    )


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


@needs_truth_server
@pytest.mark.parametrize("backend", ["lean", "aiohttp"])
def test_a_small_table_has_every_figure(tmp_path: Path, backend: str) -> None:
    done = calibrate(
        tmp_path,
        *("--table", "--backend", backend, "--rates", "40", "--seconds", "1", "--tokens", "8"),
        *("--pattern", "stall", "--tries", "1", "--starts", "0", "--repeat", "2"),
    )
    value = figures(done)
    (row,) = value["results"]
    assert (row["requests"], row["completed"], row["mismatched"], row["runs"]) == (40, 40, 0, 2)
    assert row["tokens"] == 40 * 8
    assert row["ran"] == backend
    missing = {name for name, figure in row.items() if figure is None}
    assert missing <= {
        "iod_1s",
        "iod_1s_planned",
        "iod_0.2s",
        "iod_0.2s_planned",
        "read_lag_p50",
        "read_lag_p99",
    }
    # Far apart from the errors of a busy machine: what was measured is the schedule and the server asked for.
    assert row["ttft_true_p50"] > 100
    assert row["gap_true_max"] > 20
    assert row["rate"] > 0
    assert row["ttft_error_p50"] < 200
    assert 0 < row["cpu_s_per_1k_tokens"] < 10
    assert "TTFT |err| p50" in done.stdout


@needs_truth_server
def test_the_clients_own_bias_is_kept_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path / "cache"))
    done = calibrate(
        tmp_path,
        *("+workload=chat", "workload.rate=30", "load.requests=30", "workload.length_scale=0.05"),
        *("load.backend=aiohttp", "--tries", "1"),
    )
    value = figures(done)
    assert value["completed"] > 0
    for name in ("send_lag_ms", "ttft_bias_ms", "stamp_bias_ms"):
        assert value[name]["p99"] >= value[name]["p50"]
    assert value["cpu_s_per_1k_tokens"] > 0
    kept = json.loads(Path(value["kept"]).read_text())
    assert kept["ttft_bias_ms"] == value["ttft_bias_ms"]
    assert Path(value["kept"]).parent == cache_dir()
    from harness.host import facts

    found = load_calibration(facts(), "aiohttp", 30.0)
    assert found == kept


@needs_truth_server
def test_coordinated_omission_is_seen_in_one_view_and_not_in_the_other(tmp_path: Path) -> None:
    value = figures(calibrate(tmp_path, "--coordinated-omission", "--tolerance-ms", "200"))
    intended = value["e2e_from_the_intended_arrival"]
    sent, delay = value["e2e_from_the_send"], value["dispatch_delay"]
    # The ideal is 1,900 and 3,272 ms, 500 and 1,400; a busy machine only adds.
    assert 1_890 < intended["mean"] < 3_500
    assert 3_260 < intended["p99"] < 6_000
    assert 490 < sent["mean"] < 900
    assert 1_390 < delay["mean"] < 2_700
    assert value["agrees"]


@needs_truth_server
def test_a_compiler_that_is_missing_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = calibrate(
        tmp_path,
        *("--coordinated-omission",),
        CXX="no-such-compiler",
        BATCHMARK_CACHE=str(tmp_path / "empty"),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: CXX=no-such-compiler: no such compiler; install g++ or name one in CXX\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "error: nothing to do"),
        (("--table", "+workload=chat"), "error: +workload=chat: overrides describe a run"),
        (("--table", "--cores", "0"), "error: --cores=0: needs two numbers"),
        (("--table", "--cores", "0,9999"), "error: --cores=0,9999: choose from"),
        (("+workload=nonsense",), "error: workload=nonsense"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the host lock
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert guard(lambda: main(args)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(message)


@pytest.mark.parametrize(
    ("option", "value", "needs"),
    [
        *((option, "0", "a whole number from 1") for option in ("--tokens", "--requests", "--tries")),
        ("--repeat", "-1", "a whole number from 1"),
        ("--starts", "-1", "a whole number from 0"),
        ("--seed", "x", "a whole number from 0"),
        *(("--rates", rate, "a number above 0") for rate in ("0", "nan", "inf", "x")),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_anything_starts(
    option: str, value: str, needs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--table", f"{option}={value}"])
    assert f"argument {option}: {value}: needs {needs}\n" in capsys.readouterr().err


def record(*args: Any, **changes: Any) -> RequestRecord:
    return RequestRecord.from_mapping(request(*args, **changes))


def truth_of(rows: list[dict[str, Any]]) -> SimpleNamespace:
    """As a TruthLog looks to compare()."""
    dtype = [("received_ns", np.int64), ("arrived_ns", np.int64)]
    table = np.array([(row["received"], row["arrived"]) for row in rows], dtype)
    sent = [np.array(row["sent"], np.int64) for row in rows]
    return SimpleNamespace(
        rows=table,
        index={row["id"]: k for k, row in enumerate(rows)},
        sent_of=lambda k: sent[k],
        lateness_ns=lambda: np.concatenate(sent) * 0,
    )


def test_errors_are_those_between_the_records_and_the_log() -> None:
    t0 = 50_000 * MS
    records, rows = [], []
    for k in range(3):
        at = 0.2 * k
        chunks = [(at + 0.105, 1), (at + 0.127, 1), (at + 0.145, 1)]
        records.append(record(k, chunks, intended=at, send=at + 0.001))
        base = t0 + 200 * k * MS
        sent = [base + 104 * MS, base + 124 * MS, base + 144 * MS]
        rows.append({"id": f"r{k:06d}", "received": base + 3 * MS, "arrived": base + 2 * MS, "sent": sent})
    found = compare(records, truth_of(rows), t0)
    assert found["tokens"] == 9
    assert found["ttft_true_p50"] == pytest.approx(101)
    assert found["ttft_reported_p50"] == pytest.approx(104)
    assert found["ttft_error_p99"] == found["ttft_p50_error"] == pytest.approx(3)
    assert found["ttft_error_kernel_p50"] == pytest.approx(2)
    assert found["tpot_error_p99"] == pytest.approx(0)
    assert found["gap_error_max"] == pytest.approx(2)  # 22 and 18 for 20 and 20
    assert found["gap_reported_max"] == pytest.approx(22)
    assert found["gap_max_error"] == pytest.approx(2)
    assert found["lateness_p50"] == pytest.approx(2)
    assert found["send_lag_p50"] == pytest.approx(1)
    assert found["stamp_error_p50"] == pytest.approx(1)
    assert found["rate"] == pytest.approx(5)
    assert found["iod_1s"] is None


def test_tokens_that_were_not_seen_one_by_one_are_counted_and_nothing_measured_is_null() -> None:
    bundled = record(0, [(0.01, 3)])
    truth = truth_of([{"id": "r000000", "received": 1, "arrived": 1, "sent": [2, 3, 4]}])
    found = compare([bundled], truth, 0)
    assert (found["requests"], found["mismatched"], found["tokens"]) == (1, 1, 0)
    assert found["ttft_error_p50"] is found["gap_error_p99"] is found["tpot_error_p99"] is None


def test_the_store_answers_with_the_nearest_rate_of_this_host_and_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    here = {"cpu": "a", "cores": 2, "memory_gb": 8.0, "os": "not part of it"}
    assert load_calibration(here, "lean") is None
    for rate in (10.0, 11.0, 100.0, None):
        save_calibration(here, "lean", rate, {"cpu_s_per_1k_tokens": rate})
    assert len(list(cache_dir().iterdir())) == 3  # 10 and 11 are one rough rate
    assert load_calibration(here, "lean", 20.0)["at_rate"] == 11.0
    assert load_calibration({**here, "os": "newer"}, "lean", 70.0)["at_rate"] == 100.0
    assert load_calibration(here, "lean", 1e9)["at_rate"] == 100.0
    assert load_calibration(here, "lean")["at_rate"] is None
    assert load_calibration(here, "aiohttp", 20.0) is None
    assert load_calibration({**here, "cores": 4}, "lean", 20.0) is None
    for path in cache_dir().iterdir():
        path.write_text("{broken")
    assert load_calibration(here, "lean", 20.0) is None
    assert rate_bucket(None) is None


def test_a_view_that_is_off_in_either_figure_does_not_agree() -> None:
    assert View("v", (100.0, 200.0), (105.0, 195.0)).agrees(5.0)
    assert not View("v", (100.0, 200.0), (100.0, 190.0)).agrees(5.0)
    assert not View("v", (100.0, 200.0), (90.0, 200.0)).agrees(5.0)
