"""The command line: what it answers before anything is measured, and what every mistake looks like."""

import errno
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import harness
from engines.config import ConfigError
from harness import cli
from harness.cli import INVALID, PASS, SEVERITY, USAGE, guard, main, parse
from harness.conf import UsageError, choices
from harness.gate.command import main as gate
from harness.records import RecordsWriteError

ROOT = Path(__file__).resolve().parents[2]


def command(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "harness", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def test_help_names_every_choice_and_every_exit_code(capsys):
    assert main(["--help"]) == PASS
    text = capsys.readouterr().out
    for group in ("workload", "engine", "model", "load", "slo"):
        for name in choices(group):
            assert name in text
    for code in ("0 pass", "1 regression", "2 usage", "3 run invalid", "4 inconclusive"):
        assert code in text
    for name in (
        "--dry-run",
        "-m",
        "workload.length_scale",
        "engine.max_num_seqs",
        "harness.gate",
        "results:",
    ):
        assert name in text


def test_the_commands_that_help_names_exist():
    for name in cli.COMMANDS:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name


def test_help_loads_nothing_heavy():
    code = (
        "import sys, harness.cli; harness.cli.main(['--help']); "
        "heavy = {'hydra', 'omegaconf', 'pandas', 'numpy', 'pyarrow', 'aiohttp', 'torch', 'plotly', 'rich'}; "
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_version_is_that_of_the_project(capsys):
    assert main(["--version"]) == PASS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out.strip() == f"batchmark {harness.__version__}"
    assert harness.__version__ == project["version"]


def test_parse_takes_flags_anywhere():
    arguments = parse(["+engine=static", "-m", "seed=1", "--dry-run"])
    assert arguments.overrides == ["+engine=static", "seed=1"]
    assert arguments.multirun
    assert arguments.dry_run
    assert not arguments.help


def test_a_dry_run_prints_the_plan_and_leaves_nothing(capsys, tmp_path):
    out = tmp_path / "runs"
    assert main(["--dry-run", "+experiment=smoke", "+engine=chunked", f"output.dir={out}"]) == PASS
    text = capsys.readouterr().out
    for part in (
        "12 requests",
        "prompt tokens",
        "max_num_batched_tokens=512",
        "sha256",
        "length_scale=0.05",
        str(out),
    ):
        assert part in text
    assert not out.exists()


def test_a_dry_run_says_what_will_not_fit(capsys):
    assert main(["dry_run=true", "engine=chunked", "engine.max_model_len=300", "load.requests=50"]) == PASS
    text = capsys.readouterr().out
    assert "engine.max_model_len=300" in text
    assert "workload.length_scale=" in text


def test_a_dry_sweep_prints_every_plan(capsys):
    assert main(["-m", "--dry-run", "+experiment=smoke", "engine=static,chunked"]) == PASS
    out = capsys.readouterr().out
    assert "run 1 of 2: engine=static" in out
    assert "run 2 of 2: engine=chunked" in out
    sha = [line.split("sha256 ")[1] for line in out.splitlines() if "sha256 " in line]
    assert len(sha) == 2
    assert sha[0] == sha[1]


MISTAKES = {
    "engine": (["+engine=contnuous"], ["contnuous", "continuous", "chunked"]),
    "workload": (["+workload=rga"], ["rga", "rag", "trace"]),
    "key": (["engine.max_num_seq=8"], ["engine.max_num_seq", "engine.max_num_seqs"]),
    "syntax": (["engine.max_num_seqs=[8"], ["engine.max_num_seqs=[8"]),
    "option": (["--dryrun"], ["--dryrun", "--dry-run"]),
    "sweep without -m": (["engine=static,chunked"], ["-m"]),
    "sweep of nothing": (["-m", "seed=interval(0,1)"], ["seed=interval(0,1)"]),
    "mandatory": (["model=hf"], ["model.id"]),
    "engine type": (["engine.max_num_seqs=many"], ["engine.max_num_seqs", "whole number"]),
    "engine value": (["engine.max_num_seqs=0"], ["engine.max_num_seqs=0"]),
    "engine pair": (
        ["engine=continuous", "engine.max_num_batched_tokens=64"],
        ["engine.max_num_batched_tokens=64"],
    ),
    "rate": (["workload.rate=-1"], ["workload.rate", "-1"]),
    "rate nan": (["workload.rate=nan"], ["workload.rate", "nan"]),
    "scale": (["workload.length_scale=0"], ["workload.length_scale", "0"]),
    "trace": (["workload=trace", "workload.path=/nowhere/trace.csv"], ["/nowhere/trace.csv"]),
    "address": (["engine=openai", "engine.base_url=nonsense"], ["engine.base_url=nonsense"]),
    "key variable": (
        ["engine=openai", "engine.base_url=http://127.0.0.1:9", "engine.api_key_env=NOT_SET_ANYWHERE"],
        ["NOT_SET_ANYWHERE"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_exit_2_and_no_folder(name, capsys, tmp_path):
    args, parts = MISTAKES[name]
    dry = [] if "openai" in " ".join(args) else ["dry_run=true"]
    assert main([*args, *dry, f"output.dir={tmp_path / 'runs'}"]) == USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    for part in parts:
        assert part in captured.err
    assert not (tmp_path / "runs").exists()


def test_the_same_from_a_shell():
    done = command("+engine=contnuous")
    assert done.returncode == USAGE
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback_of_a_mistake(monkeypatch):
    monkeypatch.setenv("BATCHMARK_DEBUG", "1")
    with pytest.raises(UsageError):
        main(["+engine=contnuous"])


def test_guard_lets_a_bug_through_and_nothing_that_the_user_can_mend(capsys):
    def raising(error):
        def command():
            raise error

        return command

    assert guard(raising(ConfigError("engine.x=1:\n no"))) == USAGE
    assert capsys.readouterr().err == "error: engine.x=1: no\n"
    assert guard(raising(KeyboardInterrupt())) == INVALID
    assert guard(raising(RecordsWriteError(Path("x"), OSError(28, "No space left on device")))) == INVALID
    assert "No space left" in capsys.readouterr().err
    for bug in (ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug")):
        with pytest.raises(type(bug)):
            guard(raising(bug))


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m harness --help | head -1", shell=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.startswith("usage:")
    assert done.stderr == ""


def test_severity_orders_every_code_once():
    assert sorted(SEVERITY) == [0, 1, 2, 3, 4]


def test_an_error_of_the_system_names_the_file_and_no_number(tmp_path, capsys):
    def full() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "report.html"))

    assert guard(full) == 3
    assert capsys.readouterr().err == f"error: {tmp_path}/report.html: No space left on device\n"
    (tmp_path / "file").write_text("")
    assert gate(["--base-ref", "HEAD", "--", "+workload=rag", f"output.dir={tmp_path}/file"]) == 2
    message = f"error: output.dir={tmp_path}/file: cannot be written (Not a directory)\n"
    assert capsys.readouterr().err == message
