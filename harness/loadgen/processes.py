"""The worker processes of one load, seen from the parent: started early, given a slice each, watched, and
ended for certain.

    with LoadProcesses() as load:          # one worker starts now, while a schedule is drawn
        load.prepare(job, workers=n)       # the others start; each gets its slice and warms up
        problem = load.wait_ready()
        result = load.run(t0_ns, stop)     # LoadResult of all together; one requests.jsonl

However a worker ends, the load ends with it: a slice that is missing is traffic that was not sent, so the run
is incomplete. What the others have recorded is kept.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from harness.loadgen.channel import Channel, ChannelError, HasFileno, readable
from harness.loadgen.job import Job, decode_result
from harness.loadgen.merge import Slice, conclude
from harness.loadgen.settings import LoadError, LoadResult
from harness.loadgen.slices import shares, slices
from harness.loadgen.stop import Stop
from harness.request_log import part_name
from harness.server_process import child_environment
from workloads.schedule import ScheduledRequest

WORKER = ("-m", "harness.loadgen.worker")
READY_S = 180.0
"""To load the modules, to encode the prompts' text and to warm up, whose requests may take a minute."""
SILENT_S = 6.0
"""A worker says something every second. One that has not for this long is stopped, or its host is."""
STOP_S = 5.0
"""After a stop: a worker needs 2 s to end what is under way, and a moment to write it down..."""
STOP_S_PER_REQUEST = 2e-4
"""...and a record for every request that was never sent, 40 us each on an idle machine."""
TICK_S = 0.25
SEND_S = 1.0
"""For a short message to be taken by a worker that lives."""

OnProgress = Callable[[int, Mapping[str, Any]], None]
"""(number of the worker, its figures as Tally.frame() gives them)."""


class WorkerError(RuntimeError):
    """A load process ended before the load began. The message is one line."""


class _Worker:
    """One child and what has been heard of it."""

    def __init__(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.number = number
        self.channel = Channel(ours)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *WORKER, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,
            )
        self.requests: Sequence[ScheduledRequest] = ()
        self.ready = False
        self.problem: str | None = None  # of its warm-up
        self.launched = 0
        self.result: LoadResult | None = None
        self.lost: str | None = None  # why there will be no result
        self.refused: str | None = None  # it said so itself
        self.heard = time.monotonic()

    @property
    def open(self) -> bool:
        return self.result is None and self.lost is None

    def lose(self, kind: str, what: str, of: int) -> None:
        """No result will come of it. Its end is made certain."""
        self.process.kill()
        self.lost = f"{kind}: load process {self.number + 1} of {of} (pid {self.process.pid}) {what}"

    def describe_end(self) -> str:
        """Of one whose socket has ended."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


class LoadProcesses:
    """See the module. Not thread-safe, but for kill()."""

    def __init__(self) -> None:
        self._workers = [_Worker(0)]
        self._job: Job | None = None

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def kill(self) -> None:
        """End them at once. May be called from a signal handler."""
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        """End those that have not ended: they see the end of their socket, and get a moment."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + STOP_S
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.wait()

    def check(self) -> None:
        """For whoever waits for something else. Raises WorkerError when a process has ended already."""
        for worker in self._workers:
            if worker.process.poll() is not None:
                raise WorkerError(
                    f"worker_died: load process {worker.number + 1} of {self._count} "
                    f"(pid {worker.process.pid}) {worker.describe_end()}"
                )

    def prepare(self, job: Job, *, workers: int = 1) -> None:
        """Give everyone a slice of job.requests. job.log: requests.jsonl of the run directory."""
        settings = shares(job.settings, len(job.requests), workers)
        n = len(settings)
        self._workers += [_Worker(number) for number in range(len(self._workers), n)]
        self._job = job
        parts = slices(job.requests, [part.concurrency or 1 for part in settings])
        for worker, part, requests in zip(self._workers, settings, parts, strict=True):
            worker.requests = requests
            log = job.log.with_name(part_name(worker.number, n))
            own = replace(job, settings=part, requests=requests, log=log)
            worker.channel.send(own.to_message())  # one that does not take it is found by wait_ready

    def wait_ready(self) -> str | None:
        """Until all have warmed up: what went wrong with a warm-up request, as a line. Raises LoadError for
        what cannot be sent, and WorkerError when a process is lost."""
        deadline = time.monotonic() + READY_S
        while any(not worker.ready for worker in self._workers):
            self._pump(READY_S, None, None)
            for worker in self._workers:
                if worker.refused is not None:
                    raise LoadError(worker.refused)
                if worker.open and not worker.ready and time.monotonic() > deadline:
                    worker.lose("worker_silent", f"was not ready after {READY_S:g} s", self._count)
                if worker.lost is not None:
                    raise WorkerError(worker.lost)
        return next((worker.problem for worker in self._workers if worker.problem), None)

    def run(self, t0_ns: int, stop: Stop, on_progress: OnProgress | None = None) -> LoadResult:
        """Send the load. t0_ns: CLOCK_MONOTONIC, at which arrival 0 leaves. When `stop` is set the load ends
        within about 2 s, and its reason is the result's incomplete_reason. Raises nothing for what happens to
        a worker or to the disk: that too ends the load and is the reason."""
        assert self._job is not None
        for worker in self._workers:
            worker.heard = time.monotonic()
            worker.channel.send({"type": "go", "t0_ns": t0_ns}, SEND_S)
        told: float | None = None
        while any(worker.open for worker in self._workers):
            self._pump(SILENT_S, None if told else stop, on_progress)
            for worker in self._workers:
                ended_by = worker.lost or (worker.result and worker.result.incomplete_reason)
                if ended_by and not stop.is_set:
                    stop.set(ended_by)
            if stop.is_set and told is None:
                told = time.monotonic()
                for worker in self._workers:
                    if worker.open:
                        worker.channel.send({"type": "stop", "reason": stop.reason}, SEND_S)
            elif told is not None:
                for worker in self._workers:
                    patience_s = STOP_S + STOP_S_PER_REQUEST * len(worker.requests)
                    if worker.open and time.monotonic() - told > patience_s:
                        worker.lose("worker_silent", f"did not end within {patience_s:.0f} s", self._count)
        load_end_ns = max(0, time.monotonic_ns() - t0_ns)
        slices_of = [Slice(worker.requests, worker.result, worker.launched) for worker in self._workers]
        return conclude(self._job.log.parent, self._job.settings, slices_of, t0_ns, load_end_ns, stop.reason)

    @property
    def _count(self) -> int:
        return len(self._workers)

    def _pump(self, silent_s: float, stop: Stop | None, on_progress: OnProgress | None) -> None:
        """Hear what has been said, or wait a tick for it; a stop ends the waiting."""
        workers = [worker for worker in self._workers if worker.open]
        ends: list[HasFileno] = [worker.channel for worker in workers]
        if stop is not None:
            ends.append(stop)
        ready = readable(ends, TICK_S)
        for worker in workers:
            if worker.channel in ready:
                worker.heard = time.monotonic()
                self._hear(worker, on_progress)
            elif time.monotonic() - worker.heard > silent_s:  # and nothing lies in its socket either
                worker.lose("worker_silent", f"has not been heard of for {silent_s:g} s", self._count)

    def _hear(self, worker: _Worker, on_progress: OnProgress | None) -> None:
        try:
            for message in worker.channel.receive():
                self._take(worker, message, on_progress)
        except ChannelError as error:
            worker.lose("worker_failed", f"sent {error}", self._count)
        except (KeyError, TypeError, ValueError, AttributeError):
            worker.lose("worker_failed", "sent a message that cannot be read", self._count)
        if worker.channel.ended and worker.open:
            worker.lose("worker_died", worker.describe_end(), self._count)

    def _take(self, worker: _Worker, message: Mapping[str, Any], on_progress: OnProgress | None) -> None:
        kind = message["type"]
        if kind == "progress":
            worker.launched = int(message["launched"])
            if on_progress is not None:
                on_progress(worker.number, message)
        elif kind == "ready":
            worker.ready, worker.problem = True, message["problem"]
        elif kind == "refused":
            worker.refused = worker.lost = str(message["message"])
        elif kind == "result":
            worker.result = decode_result(message)
        else:
            raise ValueError(kind)
