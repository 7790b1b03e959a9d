"""`make gpu-check` itself: every stage of it runs here on the CPU, at a tiny size."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engines.gpu_check import Result, Stage, main, read, run_stage, stages, step_checks
from engines.gpu_stages import cases, relative_error
from kernels.reference import TorchBackend


def test_without_cuda_it_says_so_and_ends_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["-o", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.startswith("gpu-check: torch sees no CUDA device here")
    assert not (tmp_path / "out.json").exists()


def test_an_interrupted_stage_is_ended(tmp_path: Path) -> None:
    """A stage has a session of its own: nobody else would end it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    stage = f"import time; held = open({str(fifo)!r}, 'w', 1); print('begun', file=held); time.sleep(300)"
    script = (
        "import sys; from engines.gpu_check import Stage, run_stage; from kernels.command import guard; "
        f"stage = Stage('x', 200, [sys.executable, '-c', {stage!r}], 'checks'); "
        "sys.exit(guard(lambda: run_stage(stage)))"
    )
    with (
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process,
        open(fifo) as held,
    ):
        assert held.readline() == "begun\n"
        process.terminate()
        assert process.communicate(timeout=60)[1] == "interrupted: nothing is reported\n"
        readable, _, _ = select.select([held], [], [], 60)
        assert readable, "the stage still holds the pipe"
    assert process.returncode == 3


@pytest.mark.e2e
def test_the_script_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    """One of each kind of stage; --dry alone runs them all."""
    output = tmp_path / "deep" / "out.json"
    command = [sys.executable, "-m", "engines.gpu_check", "--dry", "--only", "loops", "chunked", "-o"]
    done = subprocess.run([*command, str(output)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert (report["passed"], report["dry"]) == (True, True)
    assert [stage["stage"] for stage in report["stages"]] == ["loops", "chunked"]
    loops, chunked = report["stages"]
    assert len(loops["checks"]) == 7
    assert all(check["ok"] for check in loops["checks"])
    assert chunked["detail"]["counts"]["completed"] > 0
    assert chunked["detail"]["server"]["graphs"]["on"] is False
    assert report["machine"]["torch"] == torch.__version__


def test_the_budgets_of_all_stages_are_under_8_minutes() -> None:
    found = stages("cuda", False, Path("m"), Path("r"))
    assert sum(stage.budget_s for stage in found) < 8 * 60
    names = ["kernels", "loops", "goals", "bench", "step", "static", "continuous", "chunked"]
    assert [stage.name for stage in found] == names


def test_a_stage_that_overruns_is_cut_with_all_that_it_has_started(tmp_path: Path) -> None:
    """The grandchild holds the output open: were it left alone, this would wait for its hour."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    result = run_stage(Stage("slow", 1.5, [sys.executable, "-c", code], "checks"))
    assert (result.status, result.why) == ("cut", "it was not over after 1.5 s")


def test_what_fails_is_told_apart_from_what_never_spoke() -> None:
    checks = Stage("x", 1, [], "checks")
    bad = json.dumps([{"what": "a", "value": 1.0, "goal": "0", "ok": False}])
    for output, code, status in ((bad, 0, "fail"), ("Traceback\nOSError: no", 1, "error"), ("[]", 3, "fail")):
        result = Result("x")
        read(checks, code, output, result)
        assert result.status == status
    wrong = Result("x")
    read(Stage("b", 1, [], "bench"), 0, '{"wrong": ["triton is off"]}', wrong)
    assert wrong.status == "fail"


def test_a_step_is_held_to_the_goal_on_cuda_with_graphs() -> None:
    rows = [{"batch": 1, "share_of_bound": 0.8}, {"batch": 8, "share_of_bound": 0.7}]
    on_cuda = step_checks({"device": "cuda", "rows": rows, "graphs": {"on": True}})
    assert [check["ok"] for check in on_cuda] == [True, False, True]
    assert all(check["ok"] for check in step_checks({"device": "cpu", "rows": rows}))
    unknown = step_checks({"device": "cuda", "rows": [{"batch": 1}], "graphs": {"on": False, "why": "x"}})
    assert not any(check["ok"] for check in unknown)


class Off(TorchBackend):
    """Its answers are a little wrong, or it writes where it must not."""

    def __init__(self, error: float, astray: bool = False) -> None:
        self._error, self._astray = error, astray

    def write_kv(self, k, v, k_cache, v_cache, slot) -> None:  # type: ignore[no-untyped-def]
        super().write_kv(k, v, k_cache, v_cache, slot.clamp(min=0) if self._astray else slot)

    def paged_attention(self, *args, **more) -> None:  # type: ignore[no-untyped-def]
        super().paged_attention(*args, **more)
        args[-1].mul_(1 + self._error)


def test_the_comparison_sees_errors() -> None:
    cpu = torch.device("cpu")
    for case in cases(dry=True):
        assert relative_error(Off(0.0), case, torch.float32, cpu) < 1e-6
        assert relative_error(Off(0.01), case, torch.float32, cpu) == pytest.approx(0.01, rel=0.01)
        astray = relative_error(Off(0.0, astray=True), case, torch.float32, cpu)
        assert astray != astray, "the null block was written"
