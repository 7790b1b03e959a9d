"""The client as a run uses it: one load process (harness.loadgen.processes), pinned to a core, with nothing
else in it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.conf import UsageError
from harness.loadgen.job import Job
from harness.loadgen.processes import LoadProcesses
from harness.loadgen.settings import LoadResult, LoadSettings, Target
from harness.loadgen.stop import Stop
from harness.request_log import RequestRecord, read_request_file
from harness.tokenizer import ByteTokenizer, Tokenizer
from workloads.schedule import ScheduledRequest, Segment

LEAD_NS = 300_000_000
"""From the choice of t0 to the first arrival: the worker builds bodies and opens its log."""
WARM_UP = 3


@dataclass(frozen=True)
class ClientRun:
    """records: of the last attempts, in the order in which they ended. start_s: from the start of the
    process until it was ready to send, without the requests of its warm-up."""

    result: LoadResult
    records: list[RequestRecord]
    t0_ns: int
    started_ns: int


def run_client(
    base_url: str,
    requests: Sequence[ScheduledRequest],
    settings: LoadSettings,
    *,
    core: int | None,
    realtime: bool = False,
    seed: int = 0,
    api: str = "completions",
    send_ids: bool = True,
    tokenizer: Tokenizer | None = None,
    on_ready: Callable[[], None] | None = None,
) -> ClientRun:
    """Send the requests from one load process. realtime: ahead of every ordinary process, for a machine that
    others use. on_ready: called when it is warm and has not begun. Raises LoadError for a backend that cannot
    be used here, UsageError where there is no right to realtime, WorkerError when the process ended."""
    target = Target(base_url, "truth", api=api, send_ids=send_ids, tokenizer=tokenizer or ByteTokenizer())
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder, Stop() as stop:
        log = Path(folder) / "requests.jsonl"
        started_ns = time.monotonic_ns()
        with LoadProcesses() as load:
            for pid in load.pids:
                if core is not None:
                    os.sched_setaffinity(pid, {core})
                if realtime:
                    _go_first(pid)
            warm_up = [_warm_up(k) for k in range(WARM_UP)]
            load.prepare(Job(target, replace(settings, processes=1), requests, seed, log, warm_up))
            load.wait_ready()
            if on_ready is not None:
                on_ready()
            t0_ns = time.monotonic_ns() + LEAD_NS
            result = load.run(t0_ns, stop)
        with contextlib.suppress(FileNotFoundError):
            return ClientRun(result, read_request_file(log).records, t0_ns, started_ns)
        return ClientRun(result, [], t0_ns, started_ns)


def _go_first(pid: int) -> None:
    try:
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        raise UsageError("--realtime: no right to it here; needs root or CAP_SYS_NICE") from None


def _warm_up(k: int) -> ScheduledRequest:
    return ScheduledRequest(
        id=f"w{k:06d}",
        arrival_s=0.0,
        segments=(Segment(f"warm-up-{k}", 64),),
        prompt_tokens=64,
        max_tokens=4,
        stop_after=4,
    )
