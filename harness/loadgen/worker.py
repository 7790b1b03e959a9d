"""A process that sends one slice of a load: `python -m harness.loadgen.worker FD`, started by the parent of
the load (harness/loadgen/processes.py) with its end of a socket.

The load always runs in processes of its own, so that nothing else of a run (telemetry, the progress display,
the records of the server) shares an interpreter with a stamp. The end of the socket is the end of the parent:
the load then stops within 2 s, and what it has recorded stays. A worker is in a session of its own; a Ctrl-C
reaches only the parent, which decides.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness.loadgen.channel import Channel, ChannelError, readable
from harness.loadgen.progress import Tally
from harness.loadgen.stop import Stop

BEAT_S = 1.0
"""A worker is heard of at least this often."""
LIVE_S = 0.2
"""So often at most a display gets figures, and only in moments in which the load has nothing to do."""
GRACE_S = 3.0
"""After the end of the parent: what does not end of itself is ended."""
PARENT_GONE = 4
WARM_UP_TIMEOUT_S = 60.0


class Listener:
    """A thread that hears the parent, however busy the load is, and lets it hear from us. It sleeps in the
    kernel but for a moment a second."""

    def __init__(self, channel: Channel, stop: Stop, tally: Tally) -> None:
        self._channel = channel
        self._stop = stop
        self._tally = tally
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="listener", daemon=True).start()

    def next(self, kind: str) -> dict[str, Any] | None:
        """The next message, which has to be of this kind; None: the parent wants no more of us."""
        message = self._inbox.get()
        return message if message is not None and message["type"] == kind else None

    def _run(self) -> None:
        while not self._channel.ended:
            self._channel.offer(self._tally.frame())
            if not readable([self._channel], BEAT_S):
                continue
            try:
                messages = self._channel.receive()
            except ChannelError as error:
                print(f"load process {os.getpid()}: the parent sent {error}", file=sys.stderr, flush=True)
                break
            for message in messages:
                if message["type"] == "stop":
                    self._stop.set(str(message.get("reason", "stopped")))
                else:
                    self._inbox.put(message)
        self._stop.set("parent_gone: the process that measured has ended")
        self._inbox.put(None)
        time.sleep(GRACE_S)
        os._exit(PARENT_GONE)


class LiveFigures:
    """on_idle of run_load: figures for a display, when nothing else is to do."""

    def __init__(self, channel: Channel, tally: Tally) -> None:
        self._channel = channel
        self._tally = tally
        self._told = 0.0
        self._events = 0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._told < LIVE_S or self._tally.events == self._events:
            return False
        self._told, self._events = now, self._tally.events
        self._channel.offer(self._tally.frame())
        return True


def work(channel: Channel, listener: Listener, stop: Stop, tally: Tally) -> None:
    """Get a job, warm up, say ready, wait for go, send the load, give the result."""
    message = listener.next("job")
    if message is None:
        return
    from harness.loadgen.job import Job, encode_result
    from harness.loadgen.run import run_load
    from harness.records import RecordsWriteError, RequestLog
    from workloads.prompts import PromptBook, load_text

    try:
        import numpy as np

        job = Job.from_message(message)
        assert job.target.tokenizer is not None
        corpus = np.asarray(job.target.tokenizer.encode(load_text()), dtype=np.int64)
        prompts = PromptBook(corpus, job.seed)
        problem = warm_up(job, prompts, stop) if job.warm_up else None
        gc.collect()
        gc.freeze()  # run_load collects once more, right before the first send: it then finds little
    except (ValueError, RecordsWriteError) as error:  # LoadError, TokenizerError, WorkloadError
        channel.send({"type": "refused", "message": " ".join(str(error).split())})
        return
    channel.send({"type": "ready", "problem": problem})
    go = listener.next("go")
    if go is None:
        return
    t0_ns: int = go["t0_ns"]
    try:
        log = RequestLog(job.log, run=job.settings.run_id, t0_ns=t0_ns)
    except RecordsWriteError as error:
        channel.send({"type": "refused", "message": str(error)})
        return
    result = run_load(
        job.requests,
        prompts,
        job.target,
        job.settings,
        log,
        t0_ns=t0_ns,
        stop=stop,
        on_event=tally,
        on_idle=LiveFigures(channel, tally) if job.live else None,
    )
    channel.send(encode_result(result))


def warm_up(job: Any, prompts: Any, stop: Stop) -> str | None:
    """A few small requests through the whole path, so that the first measured one does not pay for what
    happens once (allocations, kernels, connections, code that is loaded). Nothing is kept. Returns what went
    wrong as a line."""
    from dataclasses import replace

    from harness.loadgen.job import WARM_UP_RUN
    from harness.loadgen.run import run_load
    from harness.records import RequestLog, read_request_file

    path = Path(f"{job.log}.warmup")
    settings = replace(
        job.settings,
        run_id=WARM_UP_RUN,
        kind="open",
        duration_s=None,
        concurrency=None,
        timeout_s=WARM_UP_TIMEOUT_S,
        max_wait_s=None,
        ramp_s=None,
        retries=0,
    )
    t0_ns = time.monotonic_ns()
    log = RequestLog(path, run=WARM_UP_RUN, t0_ns=t0_ns)
    try:
        run_load(job.warm_up, prompts, job.target, settings, log, t0_ns=t0_ns, stop=stop)
        bad = [record for record in read_request_file(path).records if record.outcome != "completed"]
    finally:
        log.close()
        path.unlink(missing_ok=True)
    if not bad:
        return None
    return _problem(bad[0].status, bad[0].error, bad[0].reason or bad[0].outcome)


def _problem(status: int | None, error: str | None, reason: str) -> str:
    if status is not None and 300 <= status < 400:
        return (
            f"HTTP {status}, a redirect; give the address that it leads to "
            "(load.backend=aiohttp follows 307 and 308)"
        )
    said = " ".join((_message(error) or reason).split())
    if status is None:
        return said
    return f"HTTP {status}" if said == f"http_{status}" else f"HTTP {status}, {said}"


def _message(error: str | None) -> str | None:
    """The sentence inside an OpenAI error body; anything else as it is."""
    import json

    try:
        return str(json.loads(error or "")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error


def main(argv: list[str]) -> int:
    channel = Channel(socket.socket(fileno=int(argv[0])))
    stop, tally = Stop(), Tally()
    listener = Listener(channel, stop, tally)
    import workloads.prompts  # noqa: F401  (what the job will need, while the parent still draws it)

    with contextlib.suppress(ImportError):  # a platform without it
        import harness.loadgen.lean  # noqa: F401
    with contextlib.suppress(KeyboardInterrupt):
        work(channel, listener, stop, tally)
    sys.stderr.flush()
    os._exit(0)  # nothing is left to tidy up


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
