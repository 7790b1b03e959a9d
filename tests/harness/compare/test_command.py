"""`python -m harness.compare` as a user runs it: real servers, real sockets, few requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.harness_command import PATIENCE_S, ROOT, gone, results, wait_for

pytestmark = pytest.mark.e2e
SMALL = ("+experiment=smoke", "load.requests=6", "workload.rate=20", "engine.kv_memory_gb=0.1", "warmup=2")


class Command:
    def __init__(self, folder: Path, *args: str) -> None:
        self.output = folder / "runs"
        (folder / "tmp").mkdir(exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), "COLUMNS": "120"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.compare", *args, f"output.dir={self.output}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=3 * PATIENCE_S)
        return self.process.returncode, out, err

    def servers(self) -> list[int]:
        children = psutil.Process(self.process.pid).children()
        return [c.pid for c in children if "engines.server" in c.cmdline()]

    def rounds(self) -> int:
        """Whole rounds so far: compare.json is written after each."""
        found = sorted(self.output.glob("*/compare.json"))
        return len(compared(found[-1].parent)["rounds"]) if found else 0


def compared(folder: Path) -> dict:
    return json.loads((folder / "compare.json").read_text())


def test_two_engines_over_two_rounds(tmp_path):
    cut = "workload.output.cap=4"
    command = Command(
        tmp_path, *SMALL, "engines=[static,chunked]", "rounds=2", "metrics=[counts.completed]", cut
    )
    code, out, err = command.finish()
    assert err.count("answers cut to max_tokens") == 1  # every run draws them
    folder = results(out)
    found = compared(folder)
    valid = [one for one in found["rounds"] if one["valid"]]
    assert len(valid) == 2 or code == 3, err  # a busy machine makes the client late: then there is no verdict
    names = {"static", "chunked", "static again"}
    schedules = set()
    for one in found["rounds"]:
        assert set(one["order"]) == set(one["runs"]) == names
        for run in one["runs"].values():
            about = json.loads((folder / run / "summary.json").read_text())
            assert about["counts"]["completed"] == 6
            schedules.add(about["run"]["fingerprint"]["schedule"])
    assert len(schedules) == 1
    assert found["rounds"][1]["order"] == found["rounds"][0]["order"][::-1]
    if len(valid) == 2:
        assert code == 0
        arm = found["metrics"]["counts.completed"]["arms"]["chunked"]
        assert (arm["ratio"], arm["verdict"], arm["values"]) == (1.0, "same", [6.0, 6.0])
        assert found["drift"]["counts.completed"]["verdict"] == "same"
        assert found["verdict"] == {
            "outcome": "decided",
            "text": "Against static, chunked is the same on completed.",
        }
        assert "Against static, chunked is the same on completed." in out
        assert (folder / "report.html").exists()


def test_a_server_that_dies_ends_it_with_the_whole_rounds_kept(tmp_path):
    command = Command(tmp_path, *SMALL, "engines=[static,chunked]", "rounds=9", "aa=false", "limit=0.2")
    wait_for(lambda: command.rounds() >= 1, "a whole round", 2 * PATIENCE_S)
    servers = command.servers()
    assert len(servers) == 2
    os.kill(servers[0], signal.SIGKILL)
    code, out, err = command.finish()
    found = compared(results(out))
    assert code == 3
    assert found["ended"].startswith(("server_died: static: ", "static: the server was ended by SIGKILL"))
    assert len(found["rounds"]) >= 1
    assert all(gone(pid) for pid in servers)
    assert "Traceback" not in err


def test_ctrl_c_keeps_the_whole_rounds(tmp_path):
    command = Command(tmp_path, *SMALL, "engines=[static,chunked]", "rounds=9", "aa=false", "warmup=0")
    wait_for(lambda: command.rounds() >= 1, "a whole round", 2 * PATIENCE_S)
    servers = command.servers()
    command.process.send_signal(signal.SIGINT)
    code, out, err = command.finish()
    found = compared(results(out))
    assert (code, found["ended"]) == (3, "interrupted")
    assert len(found["rounds"]) >= 1
    assert "whole round" in err
    assert "Traceback" not in err
    assert all(gone(pid) for pid in servers)


def test_plan_and_mistakes_start_nothing(tmp_path):
    command = Command(tmp_path, *SMALL, "engines=[static,chunked]", "until=decided", "--dry-run")
    code, out, _ = command.finish()
    assert code == 0
    assert "5 to 15, until decided; 3 passes each" in out
    assert "time       about" in out
    code, _, err = Command(tmp_path, *SMALL, "engines=[static,chnked]").finish()
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean chunked" in err
    assert not command.output.exists()
