"""A thread that appends one JSON line a period to a file: what telemetry and the scraper have in common.

Every line is handed to the operating system at once, so a kill -9 loses the line that was being written at
most. A long run does not fill the disk: after ROWS_PER_RATE rows the period doubles, and again after as many
more, so n hours cost about log2(n) times the room of the first.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROWS_PER_RATE = 36_000
"""Rows at one rate before the period doubles: an hour at 10 Hz."""
JOIN_S = 2.0
"""How long the end of a run waits for a reading under way; a driver that hangs must not hang the run."""


class Sampler:
    """Samples for the length of a `with`. t_ns of a row counts from t0_ns, like the client's stamps.

    reasons: why a column (or, under the sampler's name, the file from some moment on) has no values; whole
    once the `with` has ended. error: the disk took no more; that ends the sampling, never the run.
    """

    period_ns: int
    name: str
    edges = False
    """Also a sample at the very start and at the very end, whatever the period."""

    def __init__(self, path: Path, *, t0_ns: int) -> None:
        self.reasons: dict[str, str] = {}
        self.error: OSError | None = None
        self.rows = 0
        self.cpu_s = 0.0  # of this thread: what looking cost
        self._path = path
        self._t0_ns = t0_ns
        self.ending = False  # the sample at the end is being taken
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def open(self) -> bool:
        """In the thread, before the first sample. False: there is nothing to sample, and no file."""
        return True

    def sample(self, t_ns: int) -> dict[str, Any] | None:
        """A row without its t_ns; None: nothing worth a row this time."""
        raise NotImplementedError

    def close(self) -> None:
        """In the thread, after the last sample."""

    def interrupt(self) -> None:
        """From the thread that ends the sampling: let go of what a reading may be waiting for."""

    def meta(self) -> dict[str, Any]:
        """Its part of meta.json."""
        return {"rows": self.rows, "cpu_s": round(self.cpu_s, 3), "reasons": dict(self.reasons)}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self.edges = False
            self.interrupt()
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self.reasons[self.name] = f"a reading hung; nothing after row {self.rows}"

    def _run(self) -> None:
        try:
            if not self.open():
                return
            try:
                with open(self._path, "ab", buffering=0) as file:
                    self._loop(file)
            finally:
                self.close()
        except OSError as error:  # a full disk must not end the run; the reader sees fewer rows
            self.error = error
            self.reasons[self.name] = f"{self._path.name} cannot be written: {error.strerror or error}"
        except Exception as error:
            self.reasons[self.name] = f"ended by {type(error).__name__}: {error}"
        finally:
            self.cpu_s = time.thread_time()

    def _loop(self, file: Any) -> None:
        if self.edges:
            self._append(file)
        due = time.monotonic_ns()
        while True:
            period = self.period_ns << min(self.rows // ROWS_PER_RATE, 8)
            due = max(due + period, time.monotonic_ns())  # late: go on from here, no burst to catch up
            if self._stop.wait(max(0, due - time.monotonic_ns()) / 1e9):
                break
            self._append(file)
        if self.edges:
            self.ending = True
            self._append(file)

    def _append(self, file: Any) -> None:
        t_ns = time.monotonic_ns() - self._t0_ns
        row = self.sample(t_ns)
        if row is None:
            return
        rest = memoryview(json.dumps({"t_ns": t_ns, **row}, separators=(",", ":")).encode() + b"\n")
        while rest:  # a write may be short
            rest = rest[file.write(rest) :]
        self.rows += 1
