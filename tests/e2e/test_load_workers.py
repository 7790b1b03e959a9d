"""Load workers as processes: what they measure together, and that every end of any of them ends the load
soon, with a record for every request."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from harness.loadgen import LoadError, LoadSettings, Stop, Target, processes
from harness.loadgen.job import Job
from harness.loadgen.processes import LoadProcesses, WorkerError
from harness.records import (
    OUTCOMES,
    part_paths,
    read_run_file,
)
from harness.server_process import child_environment
from harness.tokenizer import ByteTokenizer
from tests.support.harness_command import gone, wait_for
from tests.support.load import check, every
from tests.support.script_process import ScriptProcess
from tests.support.script_server import Script, answer, plain

pytestmark = pytest.mark.e2e
SOON_S = 40.0
"""Every end takes less than 10 s; a machine under other loads may take longer to start a process."""
STREAM = answer(4, 0.01)
LASTING = Script([*answer(4, 0.01).steps[:4], plain(b": wait\n\n", 60.0)])
"""Answers that do not end while a test runs."""


@pytest.fixture(scope="module")
def server():
    with ScriptProcess() as process:
        yield process


class Loading:
    """A load of some workers in the background: what a test does to them happens meanwhile."""

    def __init__(self, folder: Path, url: str, plan, workers: int, **settings) -> None:
        self.folder, self.plan = folder, plan
        self.stop = Stop()
        self.load = LoadProcesses()
        job = Job(
            target=Target(url, "m", tokenizer=ByteTokenizer()),
            settings=LoadSettings(run_id="run", **settings),
            requests=plan,
            seed=0,
            log=folder / "requests.jsonl",
        )
        self.load.prepare(job, workers=workers)
        assert self.load.wait_ready() is None
        assert len(self.load.pids) == workers
        self.t0_ns = time.monotonic_ns() + 50_000_000
        self.frames: list[tuple[int, dict]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self.load.run(self.t0_ns, self.stop, lambda k, frame: self.frames.append((k, frame)))

    def wait_for_records(self, count: int) -> None:
        def written() -> int:
            paths = [*part_paths(self.folder), *self.folder.glob("requests.jsonl")]
            return sum(path.read_bytes().count(b'"type":"request"') for path in paths)

        wait_for(lambda: written() >= count, f"{count} records")

    def finish(self):
        """(result, last record by id), once the load has ended: everything that must hold however it did."""
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        pids = self.load.pids
        self.load.close()
        assert all(gone(pid) for pid in pids)
        assert [path.name for path in self.folder.iterdir()] == ["requests.jsonl"]
        file = read_run_file(self.folder)
        assert file.closed
        assert (file.run, file.t0_ns, file.dropped) == ("run", self.t0_ns, 0)
        last = {record.id: record for record in file.records if record.final}
        assert set(last) == {request.id for request in self.plan}
        assert len(last) == len(file.records) == self.result.scheduled
        counts = Counter(record.outcome for record in last.values())
        assert self.result.counts == {name: counts[name] for name in OUTCOMES}
        assert self.result.sent == sum(record.send_ns is not None for record in last.values())
        for record in last.values():
            check(record)
        ends = [record.end_ns for record in file.records if record.end_ns is not None]
        assert self.result.load_end_ns >= max(ends, default=0) >= 0
        return self.result, last


@pytest.mark.parametrize("workers", [1, 3])
def test_together_they_send_the_schedule_once(tmp_path, server, workers):
    server.play(STREAM)
    plan = every(0.01, 60)
    result, records = Loading(tmp_path, server.base_url, plan, workers).finish()
    truth = server.truth()
    assert result.incomplete_reason is None
    assert result.counts["completed"] == result.sent == result.sent_attempts == 60
    assert sorted(seen.body["batchmark"]["id"] for seen in truth.seen) == [r.id for r in plan]
    for request in plan:
        record = records[request.id]
        assert record.intended_ns == round(request.arrival_s * 1e9)
        assert record.output_tokens == 4
        assert record.send_ns >= record.intended_ns
    assert result.last_send_ns == max(record.send_ns for record in records.values())
    assert result.cpu_s > 0
    assert result.connections >= workers
    assert len(result.loop_lag_ms) >= workers * 5


def test_places_of_a_closed_loop_are_shared(tmp_path, server):
    server.play(answer(2, 0.03))
    loading = Loading(tmp_path, server.base_url, every(0, 40), 2, kind="closed", concurrency=5)
    result, _ = loading.finish()
    assert result.counts["completed"] == 40
    assert server.truth().peak == 5


def test_what_a_worker_refuses_is_one_line(tmp_path, server):
    job = Job(
        target=Target(server.base_url, "m", tokenizer=ByteTokenizer()),
        settings=LoadSettings(run_id="run", backend="lean"),
        requests=every(1, 2),
        seed=0,
        log=tmp_path / "requests.jsonl",
        warm_up=every(0, 1),
    )
    unusable = Target("https://127.0.0.1:1", "m", tokenizer=ByteTokenizer())
    with LoadProcesses() as load:
        load.prepare(Job(unusable, job.settings, job.requests, 0, job.log, job.warm_up))
        with pytest.raises(LoadError, match=r"^load\.backend=lean: [^\n]+$"):
            load.wait_ready()
    assert list(tmp_path.iterdir()) == []


def test_progress_comes_while_the_load_runs(tmp_path, server):
    server.play(STREAM)
    loading = Loading(tmp_path, server.base_url, every(0.02, 150), 2)
    loading.finish()
    shown = dict(loading.frames)
    assert set(shown) == {0, 1}
    assert 0 < sum(frame["launched"] for frame in shown.values()) <= 150
    assert any(0 < frame["launched"] < 75 for _, frame in loading.frames)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_ends_the_load(tmp_path, server, workers):
    server.play(STREAM)
    loading = Loading(tmp_path, server.base_url, every(0.02, 1000), workers)
    loading.wait_for_records(20)
    os.kill(loading.load.pids[-1], signal.SIGKILL)
    result, records = loading.finish()
    assert result.incomplete_reason.startswith(f"worker_died: load process {workers} of {workers} (pid ")
    assert result.incomplete_reason.endswith("was ended by SIGKILL")
    reasons = Counter(record.reason for record in records.values())
    assert reasons[None] >= 20 - 1  # completed ones; the last line may have been cut off
    assert reasons["not_recorded"] > 300
    assert all(r.outcome == "cut_off" for r in records.values() if r.reason == "not_recorded")
    lost = {r.id for r in records.values() if r.reason == "not_recorded"}
    assert lost <= {request.id for request in loading.plan[workers - 1 :: workers]}
    if workers == 2:
        assert reasons["not_sent"] > 300  # the other one has told of each of its own


def test_a_worker_that_is_stopped_ends_the_load(tmp_path, server, monkeypatch):
    monkeypatch.setattr(processes, "SILENT_S", 3.0)
    server.play(STREAM)
    loading = Loading(tmp_path, server.base_url, every(0.02, 1000), 2)
    loading.wait_for_records(20)
    os.kill(loading.load.pids[0], signal.SIGSTOP)
    result, records = loading.finish()
    assert result.incomplete_reason.startswith("worker_silent: load process 1 of 2 (pid ")
    reasons = Counter(record.reason for record in records.values())
    assert reasons["not_recorded"] > 200
    assert reasons["not_sent"] > 200


def test_a_full_disk_of_one_worker_ends_the_load(tmp_path, server):
    server.play(STREAM)
    loading = Loading(tmp_path, server.base_url, every(0.02, 1000), 2)
    loading.wait_for_records(20)
    part = tmp_path / "requests.0.jsonl"
    limit = part.stat().st_size + 1000
    psutil.Process(loading.load.pids[0]).rlimit(psutil.RLIMIT_FSIZE, (limit, limit))
    result, records = loading.finish()
    assert result.incomplete_reason.startswith(f"cannot write {part}: ")
    reasons = Counter(record.reason for record in records.values())
    assert reasons["not_recorded"] > 300
    assert reasons["not_sent"] > 300
    assert reasons[None] >= 20


def test_a_server_that_is_killed_ends_the_load(tmp_path):
    with ScriptProcess() as server:
        server.play(STREAM)
        loading = Loading(tmp_path, server.base_url, every(0.02, 2000), 2)
        loading.wait_for_records(20)
        os.kill(server.process.pid, signal.SIGKILL)
        result, records = loading.finish()
    assert result.incomplete_reason.startswith("server unreachable: ")
    reasons = Counter(record.reason for record in records.values())
    assert reasons["connect"] > 0
    assert reasons["not_sent"] > 500


def test_a_stop_is_obeyed_in_the_middle_of_answers(tmp_path, server):
    server.play(LASTING)
    loading = Loading(tmp_path, server.base_url, every(0.02, 1000), 2)
    wait_for(lambda: sum(frame["launched"] for _, frame in loading.frames[-2:]) > 20, "twenty sends")
    stopped_ns = time.monotonic_ns() - loading.t0_ns
    loading.stop.set("enough")
    result, records = loading.finish()
    assert result.incomplete_reason == "enough"
    reasons = Counter(record.reason for record in records.values())
    assert set(reasons) == {"in_flight", "not_sent"}
    assert reasons["in_flight"] > 20
    assert all(r.output_tokens == 4 for r in records.values() if r.chunk_ns and len(r.chunk_ns) == 4)
    assert result.load_end_ns - stopped_ns < SOON_S * 1e9


BABBLER = """
import socket, struct, sys, time
import orjson
from harness.loadgen.channel import Channel
end = socket.socket(fileno=int(sys.argv[1]))
channel = Channel(end)
channel.send({{"type": "progress", "launched": 0}})
channel.send({{"type": "ready", "problem": None}})
while not any(m["type"] == "go" for m in channel.receive()):
    time.sleep(0.01)
{babble}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("babble", "says"),
    [
        ("end.send(b'\\xff' * 64)", "sent a message of 4294967295 bytes"),
        ("end.send(struct.pack('<I', 5) + b'{{{{{')", "sent a message that is no JSON"),
        ("end.send(struct.pack('<I', 2) + b'[]')", "sent a message without a type"),
        ("channel.send({'type': 'result', 'sent': 3})", "sent a message that cannot be read"),
        ("channel.send({'type': 'progress'})", "sent a message that cannot be read"),
        ("channel.send({'type': 'gossip'})", "sent a message that cannot be read"),
        ("sys.exit(7)", "ended with code 7"),
        ("end.close()", "has closed its socket"),
    ],
)
def test_a_worker_that_speaks_nonsense_ends_the_load(tmp_path, monkeypatch, babble, says):
    monkeypatch.setattr(processes, "WORKER", ("-c", BABBLER.format(babble=babble)))
    result, records = Loading(tmp_path, "http://127.0.0.1:1", every(0.1, 5), 1).finish()
    assert says in result.incomplete_reason
    assert {record.reason for record in records.values()} == {"not_recorded"}


def test_a_worker_that_ends_before_the_load_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "WORKER", ("-c", "import sys; sys.exit(3)"))
    job = Job(
        Target("http://127.0.0.1:1", "m", tokenizer=ByteTokenizer()),
        LoadSettings(run_id="run"),
        every(1, 2),
        seed=0,
        log=tmp_path / "requests.jsonl",
    )
    ended = r"worker_died: load process 1 of 1 .* ended with code 3"
    with LoadProcesses() as load:
        load.prepare(job)
        with pytest.raises(WorkerError, match=ended):
            load.wait_ready()
        with pytest.raises(WorkerError, match=ended):
            load.check()


def test_a_worker_that_lives_passes_the_check():
    with LoadProcesses() as load:
        load.check()


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x02\0\0\0[]", b"\x05\0\0\0{{{{{", b""])
def test_a_worker_ends_when_its_parent_speaks_nonsense_or_is_gone(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        command = [sys.executable, *processes.WORKER, str(fd)]
        child = subprocess.Popen(command, pass_fds=[fd], env=child_environment(), stderr=subprocess.PIPE)
        theirs.close()
        ours.sendall(data)
        if not data:
            ours.close()
        _, stderr = child.communicate(timeout=SOON_S)
    assert (b"the parent sent a message" in stderr) == bool(data)
    assert b"Traceback" not in stderr
