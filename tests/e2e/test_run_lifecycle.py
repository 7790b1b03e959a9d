"""Whole runs over real sockets, real server, embedded model: how they end, what they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pandas as pd
import psutil
import pytest
from omegaconf import OmegaConf

from harness.records import OUTCOMES, read_engine_requests, read_request_file, read_steps, read_telemetry
from tests.support.harness_command import (
    LONG,
    ROOT,
    SHORT,
    HarnessCommand,
    gone,
    harness,
    meta,
    results,
    summary,
    wait_for,
)
from workloads.schedule import Schedule

pytestmark = pytest.mark.e2e

FILES = {
    *("meta.json", "config.yaml", "schedule.parquet", "summary.json", "report.html", "server.log"),
    *(
        "requests.jsonl",
        "engine_requests.jsonl",
        "engine_end.json",
        "telemetry.jsonl",
        "server_metrics.jsonl",
    ),
    *("requests.parquet", "chunks.parquet", "steps.parquet", "telemetry.parquet"),
}


def add_up(counts):
    return counts["scheduled"] == sum(counts[name] for name in OUTCOMES)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs of one schedule, started at once: (command, exit code, output, standard error) each."""
    folder = tmp_path_factory.mktemp("two")
    commands = [HarnessCommand(folder, *SHORT, f"engine={name}") for name in ("static", "chunked")]
    return [(c, *c.finish()[:2], c.stderr) for c in commands]


def test_a_run_leaves_every_file_and_ends_with_its_folder(two_runs):
    for command, code, out, stderr in two_runs:
        assert code == 0, stderr
        run_dir = results(out)
        assert run_dir.parent == command.output
        assert {path.name for path in run_dir.iterdir()} == FILES
        assert meta(run_dir)["complete"] is True
        assert summary(run_dir)["valid"] is True
        assert "TTFT" in out


def test_every_request_is_accounted_for_by_both_sides(two_runs):
    for _, _, out, _ in two_runs:
        run_dir = results(out)
        about = meta(run_dir)
        counts = summary(run_dir)["counts"]
        schedule = Schedule.from_parquet(run_dir / "schedule.parquet")
        file = read_request_file(run_dir / "requests.jsonl")
        engine = read_engine_requests(run_dir)
        served = engine[engine["run"] == about["run"]]
        assert counts["scheduled"] == len(schedule) == len(file.records) == 6
        assert add_up(counts)
        assert file.closed
        assert file.t0_ns == about["t0_ns"]
        assert {r.id for r in file.records} == {r.id for r in schedule} == set(served["id"])
        lengths = dict(zip(served["id"], served["output_tokens"], strict=True))
        for record in file.records:
            if record.outcome == "completed":
                assert record.output_tokens == record.stop_after == lengths[record.id]
        assert counts["completed"] >= 4


def test_the_warm_up_is_served_and_counted_nowhere(two_runs):
    for _, _, out, _ in two_runs:
        run_dir = results(out)
        engine = read_engine_requests(run_dir)
        warm_up = engine[engine["run"] == "warmup"]
        assert len(warm_up) == 3
        assert (warm_up["finish_ns"] < meta(run_dir)["t0_ns"]).all()
        assert not any(r.id.startswith("w") for r in read_request_file(run_dir / "requests.jsonl").records)


def test_two_runs_at_once_wait_for_each_other_and_share_nothing(two_runs):
    (a, _, out_a, err_a), (b, _, out_b, err_b) = two_runs
    assert results(out_a) != results(out_b)
    assert ("waiting for the run of process" in err_a) != ("waiting for the run of process" in err_b)
    waited, ran = (a, b) if "waiting" in err_a else (b, a)
    assert f"process {ran.process.pid}" in waited.stderr
    spans = []
    for out in (out_a, out_b):
        steps = read_steps(results(out))
        spans.append((int(steps["start_ns"].min()), int((steps["start_ns"] + steps["duration_ns"]).max())))
    (_, first_end), (second_start, _) = sorted(spans)
    assert first_end < second_start


def test_one_seed_gives_every_engine_the_same_schedule(two_runs):
    a, b = (results(out) for _, _, out, _ in two_runs)
    assert meta(a)["fingerprint"]["schedule"] == meta(b)["fingerprint"]["schedule"]
    assert meta(a)["fingerprint"]["config"] != meta(b)["fingerprint"]["config"]
    assert meta(a)["fingerprint"]["host"] == meta(b)["fingerprint"]["host"]
    assert Schedule.from_parquet(a / "schedule.parquet") == Schedule.from_parquet(b / "schedule.parquet")


def test_meta_and_config_say_what_ran(two_runs):
    for _, _, out, _ in two_runs:
        run_dir = results(out)
        about, config = meta(run_dir), OmegaConf.load(run_dir / "config.yaml")
        assert about["run"] == run_dir.name
        assert about["engine"] == config.engine.name
        assert about["server"]["event"] == "ready"
        assert about["length_mode"] == "stop_after"
        assert 0 < about["load_end_ns"] / 1e9 == about["duration_s"]
        assert len(about["clock_pairs"]) >= 2
        assert about["client"]["loop_lag_ms"]
        assert config.load.requests == about["planned"]["requests"] == 6
        telemetry = read_telemetry(run_dir)
        assert (telemetry["server_rss_mb"] > 10).all()
        assert gone(about["server"]["pid"])


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    command = HarnessCommand(tmp_path, *LONG)
    run_dir = command.wait_for_records(2)
    server = command.server_pid()
    os.kill(command.process.pid, signal.SIGINT)
    code, out, stderr = command.finish()
    assert code == 3
    assert results(out) == run_dir
    assert "Traceback" not in stderr
    assert (meta(run_dir)["complete"], meta(run_dir)["incomplete_reason"]) == (False, "interrupted")
    counts = summary(run_dir)["counts"]
    assert add_up(counts)
    assert counts["completed"] >= 1
    assert counts["cut_off"] > 100
    assert any("interrupted" in reason for reason in summary(run_dir)["invalid_reasons"])
    assert gone(server)


def test_a_second_signal_leaves_at_once_and_no_server_behind(tmp_path):
    command = HarnessCommand(tmp_path, *LONG)
    command.wait_for_records(1)
    server = command.server_pid()
    os.kill(command.process.pid, signal.SIGTERM)
    wait_for(lambda: "interrupted" in command.stderr, "the answer to the first signal")
    os.kill(command.process.pid, signal.SIGTERM)
    code, _, stderr = command.finish()
    assert code in (130, 3)  # 3: the run had ended before the second signal came
    assert "Traceback" not in stderr
    assert gone(server)


PRESSED = """
import os, runpy, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PRESSED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
runpy.run_module("harness", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["harness.cli", "omegaconf", "numpy"])
def test_ctrl_c_while_modules_are_loaded_is_one_line(module):
    command = [sys.executable, "-c", PRESSED, "+workload=rag", "--dry-run"]
    env = {**os.environ, "PRESSED_AT": module}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("interrupted before the load began")


def test_ctrl_c_before_the_load_leaves_nothing(tmp_path):
    command = HarnessCommand(tmp_path, *SHORT)
    server = command.server_pid()
    os.kill(command.process.pid, signal.SIGINT)
    code, out, stderr = command.finish()
    assert code == 3
    assert out == ""
    assert len(stderr.splitlines()) == 1
    assert list(command.output.iterdir()) == []
    assert gone(server)


def test_a_server_that_dies_ends_the_run_and_keeps_the_records(tmp_path):
    command = HarnessCommand(tmp_path, *LONG)
    run_dir = command.wait_for_records(2)
    os.kill(command.server_pid(), signal.SIGKILL)
    code, out, stderr = command.finish()
    assert code == 3
    assert results(out) == run_dir
    assert "Traceback" not in stderr
    about = meta(run_dir)
    assert about["complete"] is False
    assert "SIGKILL" in about["incomplete_reason"]
    counts = summary(run_dir)["counts"]
    assert add_up(counts)
    assert counts["completed"] >= 1
    assert counts["cut_off"] > 100
    # The engine dies with its server; whether it still wrote its end is a race.
    assert {path.name for path in run_dir.iterdir()} >= FILES - {"engine_end.json"}
    last = max(r.end_ns or 0 for r in read_request_file(run_dir / "requests.jsonl").records)
    assert about["load_end_ns"] >= last


def test_a_harness_that_is_killed_leaves_no_server_and_readable_records(tmp_path):
    command = HarnessCommand(tmp_path, *LONG)
    run_dir = command.wait_for_records(2)
    server, workers = command.server_pid(), command.worker_pids()
    os.kill(command.process.pid, signal.SIGKILL)
    command.finish()
    assert gone(server)
    assert (meta(run_dir)["complete"], meta(run_dir)["incomplete_reason"]) == (False, "running")
    assert all(gone(pid) for pid in workers)
    file = read_request_file(run_dir / "requests.jsonl")
    assert {r.id for r in file.records} == {r.id for r in Schedule.from_parquet(run_dir / "schedule.parquet")}
    assert sum(r.outcome == "completed" for r in file.records) >= 1
    assert sum(r.reason == "not_sent" for r in file.records) > 100


def test_a_full_disk_is_one_line_and_what_was_written_is_kept(tmp_path):
    command = HarnessCommand(tmp_path, *LONG)
    run_dir = command.wait_for_records(2)
    server = command.server_pid()
    limit = (run_dir / "requests.jsonl").stat().st_size + 1000
    for pid in (command.process.pid, *command.worker_pids()):
        psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (limit, limit))
    code, _, stderr = command.finish()
    assert code == 3
    assert "cannot write" in stderr
    assert "Traceback" not in stderr
    assert gone(server)
    assert len(read_request_file(run_dir / "requests.jsonl").records) >= 2
    assert (run_dir / "requests.jsonl").stat().st_size <= limit
    assert meta(run_dir)["complete"] is False


def test_a_killed_sweep_goes_on_where_it_was_and_past_an_invalid_run(tmp_path):
    sweep = (
        "-m",
        *SHORT,
        "engine=chunked",
        "engine.max_model_len=4096,64",
        f"sweep.dir={tmp_path / 'sweep'}",
    )
    killed = HarnessCommand(tmp_path, *sweep)
    log = tmp_path / "sweep" / "sweep.json"
    wait_for(lambda: log.exists() and json.loads(log.read_text())["runs"], "first point")
    killed.process.kill()
    killed.process.communicate()
    (first,) = json.loads(log.read_text())["runs"]
    code, out, stderr = harness(tmp_path, *sweep)
    assert code == 3, stderr
    assert f"run 1 of 2: {first['overrides'][0]}" not in out
    folder = results(out)
    assert {path.name for path in folder.iterdir()} == {"report.html", "sweep.json", ".lock"}
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [run["exit_code"] for run in runs] == [0, 3]
    assert runs[0] == first
    assert [run["overrides"] for run in runs] == [["engine.max_model_len=4096"], ["engine.max_model_len=64"]]
    assert "engine.max_model_len=64 tokens" in stderr
    assert "failed: run 2 of 2, engine.max_model_len=64: not valid: " in stderr
    hashes = {meta(folder / run["run"])["fingerprint"]["schedule"] for run in runs}
    assert len(hashes) == 1


def test_any_openai_server_gets_the_same_load(tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-m", "engines.server", "engine=chunked", "engine.kv_memory_gb=0.1"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        ready = json.loads(server.stdout.readline())
        url = f"http://127.0.0.1:{ready['port']}/v1"
        foreign = ("+engine=openai", f"engine.base_url={url}", "engine.tokenizer=bytes")
        sockets = "workload.websocket_fraction=1"  # it has the route
        code, out, stderr = harness(tmp_path, "+experiment=smoke", "load.requests=4", sockets, *foreign)
    finally:
        server.terminate()
        server.communicate()
    assert code == 0, stderr
    run_dir = results(out)
    about = meta(run_dir)
    assert about["length_mode"] == "exact"
    assert about["model"] == "tiny"
    assert about["server"] == {}
    assert {path.name for path in run_dir.iterdir()} == FILES - {
        *("server.log", "engine_requests.jsonl", "engine_end.json")
    }
    requests = pd.read_parquet(run_dir / "requests.parquet")
    done = requests[requests["outcome"] == "completed"]
    assert len(done) >= 3
    assert np.array_equal(requests["transport"] == "websocket", requests["stream"])
    assert requests["stream"].any()
    assert np.array_equal(done["output_tokens"], done["stop_after"])


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_what_cannot_start_is_one_line_exit_2_and_leaves_nothing(tmp_path, taken_port):
    trace = tmp_path / "bad.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0000000,10,5\n"
        "2023-11-16 18:00:01.0000000,many,5\n"
    )
    silent = f"http://127.0.0.1:{taken_port}"  # listens, and never answers
    cases = [
        ((f"server.port={taken_port}",), [f"server.port={taken_port}"]),
        (("model=hf", "model.id=/nowhere/model"), ["/nowhere/model"]),
        (("workload=trace", f"workload.path={trace}"), ["bad.csv", "line 3", "ContextTokens"]),
        (("engine=openai", "engine.base_url=http://127.0.0.1:9"), ["engine.base_url=http://127.0.0.1:9"]),
        (("engine=openai", f"engine.base_url={silent}"), [silent, "no answer"]),
    ]
    commands = []
    for number, (args, _) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        commands.append(HarnessCommand(folder, *args))
    for command, (_, parts) in zip(commands, cases, strict=True):
        code, out, stderr = command.finish()
        assert (code, out) == (2, ""), stderr
        assert len(stderr.splitlines()) == 1, stderr
        assert stderr.startswith("error: ")
        for part in parts:
            assert part in stderr
        assert not command.output.exists() or list(command.output.iterdir()) == []
