from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from harness.watchdog import Watchdog

PATIENCE_S = 20.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_a_process_that_stays_stopped_is_told_of_once(sleeper: subprocess.Popen[bytes]) -> None:
    told: queue.Queue[str] = queue.Queue()
    with Watchdog([os.getpid(), sleeper.pid], told.put, patience_s=0.05):
        os.kill(sleeper.pid, signal.SIGSTOP)
        assert told.get(timeout=PATIENCE_S).startswith(f"process {sleeper.pid} has been stopped (SIGSTOP)")
    assert told.empty()


def test_one_that_goes_on_or_ends_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    """It is looked at several times while another one, stopped all the time, comes to be told of."""
    told: queue.Queue[str] = queue.Queue()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        sleeper.kill()
        with Watchdog([os.getpid(), sleeper.pid, stopped.pid], told.put, patience_s=0.1):
            assert f"process {stopped.pid} " in told.get(timeout=PATIENCE_S)
        stopped.kill()
