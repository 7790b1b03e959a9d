import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

from harness.host import HostLock, clock_pair, digest, facts, fingerprint


def test_facts_are_about_this_machine():
    host = facts()
    assert host["cores"] == len(os.sched_getaffinity(0))
    assert host["memory_gb"] > 0
    assert host["python"] == sys.version.split()[0]
    assert host["packages"]["numpy"]
    json.dumps(host)


def test_clock_pair_lies_between_readings_around_it():
    before = time.monotonic_ns(), time.time_ns()
    pair = clock_pair()
    after = time.monotonic_ns(), time.time_ns()
    assert before[0] <= pair[0] <= after[0]
    assert before[1] <= pair[1] <= after[1]


def _fingerprint(config, server=None, host=None):
    return fingerprint(
        schedule_sha256="s",
        config=config,
        host=host or {"cpu": "a", "cores": 2},
        server=server or {"device": "cpu"},
    )


def test_fingerprint_changes_with_what_is_measured_and_with_nothing_else():
    config = {
        "seed": 0,
        "engine": {"name": "static"},
        "output": {"dir": "a"},
        "server": {"port": 0},
        "dry_run": False,
    }
    same = {**config, "output": {"dir": "b"}, "server": {"port": 8000}}
    assert _fingerprint(config) == _fingerprint(same)
    assert _fingerprint(config)["config"] != _fingerprint({**config, "seed": 1})["config"]
    assert _fingerprint(config)["device"] != _fingerprint(config, server={"device": "cuda"})["device"]
    assert (
        _fingerprint(config, server={"pid": 1})["device"] == _fingerprint(config, server={"pid": 2})["device"]
    )
    assert _fingerprint(config)["host"] != _fingerprint(config, host={"cpu": "a", "cores": 4})["host"]


def test_digest_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})


HOLD = """
import sys, time
from pathlib import Path
from harness.host import HostLock
lock = HostLock(Path(sys.argv[1]))
lock.acquire(lambda message: print(message, flush=True))
print("held", flush=True)
time.sleep(60)
"""


def _holder(path):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )


def test_a_second_run_waits_is_told_for_whom_and_goes_on_when_the_first_is_killed(tmp_path):
    path = tmp_path / "lock"
    first = _holder(path)
    second = None
    try:
        assert first.stdout.readline() == "held\n"
        second = _holder(path)
        assert f"process {first.pid}" in second.stdout.readline()
        assert second.poll() is None
        first.send_signal(signal.SIGKILL)
        assert second.stdout.readline() == "held\n"
    finally:
        for child in filter(None, (first, second)):
            child.kill()
            child.communicate()


def test_a_released_lock_is_free_and_names_nobody(tmp_path):
    path = tmp_path / "lock"
    waited = []
    for _ in range(2):
        with HostLock(path) as lock:
            lock.acquire(waited.append)
            assert str(os.getpid()) in path.read_text()
    assert waited == []
    assert path.read_text() == ""


def test_a_lock_whose_holder_has_not_written_its_name_yet_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)  # held, and still empty
    threading.Timer(0.1, lambda: os.pwrite(fd, b"the run of process 77", 0)).start()
    said: list[str] = []

    def on_wait(line: str) -> None:
        said.append(line)
        os.close(fd)  # which frees it

    lock = HostLock(path)
    lock.acquire(on_wait)
    lock.release()
    assert len(said) == 1
    assert "the run of process 77" in said[0]
