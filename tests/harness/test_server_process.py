"""The child process, with small programs in the server's place: ready, failing, never left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from harness import server_process
from harness.server_process import ServerError, ServerProcess

READY = """
import json, sys
print("a library's greeting", flush=True)
print(json.dumps({"event": "ready", "port": 1, "argv": sys.argv[1:]}), flush=True)
"""
UNTIL_STDIN_CLOSES = READY + "sys.stdin.read()\n"
DEAF = READY + "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n"
START_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=sys.stderr, flush=True)
"""
REFUSE = """
import json, sys
print(json.dumps({"event": "error", "message": "server.port=1 is in use"}))
sys.exit(2)
"""
TALK = "print('x' * 1_000_000, flush=True)\nsys.stderr.write('done')\nsys.stdin.read()\n"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(program, **options) -> ServerProcess; ended when the test ends."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []

    def make(program, **options):
        (tmp_path / "fake_server.py").write_text(program)
        process = ServerProcess(
            tmp_path / "config.yaml", tmp_path, tmp_path / "server.log", module="fake_server", **options
        )
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()
        process.stop()


def gone(pid, seconds=20.0):
    """Whether the process ends within that time (a zombie has ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_ready_line_is_found_among_other_output_and_stop_closes_stdin(start, tmp_path):
    process = start(UNTIL_STDIN_CLOSES)
    ready = process.wait_ready(30)
    assert ready["port"] == 1
    assert ready["argv"] == [
        *("--config", str(tmp_path / "config.yaml")),
        *("--records", str(tmp_path)),
        "--exit-with-stdin",
    ]
    assert process.returncode is None
    assert not process.ended_within(0)
    assert process.stop() == 0
    assert process.stop() == 0  # twice does no harm
    assert gone(process.pid)


def test_its_own_error_line_is_passed_on(start):
    with pytest.raises(ServerError, match=r"^server\.port=1 is in use$") as caught:
        start(REFUSE).wait_ready(30)
    assert caught.value.refused


def test_a_crash_before_ready_tells_the_last_line_and_the_log(start, tmp_path):
    with pytest.raises(ServerError, match="ended with code 1: ValueError: no such model") as caught:
        start("raise ValueError('no such model')").wait_ready(30)
    assert not caught.value.refused
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "server.log") in str(caught.value)


def test_a_kill_before_ready_names_the_signal(start):
    with pytest.raises(ServerError, match="ended by SIGKILL"):
        start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)").wait_ready(30)


def test_not_ready_in_time_is_said(start):
    with pytest.raises(ServerError, match="not ready after"):
        start("import time\ntime.sleep(600)").wait_ready(0.2)


def test_what_else_goes_wrong_ends_the_waiting(start, monkeypatch):
    monkeypatch.setattr(server_process, "TICK_S", 0.05)

    def meanwhile():
        raise RuntimeError("something else")

    process = start("import time\ntime.sleep(600)")
    with pytest.raises(RuntimeError, match="something else"):
        process.wait_ready(60, meanwhile=meanwhile)
    process.kill()


def test_a_deaf_process_is_killed(start, monkeypatch):
    monkeypatch.setattr(server_process, "TERM_PATIENCE_S", 0.1)
    process = start(DEAF)
    process.wait_ready(30)
    assert process.stop(timeout_s=0.1) == -signal.SIGKILL
    assert process.describe_end() == "did not end when it was asked to, and was killed"
    assert gone(process.pid)


def test_death_is_told_once_and_its_last_words_kept(start):
    told = []
    heard = threading.Event()

    def on_exit(code):
        told.append((code, process.describe_end()))
        heard.set()

    process = start(UNTIL_STDIN_CLOSES, on_exit=on_exit)
    process.wait_ready(30)
    os.kill(process.pid, signal.SIGKILL)
    assert heard.wait(20)
    assert process.ended_within(0)
    process.stop()
    assert told == [(-signal.SIGKILL, "was ended by SIGKILL")]


def test_a_stop_that_we_asked_for_is_not_told(start):
    told = []
    process = start(UNTIL_STDIN_CLOSES, on_exit=told.append)
    process.wait_ready(30)
    process.stop()
    assert told == []


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_what_the_server_started_ends_with_it(start, how):
    process = start(START_CHILD + UNTIL_STDIN_CLOSES)
    process.wait_ready(30)
    child = int(process.last_words())
    assert psutil.pid_exists(child)
    if how is None:
        process.stop()
    else:
        os.kill(process.pid, how)
    assert gone(child)


PARENT = """
import sys
from pathlib import Path
from harness.server_process import ServerProcess
folder = Path(sys.argv[1])
process = ServerProcess(folder / "c", folder, folder / "server.log", module="fake_server")
process.wait_ready(30)
print(process.pid, flush=True)
import time
time.sleep(600)
"""


def test_it_ends_when_we_are_killed(tmp_path):
    (tmp_path / "fake_server.py").write_text(UNTIL_STDIN_CLOSES)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd()))}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    with parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    assert gone(pid)


def test_output_after_ready_never_blocks_the_server(start):
    process = start(
        READY + "print('x' * 1_000_000, flush=True)\nsys.stderr.write('done')\nsys.stdin.read()\n"
    )
    process.wait_ready(30)
    deadline = time.monotonic() + 20
    while process.last_words() != "done" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.last_words() == "done"
    assert json.dumps(process.stop()) == "0"
