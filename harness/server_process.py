"""The reference server as a child process that never outlives us.

The child runs in a session of its own, so a Ctrl-C reaches only the harness, which decides. Its standard
input is a pipe that we hold open: when the harness dies, however it dies, the kernel closes the pipe and the
server ends; orders go through it too. Standard output carries JSON lines, `ready` or `error` first, then
answers to orders; standard error goes to server.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import harness

READY_TIMEOUT_S = 900.0
"""A real model may first have to be fetched; a server that fails says so at once and is not waited for."""
STOP_TIMEOUT_S = 10.0
ORDER_TIMEOUT_S = 60.0
"""For an order: the iteration in progress ends first, and a large prompt on a slow machine takes its time."""
TERM_PATIENCE_S = 3.0
TICK_S = 0.5


class ServerError(RuntimeError):
    """The server could not start. `refused`: it said why itself, so the configuration is at fault."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class ServerProcess:
    """One `python -m engines.server`, from start to certain end.

    on_exit is called once, from a thread of ours, with the exit code, if the process ends before stop().
    """

    def __init__(
        self,
        config: Path,
        records: Path | None,
        log: Path,
        *,
        on_exit: Callable[[int], None] | None = None,
        module: str = "engines.server",
    ) -> None:
        self.log = log
        self._on_exit = on_exit
        self._stopping = False
        self._deaf = False  # it ended neither with its input nor by SIGTERM
        self._ended = threading.Event()
        self._lines: queue.Queue[str | None] = queue.Queue()
        command = [sys.executable, "-m", module, "--config", str(config)]
        command += [] if records is None else ["--records", str(records)]
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [*command, "--exit-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=child_environment(),
                start_new_session=True,
            )
        self.pid = self._process.pid
        threading.Thread(target=self._read_output, name="server-stdout", daemon=True).start()
        threading.Thread(target=self._watch, name="server-watch", daemon=True).start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def returncode(self) -> int | None:
        """The exit code once the process and its group have ended; negative: the signal that ended it."""
        return self._process.returncode if self._ended.is_set() else None

    def wait_ready(
        self, timeout_s: float = READY_TIMEOUT_S, *, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """The ready line (docs/architecture.md, HTTP). Raises ServerError when the server refuses or dies.
        meanwhile: called every now and then; what it raises ends the waiting."""
        return self._hear("ready", "was not ready", timeout_s, meanwhile)

    def record(self, folder: Path | None, timeout_s: float = ORDER_TIMEOUT_S) -> None:
        """Have a server that is ready end its records and begin anew in that folder, or write none (None).
        When this returns the records so far are whole. Raises ServerError."""
        order = json.dumps({"records": None if folder is None else str(folder.resolve())}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died, which is what is heard next
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        self._hear("records", "did not take up new records", timeout_s)

    def _hear(
        self, event_name: str, lacking: str, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """The next event of that name."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(TICK_S, deadline - time.monotonic())))
            except queue.Empty:
                if meanwhile is not None:
                    meanwhile()
                if time.monotonic() < deadline:
                    continue
                raise ServerError(
                    f"the server {lacking} after {timeout_s:.0f} s; see {self.log}", refused=False
                ) from None
            if line is None:
                self._lines.put(None)  # whoever asks next hears the same
                self._ended.wait(STOP_TIMEOUT_S)
                raise ServerError(f"the server {self.describe_end()}; see {self.log}", refused=False)
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library that prints; only JSON lines are ours
            if isinstance(event, dict) and event.get("event") == event_name:
                return event
            if isinstance(event, dict) and event.get("event") == "error":
                raise ServerError(" ".join(str(event.get("message", "")).split()), refused=True)

    def ended_within(self, timeout_s: float) -> bool:
        """Wait for an end that seems near."""
        return self._ended.wait(timeout_s)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End it: close the pipe, then SIGTERM, then SIGKILL to the whole group.
        One that was stopped is woken first, to write its records. Returns the exit code."""
        self._stopping = True
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        for patience, number in ((timeout_s, signal.SIGTERM), (TERM_PATIENCE_S, signal.SIGKILL)):
            if self._ended.wait(patience):
                break
            self._deaf = number == signal.SIGKILL
            self._signal(number)
        self._ended.wait()
        return self._process.returncode

    def kill(self) -> None:
        """End it at once, without its own clean-up."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    def describe_end(self) -> str:
        """How it ended, with the last line it wrote to standard error, as one line."""
        code = self.returncode
        if code is None:
            how = "is still running"
        elif code < 0 and self._deaf:
            how = "did not end when it was asked to, and was killed"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        said = self.last_words()
        return f"{how}: {said}" if said else how

    def last_words(self, limit: int = 300) -> str:
        """The last line of server.log that is not blank."""
        try:
            with open(self.log, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 8192))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:limit] if said else ""

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _read_output(self) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        with stdout:
            for raw in stdout:  # read to the end, so that the pipe never fills
                self._lines.put(raw.decode("utf-8", "replace"))
        self._lines.put(None)

    def _watch(self) -> None:
        # The group's number is ours for as long as its leader is not reaped: look without reaping, end what
        # the leader left behind, and only then reap.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._ended.set()
        if not self._stopping and self._on_exit is not None:
            self._on_exit(code)


def child_environment() -> dict[str, str]:
    """For a process of ours that we start."""
    env = dict(os.environ)
    root = Path(harness.__file__).resolve().parents[1]
    if (root / "engines").is_dir():  # a checkout: our modules are found whatever the current folder is
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), env.get("PYTHONPATH"))))
    return env
