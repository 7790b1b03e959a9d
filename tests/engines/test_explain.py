"""`python -m engines.explain`: a request's life in words, from runs whose truth is known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.explain import main
from tests.harness.test_attribution import drive, long_prompt_stalls_two
from tests.support.engine_driver import SCHEDULERS
from tests.support.run_factory import steady_requests, write_run


def told(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    assert main([str(arg) for arg in args]) == 0
    return capsys.readouterr().out


def test_a_stall_and_whose_prompt_caused_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, long_prompt_stalls_two(tmp_path), "r000000")
    stall = next(line for line in text.splitlines() if "STALL" in line)
    assert "before chunk 4 of 5" in stall
    assert "310.0" in stall
    assert stall.endswith("step 3, prompts of r000002 (rag) 900 tokens")
    assert re.search(r"stalled by others' prefill +325 ms +79\.1 %", text)
    assert "prompt: 50 tokens, step 0, with prompts of r000001 (chat) 50 tokens" in text
    assert "left out of step 4" in text


def test_the_whole_timeline_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, long_prompt_stalls_two(tmp_path), "r000002").splitlines()
    body = [line for line in lines if re.match(r" *-?\d+\.\d ", line)]
    times = [float(line.split()[0]) for line in body]
    assert times == sorted(times)
    words = [
        "due",
        "sent",
        "in the engine",
        "waits",
        "prompt: 900",
        "client: first token",
        "client: last token",
    ]
    places = [next(i for i, line in enumerate(body) if word in line) for word in words]
    assert places == sorted(places)


def test_the_slowest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = long_prompt_stalls_two(tmp_path)
    assert told(capsys, run, "--slowest", "ttft").startswith("r000002")
    assert told(capsys, run, "--slowest", "stall").startswith("r000000")
    assert len(re.findall(r"^E2E", told(capsys, run, "--slowest", "e2e", "2"), re.M)) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["r00001"], "has no request 'r00001'; near it: r0000"),
        ([], "no request named"),
        (["--slowest", "tpot"], "--slowest tpot: needs ttft, e2e or stall"),
        (["--slowest", "e2e", "0"], "--slowest e2e 0: needs"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert main([str(long_prompt_stalls_two(tmp_path)), *args]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "r000000"]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_a_server_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, write_run(tmp_path, steady_requests()), "r000003")
    assert "client: first token" in text
    assert "no engine records" in text


def test_with_lanes_it_says_what_is_approximate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = drive(tmp_path, "chunked", lanes={"chat": {"weight": 2.0}})
    assert "engine.lanes" not in told(capsys, run, "r000001")  # its configuration is not there
    (run / "config.yaml").write_text("engine: {lanes: {chat: {weight: 2.0}}}")
    assert "\nengine.lanes=chat: what the queue waited for is what held" in told(capsys, run, "r000001")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_strategy_can_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheduler: str
) -> None:
    run = drive(tmp_path, scheduler, **({"policy": {"slice_tokens": 2}} if scheduler == "sliced" else {}))
    text = told(capsys, run, *(f"r{i:06d}" for i in range(12)))
    assert text.count("\nE2E ") == 12
    assert text.count("first token in the engine") == 12
    assert "sequence" in text
    assert ("its batch goes on" in text) == (scheduler in ("static", "dynamic", "sliced"))
    assert ("its slice is over" in text) == (scheduler == "sliced")


def test_it_loads_no_torch(tmp_path: Path) -> None:
    run = long_prompt_stalls_two(tmp_path)
    code = "import sys, harness.explain as e; e.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(run), "r000000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = [sys.executable, "-m", "engines.explain", str(run), "r000000"]
    assert subprocess.run(named, capture_output=True, text=True).stdout == done.stdout
