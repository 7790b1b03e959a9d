"""What a run says before it sends anything, the names of its folders, and its exit codes."""

import os
import signal
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cli import INCONCLUSIVE, INVALID, PASS, REGRESSION
from harness.conf import UsageError, compose
from harness.loadgen import LoadSettings
from harness.plan import check_lengths, describe, draw_schedule, pool_tokens
from harness.run import exit_code, new_run_dir
from harness.sweep import changed
from harness.target import load_processes, load_settings, warm_up_requests
from workloads.schedule import Schedule, ScheduledRequest, Segment


def schedule(*lengths, scale=1.0):
    """Requests of (prompt, max_tokens)."""
    rows = tuple(
        ScheduledRequest(
            id=f"r{i}",
            arrival_s=float(i),
            segments=(Segment("s", prompt),),
            prompt_tokens=prompt,
            max_tokens=answer,
            stop_after=answer,
        )
        for i, (prompt, answer) in enumerate(lengths)
    )
    return Schedule(requests=rows, name="made", seed=0, length_scale=scale, planned_rate=1.0)


def test_no_warning_when_everything_fits_or_the_limit_is_unknown():
    assert check_lengths(schedule((90, 10), (1, 1)), 100) is None
    assert check_lengths(schedule((9000, 10)), None) is None
    assert check_lengths(schedule((90, 10)), 100, pool_tokens(11, 10)) is None


def test_the_warning_counts_and_names_what_would_work():
    small_pool = check_lengths(schedule((90, 11), (50, 5)), 200, pool_tokens(11, 10))
    assert small_pool is not None
    assert "1 of 2 requests pass the 100 tokens of the KV pool (engine.num_kv_blocks)" in small_pool
    message = check_lengths(schedule((90, 11), (300, 100), (5, 5)), 100)
    assert "2 of 3" in message
    assert "engine.max_model_len=400" in message
    assert "workload.length_scale=0.25" in message
    assert "\n" not in message


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 900)), min_size=1, max_size=9),
    st.integers(10, 5000),
    st.floats(0.01, 4),
)
def test_the_suggested_scale_fits(lengths, limit, scale):
    message = check_lengths(schedule(*lengths, scale=scale), limit)
    longest = max(p + a for p, a in lengths)
    assert (message is None) == (longest <= limit)
    if message is not None:
        suggested = float(message.split("workload.length_scale=")[1].split(" ")[0])
        assert suggested > 0
        assert longest * suggested / scale <= limit * (1 + 1e-6)


def test_the_plan_gives_the_totals_of_the_schedule():
    cfg = compose(["experiment=smoke", "engine=chunked"])
    drawn = draw_schedule(cfg)
    text = describe(cfg, drawn)
    assert f"{sum(r.prompt_tokens for r in drawn)} prompt tokens" in text
    assert f"{sum(r.stop_after for r in drawn)} answer tokens" in text
    assert f"({sum(r.max_tokens for r in drawn)} declared)" in text
    assert f"for {drawn.requests[-1].arrival_s:.1f} s" in text
    closed = compose(["experiment=smoke", "load=closed", "load.concurrency=3", "load.requests=5"])
    assert "closed loop of 3 clients" in describe(closed, draw_schedule(closed))


def test_the_schedule_depends_on_the_traffic_and_the_seed_alone():
    base = ["experiment=smoke"]
    sha = draw_schedule(compose(base)).sha256()
    for other in ("engine=static", "load=closed", "model=smollm2", "slo.ttft_ms=1", "dtype=float32"):
        assert draw_schedule(compose([*base, other, "load.requests=12"])).sha256() == sha
    for other in ("seed=1", "load.requests=11", "workload.rate=9", "workload.length_scale=0.1"):
        assert draw_schedule(compose([*base, other])).sha256() != sha


def test_every_load_setting_reaches_the_load():
    given = {
        "timeout_s": 7,
        "concurrency": 3,
        "max_wait_s": 1.5,
        "retries": 2,
        "retry_backoff_s": 0.25,
        "backend": "aiohttp",
        "processes": 2,
        "trust_env": True,
    }
    cfg = compose([f"load.{name}={value}" for name, value in given.items()])
    settings = load_settings(cfg, "run")
    assert {name: getattr(settings, name) for name in given} == given
    assert (settings.run_id, settings.kind, settings.ramp_s) == ("run", "open", None)
    closed = load_settings(compose(["load=closed", "load.ramp_s=2", "load.duration_s=9"]), "run")
    assert (closed.kind, closed.concurrency, closed.ramp_s, closed.duration_s) == ("closed", 8, 2, 9)
    drawn = load_settings(compose(["load.duration_s=9", "output.text=true"]), "run")
    assert (drawn.duration_s, drawn.keep_text) == (None, True)
    for kind in ("open", "closed"):
        known = {f.name for f in fields(LoadSettings)}
        # utilization has become workload.rate by then (harness.capacity.utilization)
        assert set(compose([f"load={kind}"]).load) - {"utilization"} <= known


def test_processes_are_as_many_as_the_plan_needs_and_the_host_has(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16), raising=False)
    rows = schedule(*[(1, 100)] * 3000).requests
    fast = [replace(row, arrival_s=i / 1250) for i, row in enumerate(rows)]  # 125,000 tokens/s
    foreign = ["engine=openai", "engine.base_url=http://10.0.0.1:8000"]
    assert load_processes(compose(foreign), rows) == 1
    assert load_processes(compose(foreign), fast) == 4
    assert load_processes(compose([*foreign, "load.processes=3"]), rows) == 3
    assert load_processes(compose(["engine.threads=4"]), fast) == 4
    assert load_processes(compose([]), fast, {"device": "cpu", "threads": 14}) == 2
    assert load_processes(compose([]), fast) == 1  # the engine gets all cores but one
    assert load_processes(compose(["device=cuda"]), fast, {"device": "cuda"}) == 4
    assert load_processes(compose(["load.processes=9"]), fast, {"device": "cpu", "threads": 14}) == 9


@given(st.none() | st.integers(1, 10_000))
def test_the_warm_up_is_small_and_fits(max_model_len):
    warm_up = warm_up_requests(max_model_len)
    assert len(warm_up) == 3
    for request in warm_up:
        assert request.prompt_tokens + request.max_tokens <= max(2, (max_model_len or 4096) // 4)
        assert request.prompt_tokens <= 256


def test_run_folders_are_named_by_what_runs_and_never_shared(tmp_path):
    cfg = compose(["workload=chat", "engine=static", f"output.dir={tmp_path}"])
    folders = {new_run_dir(cfg) for _ in range(20)}
    assert len(folders) == 20
    assert all(folder.is_dir() and "chat-static-tiny" in folder.name for folder in folders)


def test_an_output_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"^output\.dir=[^\n]+$"):
            new_run_dir(compose([f"output.dir={bad}"]))


@pytest.mark.parametrize(
    ("enforce", "valid", "attained", "code"),
    [
        (False, True, 0.1, PASS),
        (True, True, 0.995, PASS),
        (True, True, 0.5, REGRESSION),
        (True, True, None, INCONCLUSIVE),
        (True, False, 0.5, INVALID),
        (False, False, None, INVALID),
    ],
)
def test_exit_codes(enforce, valid, attained, code, capsys):
    cfg = compose([f"slo.enforce={enforce}"])
    summary = {
        "valid": valid,
        "invalid_reasons": [] if valid else ["no request completed"],
        "throughput": {"slo_attainment": attained},
    }
    assert exit_code(cfg, summary) == code
    assert ("slo: " in capsys.readouterr().err) == (code in (REGRESSION, INCONCLUSIVE))


def test_a_sweep_names_what_differs():
    assert changed([["a=1", "b=1", "c=1"], ["a=1", "b=2", "c=1"]]) == [["b=1"], ["b=2"]]
    assert changed([["a=1"]]) == [[]]


INTERRUPTED = """
import os, signal, sys, time
from harness.interrupt import Interruption
with Interruption() as interruption:
    if sys.argv[1] == "ready":
        interruption.on_signal = lambda: print("first", flush=True)
        interruption.at_once = lambda: print("second", flush=True)
    try:
        print("up", flush=True)
        for _ in range(600):
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("raised", flush=True)
"""


def _interrupted(mode):
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, mode], stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout.readline() == "up\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_leaves(number):
    with _interrupted("ready") as child:
        child.send_signal(number)
        assert child.stdout.readline() == "first\n"
        child.send_signal(number)
        assert child.stdout.readline() == "second\n"
        assert child.wait(30) == 130


def test_a_signal_before_anything_is_measured_raises():
    with _interrupted("early") as child:
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "raised\n"
        assert child.wait(30) == 0
