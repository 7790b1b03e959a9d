"""Server and engine are two processes with one life: what ends the one ends the other, and is told."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.harness_command import gone
from tests.support.server_command import PATIENCE_S, process, rest_of, streaming

pytestmark = pytest.mark.e2e


def test_the_end_of_the_parent_ends_the_server_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    with (
        process(
            "+engine=continuous", "server.port=0", "--records", str(tmp_path), "--exit-with-stdin"
        ) as started,
        streaming(started) as (ready, _),
    ):
        began = time.monotonic()
        code, said = started.end()
        assert time.monotonic() - began < 10  # by itself it would take far longer
        assert (code, said) == (0, "")
        assert gone(ready["engine_pid"])
    assert (tmp_path / "steps.arrow").stat().st_size > 0


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("raise RuntimeError('no torch today')", "RuntimeError: no torch today"),
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL"),
        ("import os; os._exit(5)", "its process ended with code 5"),
    ],
)
def test_an_engine_that_fails_to_start_is_told_by_the_last_line(
    tmp_path: Path, torch: str, reason: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    with process(env={"PYTHONPATH": str(tmp_path)}) as started:
        code = started.popen.wait(PATIENCE_S)
        _, said = started.end()
        assert code == 1
        assert said.splitlines()[-1] == f"the engine has stopped: {reason}"
        assert ("Traceback" in said) == reason.startswith("RuntimeError")


def test_an_engine_that_is_killed_ends_the_answers_and_the_server(tmp_path: Path) -> None:
    with (
        process("+engine=continuous", "--records", str(tmp_path)) as started,
        streaming(started) as (ready, client),
    ):
        os.kill(ready["engine_pid"], signal.SIGKILL)
        rest = rest_of(client)
        assert b'data: {"error":' in rest
        assert b"ended by SIGKILL" in rest
        assert b"[DONE]" not in rest
        assert started.popen.wait(PATIENCE_S) == 1
        reason = "the engine has stopped: its process was ended by SIGKILL"
        assert started.end() == (1, reason + "\n")


def test_an_engine_does_not_outlive_its_server(tmp_path: Path) -> None:
    with (
        process("+engine=continuous", "--records", str(tmp_path)) as started,
        streaming(started) as (ready, _),
    ):
        os.kill(ready["pid"], signal.SIGKILL)
        assert gone(ready["engine_pid"])


def test_an_end_in_the_middle_of_answers_puts_them_on_record(tmp_path: Path) -> None:
    with process("+engine=continuous", "--records", str(tmp_path)) as started, streaming(started):
        started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait(PATIENCE_S) == 0
    (line,) = (tmp_path / "engine_requests.jsonl").read_text().splitlines()
    assert json.loads(line)["finish_reason"] == "abort"
    end = json.loads((tmp_path / "engine_end.json").read_text())
    assert [end[name] for name in ("running", "waiting", "kv_live", "integrity")] == [0, 0, 0, "ok"]


def test_records_that_cannot_be_finished_are_said_and_are_no_success(tmp_path: Path) -> None:
    """What the engine fails at after its last report reaches the server too."""
    with (
        process("+engine=continuous", "--records", str(tmp_path)) as started,
        streaming(started) as (ready, client),
    ):
        resource.prlimit(ready["engine_pid"], resource.RLIMIT_FSIZE, (1, 1))
        started.popen.send_signal(signal.SIGTERM)
        rest_of(client)
        code = started.popen.wait(PATIENCE_S)
        _, said = started.end()
        assert code == 1
        assert "File too large" in said.splitlines()[-1]


def test_an_engine_that_is_killed_while_the_server_ends_is_no_success(tmp_path: Path) -> None:
    """Nobody else would say that the last second of the records is missing."""
    with (
        process("+engine=continuous", "--records", str(tmp_path)) as started,
        streaming(started) as (ready, client),
    ):
        os.kill(ready["engine_pid"], signal.SIGSTOP)
        started.popen.send_signal(signal.SIGTERM)
        assert b"the server is going" in rest_of(client)
        os.kill(ready["engine_pid"], signal.SIGKILL)
        assert started.popen.wait(PATIENCE_S) == 1
        assert started.end() == (1, "the engine has stopped: its process was ended by SIGKILL\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_both_with_whole_records(
    tmp_path: Path, number: signal.Signals
) -> None:
    with (
        process("+engine=continuous", "--records", str(tmp_path), start_new_session=True) as started,
        streaming(started) as (ready, client),
    ):
        assert os.getpgid(ready["engine_pid"]) == started.popen.pid
        os.killpg(started.popen.pid, number)
        assert b"the server is going" in rest_of(client)
        assert started.popen.wait(PATIENCE_S) == 0
        assert started.end() == (0, "")
        assert gone(ready["engine_pid"])
    with pa.ipc.open_stream(tmp_path / "steps.arrow") as reader:
        assert reader.read_all().num_rows > 0
    assert (tmp_path / "steps.arrow").read_bytes().endswith(b"\xff\xff\xff\xff\0\0\0\0")  # closed
    lines = [json.loads(line) for line in (tmp_path / "engine_requests.jsonl").read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["abort"]
