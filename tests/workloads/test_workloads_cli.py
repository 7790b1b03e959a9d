from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.workload_configs import PRESETS, workload_file
from workloads.__main__ import main
from workloads.schedule import Schedule


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv"
    rows = [f"2024-05-12 00:00:{i:02d}.{i * i:04d},{100 + i},{10 + i % 7}" for i in range(30)]
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def run(capsys, *argv):
    code = main([str(a) for a in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", PRESETS)
def test_show_prints_the_schedule_that_a_run_would_draw(capsys, tmp_path, name):
    out_file = tmp_path / "schedule.parquet"
    code, out, err = run(capsys, "show", name, "--requests", 60, "--seed", 4, "--out", out_file)
    assert (code, err) == (0, "")
    schedule = Schedule.from_parquet(out_file)
    assert len(schedule) == 60
    assert schedule.sha256() in out
    for word in ("planned rate", "CV of gaps", "prompt_tokens", "stop_after", "p99", "none"):
        assert word in out


def test_show_takes_settings(capsys):
    _, plain, _ = run(capsys, "show", "rag")
    code, out, _ = run(capsys, "show", "rag", "workload.rate=8", "length_scale=1", "arrivals.kind=poisson")
    assert code == 0
    rate = re.search(r"planned rate\W+([\d.]+) /s", out)
    assert rate is not None
    assert float(rate[1]) == pytest.approx(8, rel=0.2), "of the 200 requests that were drawn"
    assert out != plain


def test_show_a_ramp(capsys):
    code, out, _ = run(capsys, "show", "rag", "rate={kind: ramp, from: 2, to: 10, over_s: 60}")
    assert code == 0
    rate = re.search(r"planned rate\W+([\d.]+) /s", out)
    assert rate is not None
    assert float(rate[1]) == pytest.approx(6, rel=0.15)


def test_show_a_trace(capsys, azure):
    code, out, _ = run(capsys, "show", "trace", f"path={azure}", "input.cap=110")
    assert code == 0
    assert "note: 19 of 30 prompts cut to workload.input.cap=110 tokens" in out


def test_fit_prints_what_it_found_and_what_it_did_not(capsys, azure):
    code, out, _ = run(capsys, "fit", azure)
    assert code == 0
    for words in ("30 rows", "output tokens", "kind and cv of gaps", "not captured: sessions"):
        assert words in out


def test_convert_to_standard_output_and_to_a_file(capsys, azure, tmp_path):
    code, out, err = run(capsys, "convert", azure, "--to", "mooncake", "--limit", 2)
    assert code == 0
    assert [line.split()[0] for line in err.splitlines()] == ["vLLM", "AIPerf", "SGLang", "GuideLLM"]
    assert out.splitlines() == [
        '{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [0]}',
        '{"timestamp": 1000.1, "input_length": 101, "output_length": 11, "hash_ids": [1]}',
    ]
    assert run(capsys, "convert", azure, "--to", "mooncake", "--out", tmp_path / "m.jsonl")[0] == 0
    code, out, err = run(capsys, "convert", tmp_path / "m.jsonl", "--to", "azure")
    assert code == 0
    assert out.splitlines()[2] == "1970-01-01 00:00:01.0001000,101,11"
    assert "what prompts shared is lost" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("show", "rog"), "workload=rog: choose from agent, batch, chat, code, mixed, rag, reasoning"),
        (("show", "rag", "rat=3"), "workload.rat is not a setting of rag"),
        (("show", "rag", "rate"), "workload=rate: choose from"),
        (("show", "rag", "rate=-2"), "workload.rate=-2"),
        (("show", "rag", "rate={kind: ramp, from: 2, to: 0, over_s: 9}"), "workload.rate.to=0"),
        (("show", "trace"), "workload.path=null"),
        (("show", "rag", "--seed", "-1"), "seed=-1"),
        (("show", "rag", "--out", "/dev/null/x.parquet"), "--out=/dev/null/x.parquet: cannot be written"),
        (("fit", "/nowhere/trace.csv"), "/nowhere/trace.csv: no such file"),
        (("fit", "/nowhere/trace.csv", "--limit", "0"), "--limit=0"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "setting", ["rate={", "rate=${nope}", "classes=[1]", "rate.x.y=1", "=5", r"rate=\\${x}"]
)
def test_a_setting_that_cannot_be_read_is_one_line_that_names_it(capsys, setting):
    code, out, err = run(capsys, "show", "rag", setting)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert setting.split("=")[0].split(".")[0] in err


def test_a_reader_that_has_gone_is_no_failure():
    command = [sys.executable, "-m", "workloads", "show", "rag"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, b"Traceback" in said) == (0, False)


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from workloads.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "heavy = {'numpy', 'scipy', 'pandas', 'pyarrow', 'rich', 'omegaconf', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    for command in ("show", "fit", "convert"):
        assert command in out.stdout


def test_drawing_needs_no_torch():
    code = (
        "import sys, yaml; from workloads import draw\n"
        f"draw(yaml.safe_load(open({workload_file('rag')!r})), seed=0, requests=3)\n"
        "assert not {'torch', 'engines', 'harness.loadgen'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
