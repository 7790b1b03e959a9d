"""The command as its users and their CI meet it: `python -m harness` against the script server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.records import read_request_file
from tests.support.harness_command import ROOT, HarnessCommand, harness, meta, results, summary, wait_for
from tests.support.script_process import ScriptProcess, Truth
from tests.support.script_server import AsAsked, InTurn, refusal, timeline

WARM_UP = 3
"""Requests of each load process that go before the run."""
SCHEMA = Path(__file__).with_name("summary_schema.txt")

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " is not installed here")


sys.meta_path.insert(0, Blocker())
"""


def target(server: ScriptProcess, *more: str) -> list[str]:
    url = f"engine.base_url={server.base_url}"
    return ["+engine=openai", url, "engine.tokenizer=bytes", "+workload=short", *more]


@pytest.fixture(scope="module")
def finished(
    server: ScriptProcess, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, str, str, Path, Truth]:
    """(exit code, output, errors, run, the server's log) of a run without torch and without a terminal."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    # A cache of its own: a calibration of this machine would be in the summary.
    env = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "BATCHMARK_CACHE": str(folder / "cache")}
    refused = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert "not installed here" in refused.stderr
    server.play(AsAsked(first_s=0.05, gap_s=0.005))
    command = HarnessCommand(
        folder, *target(server, "load.requests=40", "workload.rate=40", "load.processes=2"), env=env
    )
    code, out, err = command.finish()
    return code, out, err, results(out), server.truth()


def test_the_client_needs_no_torch(finished: tuple[int, str, str, Path, Truth]) -> None:
    """IBM/ado#1116, vllm-project/vllm#24005: the client without the engine. Every process of the run was kept
    from importing torch and transformers. (Whether this machine was quick enough is not the question.)"""
    code, _, err, run, truth = finished
    assert code in (0, 3), err
    assert "Traceback" not in err
    found = summary(run)
    assert found["counts"]["completed"] == len(truth.seen) - 2 * WARM_UP == 40
    assert all(reason.startswith(("client_bound", "rate")) for reason in found["invalid_reasons"])
    assert (code == 0) == found["valid"]


def test_no_terminal_no_display(finished: tuple[int, str, str, Path, Truth]) -> None:
    """ai-dynamo/aiperf#604: neither colours nor cursor movements in a log."""
    _, out, err, _, _ = finished
    assert len(out.splitlines()) > 15
    for text in (out, err):
        assert "\x1b" not in text
        assert "\r" not in text


def test_what_was_sent_is_what_was_planned(finished: tuple[int, str, str, Path, Truth]) -> None:
    """Through the whole command, and two load processes: lengths, ids and numbers."""
    _, _, _, run, truth = finished
    found = summary(run)
    asked = truth.seen[2 * WARM_UP :]
    assert found["client"]["processes"] == 2
    assert found["prompt_tokens"]["off"] == 0
    assert found["prompt_tokens"]["counted"] == sum(len(s.body["prompt"]) for s in asked)
    assert found["output_tokens"]["off"] == 0
    assert found["output_tokens"]["counted"] == sum(s.body["max_tokens"] for s in asked)
    file = read_request_file(run / "requests.jsonl")
    assert file.closed
    assert len({record.id for record in file.records}) == len(file.records) == 40


def shape(value: Any, path: str = "") -> list[str]:
    """Dotted paths of the summary. A block of figures is one entry; what is named by the run's own classes,
    reasons and settings is left open."""
    if path in ("null_reasons", "setup.engine", "setup.runner", "by_tenant", "refusals", "failures"):
        return [f"{path}.*"]
    if not isinstance(value, dict) or not value:
        return [path]
    if {"n", "p50", "ci95"} <= set(value):
        extra = sorted(set(value) - {"n", "mean", "p50", "p90", "p95", "p99", "max", "ci95", "reliable"})
        return [f"{path} [{', '.join(['block', *extra])}]"]
    if path == "by_class":
        assert len(value) == 1
        value = {"*": next(iter(value.values()))}
    return [found for key, part in value.items() for found in shape(part, f"{path}.{key}".lstrip("."))]


def test_the_summary_has_the_keys_of_its_schema(finished: tuple[int, str, str, Path, Truth]) -> None:
    """ai-dynamo/aiperf#340: the shape of the JSON is a contract. A key that is new is added to
    summary_schema.txt; one that goes or changes its meaning needs another schema_version as well."""
    found = summary(finished[3])
    version, *keys = SCHEMA.read_text().splitlines()
    assert version == f"schema_version {found['schema_version']}"
    assert len(keys) > 100
    now = shape(found)
    gone, new = sorted(set(keys) - set(now)), sorted(set(now) - set(keys))
    assert (gone, new) == ([], [])


def test_too_many_errors_end_with_an_exit_code(server: ScriptProcess, tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM#17427: exit code 0 with a high error rate. Here 10 of 30 fail."""
    good = timeline([(0.02, 1), (0.03, 1)])
    server.play(InTurn([*[good] * WARM_UP, *[refusal(500, "boom"), good, good] * 10, good]))
    code, out, _ = harness(tmp_path, *target(server, "load.requests=30", "workload.rate=40"))
    assert code == 3
    assert len(server.truth().seen) == WARM_UP + 30
    found = summary(results(out))
    assert (found["counts"]["failed"], found["counts"]["completed"]) == (10, 20)
    assert not found["valid"]
    assert any(reason.startswith("errors: 10 of 30") for reason in found["invalid_reasons"])
    assert "INVALID" in out
    assert "boom" in out


def workers(command: HarnessCommand) -> list[psutil.Process]:
    children = psutil.Process(command.process.pid).children(recursive=True)
    return [child for child in children if "harness.loadgen.worker" in child.cmdline()]


def test_a_client_that_was_held_up_says_so(server: ScriptProcess, tmp_path: Path) -> None:
    """huggingface/inference-benchmarker#21, tt-inference-server#190: the tool is the bottleneck. The load's
    process is stopped for 300 ms in the middle; the run counts as invalid, and its sends say by how much."""
    server.play(timeline([(0.02, 1), (0.03, 1)]))
    command = HarnessCommand(tmp_path, *target(server, "load.requests=150", "workload.rate=75"))
    command.wait_for_records(40)
    (worker,) = workers(command)
    worker.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    worker.send_signal(signal.SIGCONT)
    code, out, _ = command.finish()
    found = summary(results(out))
    assert code == 3
    assert found["counts"]["completed"] == len(server.truth().seen) - WARM_UP == 150
    assert not found["valid"]
    assert any(reason.startswith("client_bound") for reason in found["invalid_reasons"])
    assert found["client"]["send_lag_ms"]["max"] > 200
    assert meta(results(out))["complete"]


def test_a_server_that_is_killed_ends_the_run_and_keeps_its_records(tmp_path: Path) -> None:
    """guidellm#431, inference-perf#245: hangs at the end. kill -9 of the server in the middle of a run of a
    minute: incomplete within ten seconds, exit code 3, and what was measured is in the report."""
    with ScriptProcess() as mine:
        mine.play(timeline([(0.02 * k, 1) for k in range(5)]))
        command = HarnessCommand(tmp_path, *target(mine, "load.requests=2400", "workload.rate=40"))
        command.wait_for_records(20)
        mine.process.kill()
        # The load has ended when the run writes why; its report takes as long as the machine is busy.
        wait_for(lambda: meta(command.run_dir())["incomplete_reason"] != "running", "an end", 10.0)
        code, out, err = command.finish()
    assert code == 3, err
    found = summary(results(out))
    assert not found["run"]["complete"]
    assert found["run"]["incomplete_reason"]
    assert any(reason.startswith("incomplete") for reason in found["invalid_reasons"])
    assert found["counts"]["completed"] >= 20
    assert found["latency_ms"]["e2e"]["from_intended"]["n"] >= 20


def test_a_dry_run_prints_the_plan_point_by_point_and_how_long_it_takes(tmp_path: Path) -> None:
    """vllm-project/guidellm#588: a sweep of seven hours that nobody had asked for."""
    sweep = ["workload.rate=10,20", "+engine=static,chunked", f"output.dir={tmp_path / 'runs'}"]
    plan = ["-m", "--dry-run", "+workload=short", "load.requests=200", *sweep]
    out = subprocess.run(
        [sys.executable, "-m", "harness", *plan],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for k in range(4):
        assert f"run {k + 1} of 4" in out
    lines = out.splitlines()
    assert sum(line.startswith("workload ") and "200 requests" in line for line in lines) == 4
    assert sum(line.startswith("time ") and "about" in line for line in lines) == 4
    assert "4 runs one after the other: about" in out
    assert not (tmp_path / "runs").exists()


def write_schema(run: Path) -> None:
    """`python -c` helper: the schema file from a run's summary, after a look at what has changed."""
    found = json.loads((run / "summary.json").read_text())
    SCHEMA.write_text("\n".join([f"schema_version {found['schema_version']}", *shape(found)]) + "\n")
