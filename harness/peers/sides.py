"""A side of the comparison: a process that has the model loaded and answers rounds of requests."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from harness.peers.traffic import Ask
from harness.server_process import child_environment

READY_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 1800.0


class PeerError(RuntimeError):
    """A side could not be started, died, or did not answer what it was asked. One line."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one side did with one set of requests. seconds: from the first request handed over to the last
    token; answers: the tokens of each, in order."""

    seconds: float
    answers: list[list[int]]
    start_ns: int  # CLOCK_MONOTONIC
    end_ns: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


class ChildSide:
    """`python -m harness.peers.child NAME …`: a JSON line in, a JSON line out. The child runs in a session of
    its own, so that a Ctrl-C reaches only us; it ends when its standard input does."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.peers.child", name, json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
            start_new_session=True,
        )
        self._said: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for pump, stream in ((self._answers, self._process.stdout), (self._words, self._process.stderr)):
            threading.Thread(target=pump, args=(stream,), daemon=True).start()

    def wait_ready(self) -> Mapping[str, Any]:
        """What the child is: versions, threads. Raises PeerError."""
        try:
            return self._next(READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, asks: Sequence[Ask]) -> Round:
        request = {"prompts": [list(ask.prompt) for ask in asks], "outputs": [ask.output for ask in asks]}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(f"{self.name}: {self._end()}") from None
        answer = self._next(ROUND_TIMEOUT_S)
        end_ns = time.monotonic_ns()
        seconds = float(answer["seconds"])
        return Round(seconds, answer["answers"], end_ns - int(seconds * 1e9), end_ns)

    def close(self) -> Mapping[str, Any]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it holds nothing that would be lost
        self._process.wait()
        return {}

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"{self.name}: no answer within {timeout_s:.0f} s") from None
        if line is None:
            raise PeerError(f"{self.name}: {self._end()}")
        value = json.loads(line)
        if "error" in value:
            raise PeerError(f"{self.name}: {value['error']}")
        return dict(value)

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        said = [line for line in self._said if line.strip()]
        return f"its process ended with code {self._process.returncode}" + (f": {said[-1]}" if said else "")

    def _answers(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _words(self, stream: IO[str]) -> None:
        for line in stream:
            self._said = [*self._said[-20:], line.strip()[:300]]
