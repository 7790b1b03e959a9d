from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from engines.step_log import FLUSH_INTERVAL_NS, RequestRecord, StepLog, StepRecord, read_steps
from tests.support.engine_driver import Driver, config


def record(step: int, start_ns: int) -> StepRecord:
    values = {f.name: 0 for f in fields(StepRecord)}
    values |= {"step": step, "start_ns": start_ns, "host_gap_ns": None, "ids": [1, 2], "tokens": [5, 1]}
    return StepRecord(**{**values, "kind": [0, 1], "preempted": [], "blocked": None})


def test_what_an_engine_writes_is_what_is_read(tmp_path: Path) -> None:
    driver = Driver(config("continuous"), num_kv_blocks=6)
    log = StepLog(tmp_path)
    memory, driver.engine.recorder.log = driver.log, log
    for prompt_len, max_tokens in [(4, 6), (4, 6), (3, 2)]:
        driver.add(prompt_len, max_tokens, label={"run": "R", "id": f"r{prompt_len}", "attempt": 0})
    while driver.engine.has_work:
        driver.step()
    rows = read_steps(tmp_path / "steps.arrow")  # idle: everything is on file before close
    assert rows.num_rows == 7
    log.close()
    log.close()
    rows = read_steps(tmp_path / "steps.arrow")
    assert rows.column_names == [f.name for f in fields(StepRecord)]
    assert rows["step"].to_pylist() == list(range(7))
    assert rows["ids"].to_pylist()[-1] == [1]
    assert rows["kind"].to_pylist()[-1] == [2]
    assert rows["preemptions"].to_pylist() == [0, 0, 0, 0, 0, 1, 0]
    gaps = rows["host_gap_ns"].to_pylist()
    assert gaps[0] is None
    assert all(gap == 1_000_000 for gap in gaps[1:])  # the driver's clock moves 1 ms between iterations
    lines = [json.loads(line) for line in (tmp_path / "engine_requests.jsonl").read_text().splitlines()]
    assert [line["seq_id"] for line in lines] == [2, 0, 1]
    assert [line["id"] for line in lines] == ["r3", "r4", "r4"]
    assert list(lines[0]) == [f.name for f in fields(RequestRecord)]
    assert memory.steps == []


def test_rows_are_written_once_a_second(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    start = 5 * FLUSH_INTERVAL_NS
    for i in range(25):
        log.step(record(i, start + i * FLUSH_INTERVAL_NS // 10))
    assert read_steps(tmp_path / "steps.arrow").num_rows == 21  # at 0.0, 1.0 and 2.0 s
    log.close()
    assert read_steps(tmp_path / "steps.arrow").num_rows == 25


def test_a_stream_that_was_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for i in range(4):
        log.step(record(i, i))
        log.flush()
    log.close()
    whole = (tmp_path / "steps.arrow").read_bytes()
    cut = tmp_path / "cut.arrow"
    found = []
    for size in [*range(0, len(whole), 97), len(whole)]:
        cut.write_bytes(whole[:size])
        rows = read_steps(cut)
        assert rows["step"].to_pylist() == list(range(rows.num_rows))
        found.append(rows.num_rows)
    assert found == sorted(found)
    assert set(found) == {0, 1, 2, 3, 4}


def test_columns_are_those_of_the_contract() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    for name in [f.name for f in fields(StepRecord)] + [f.name for f in fields(RequestRecord)]:
        assert name in text, f"{name} is not in docs/architecture.md"


def test_it_survives_kill_9(tmp_path: Path) -> None:
    script = """
        import sys, time
        from tests.engines.test_step_log import record
        from engines.step_log import FLUSH_INTERVAL_NS, RequestRecord, StepLog
        log = StepLog(sys.argv[1])
        log.request(RequestRecord(0, "R", "r0", 0, "", "", 0, 3, 4, 100))
        log.step(record(0, FLUSH_INTERVAL_NS))
        print("written", flush=True)
        time.sleep(60)
    """
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert read_steps(tmp_path / "steps.arrow")["step"].to_pylist() == [0]
    (line,) = (tmp_path / "engine_requests.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "r0"


def test_a_disk_that_fills_up_is_an_error_and_not_a_shorter_file(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from tests.engines.test_step_log import record
        from engines.step_log import RequestRecord, StepLog
        log = StepLog(sys.argv[1])
        log.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
        for number in range(40):
            log.request(RequestRecord(number, "R", "r0", 0, "", "", 0, 3, 4, 100))
        try:
            log.flush()
        except OSError as error:
            print("refused")
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "refused\n", done.stderr
    assert (tmp_path / "engine_requests.jsonl").stat().st_size == 2500


def test_two_logs_do_not_share_a_folder(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.step(record(0, 0))
    with pytest.raises(FileExistsError):
        StepLog(tmp_path)
    log.close()
    assert read_steps(tmp_path / "steps.arrow")["step"].to_pylist() == [0]
