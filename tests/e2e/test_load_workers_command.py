"""Load workers under `python -m harness`: a run's figures are those of all of them, and whichever process
ends, what was measured is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from harness.records import (
    OUTCOMES,
    merge_parts,
    part_paths,
    read_run_file,
)
from tests.support.harness_command import ROOT, HarnessCommand, gone, meta, results, summary, wait_for
from tests.support.script_process import ScriptProcess
from tests.support.script_server import Script, answer, plain
from workloads.schedule import Schedule

pytestmark = pytest.mark.e2e
SOON_S = 40.0
"""Every end takes less than 10 s; a machine under other loads may take longer to start a process."""
STREAM = answer(4, 0.01)
LASTING = Script([*answer(4, 0.01).steps[:4], plain(b": wait\n\n", 60.0)])
"""Answers that do not end while a test runs."""


@pytest.fixture(scope="module")
def server():
    with ScriptProcess() as process:
        yield process


def run_against(server, folder, *args):
    """`python -m harness` against a script server: two workers, 20 requests/s for 60 s, or as args say."""
    return HarnessCommand(
        folder,
        *("+experiment=smoke", "+engine=openai", f"engine.base_url={server.base_url}", "workload.rate=20"),
        *("load.requests=1200", "load.processes=2", *args),
    )


def wait_for_parts(command, count):
    folder = command.run_dir()

    def ended() -> int:
        return sum(path.read_bytes().count(b'"type":"request"') for path in part_paths(folder))

    wait_for(lambda: ended() >= count, f"{count} records in parts")
    return folder


def report(run_dir):
    """(exit code, summary.json) of `python -m harness.report --from`."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.report", "--from", str(run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (run_dir / "summary.json").read_bytes()


def test_percentiles_are_those_of_all_records_together(tmp_path, server):
    server.play(answer(8, 0.01, first_s=0.02))
    command = run_against(server, tmp_path, "load.requests=80", "workload.rate=80")
    code, out, stderr = command.finish()
    assert "Traceback" not in stderr
    run_dir = results(out)
    about, found = meta(run_dir), summary(run_dir)
    assert (about["complete"], about["client"]["processes"]) == (True, 2), about["incomplete_reason"]
    assert part_paths(run_dir) == []
    records = [r for r in read_run_file(run_dir).records if r.outcome == "completed"]
    assert found["counts"]["completed"] == len(records) > 60
    streamed = [r for r in records if r.stream and r.chunk_ns]
    ttft = [(r.chunk_ns[0] - r.intended_ns) / 1e6 for r in streamed]
    e2e = [(r.chunk_ns[-1] - r.intended_ns) / 1e6 for r in records]
    for block, values in (("ttft", ttft), ("e2e", e2e)):
        told = found["latency_ms"][block]["from_intended"]
        assert told["n"] == len(values)
        for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
            assert told[name] == pytest.approx(np.percentile(values, q), rel=1e-5)
    before = (run_dir / "summary.json").read_bytes()
    assert report(run_dir) == (code, before)


def test_a_parent_that_is_killed_leaves_parts_that_are_a_run(tmp_path, server):
    server.play(STREAM)
    command = run_against(server, tmp_path)
    run_dir = wait_for_parts(command, 30)
    workers = command.worker_pids(2)
    os.kill(command.process.pid, signal.SIGKILL)
    command.finish()
    for pid in workers:
        assert gone(pid)
    assert len(part_paths(run_dir)) == 2
    assert not (run_dir / "requests.jsonl").exists()
    file = read_run_file(run_dir)
    schedule = Schedule.from_parquet(run_dir / "schedule.parquet")
    assert file.closed  # they have seen the end of their parent, and told of every request
    assert {record.id for record in file.records} == {request.id for request in schedule}
    code, first = report(run_dir)
    assert code == 3
    told = json.loads(first)
    assert told["run"]["incomplete_reason"] == "running"
    assert told["counts"]["scheduled"] == sum(told["counts"][name] for name in OUTCOMES) == 1200
    assert report(run_dir) == (3, first)
    merge_parts(run_dir, read_run_file(run_dir))
    assert report(run_dir) == (3, first)


def test_all_killed_at_once_lose_the_last_second_at_most(tmp_path):
    with ScriptProcess() as server:
        server.play(STREAM)
        command = run_against(server, tmp_path)
        run_dir = wait_for_parts(command, 30)
        killed = [command.process.pid, *command.worker_pids(2)]
        killed_ns = time.monotonic_ns()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        command.finish()
        assert all(gone(pid) for pid in killed)
        truth = server.truth()
    file = read_run_file(run_dir)
    assert not file.closed
    assert file.records
    answered = sum(s.ended_ns is not None and s.ended_ns < killed_ns - 1_000_000_000 for s in truth.seen)
    warmed_up = 2 * 3
    completed = sum(record.outcome == "completed" for record in file.records)
    assert completed >= answered - warmed_up > 0
    code, first = report(run_dir)
    assert code == 3
    assert report(run_dir) == (3, first)


def test_ctrl_c_once_keeps_what_all_workers_measured(tmp_path, server):
    server.play(STREAM)
    command = run_against(server, tmp_path)
    run_dir = wait_for_parts(command, 30)
    os.kill(command.process.pid, signal.SIGINT)
    code, out, stderr = command.finish()
    assert (code, results(out)) == (3, run_dir), stderr
    assert meta(run_dir)["incomplete_reason"] == "interrupted"
    assert part_paths(run_dir) == []
    counts = summary(run_dir)["counts"]
    assert counts["scheduled"] == sum(counts[name] for name in OUTCOMES) == 1200
    assert counts["cut_off"] > 500
    assert report(run_dir)[1] == (run_dir / "summary.json").read_bytes()


def test_ctrl_c_twice_leaves_no_process(tmp_path, server):
    server.play(STREAM)
    command = run_against(server, tmp_path)
    wait_for_parts(command, 5)
    server.play(LASTING)
    workers = command.worker_pids(2)
    os.kill(command.process.pid, signal.SIGINT)
    wait_for(lambda: "interrupted" in command.stderr, "the answer to the first signal")
    os.kill(command.process.pid, signal.SIGINT)
    code, _, stderr = command.finish()
    assert code in (130, 3)  # 3: the run had ended before the second signal came
    assert "Traceback" not in stderr
    assert all(gone(pid) for pid in workers)


def test_a_worker_that_is_killed_makes_the_run_invalid_and_says_why(tmp_path, server):
    server.play(STREAM)
    command = run_against(server, tmp_path)
    run_dir = wait_for_parts(command, 30)
    os.kill(command.worker_pids(2)[0], signal.SIGKILL)
    code, out, stderr = command.finish()
    assert (code, results(out)) == (3, run_dir)
    assert "Traceback" not in stderr
    assert meta(run_dir)["incomplete_reason"].startswith("worker_died: ")
    told = summary(run_dir)
    assert told["counts"]["scheduled"] == sum(told["counts"][name] for name in OUTCOMES) == 1200
    assert any("worker_died" in reason for reason in told["invalid_reasons"])
    assert {"not_recorded", "not_sent"} <= {r.reason for r in read_run_file(run_dir).records}
