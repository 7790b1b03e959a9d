"""The wish that a load ends now, from wherever it comes: a signal handler, another thread, a full disk."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType


class Stop:
    """Set once and for good; the first reason stands. `set` may be called from a signal handler and from any
    thread: it takes no lock. A loop that waits for file descriptors waits for `fileno()` too, which is
    readable from then on."""

    def __init__(self) -> None:
        self._reasons: list[str] = []  # appending is atomic, and so is looking at the first
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)

    def set(self, reason: str) -> None:
        """End the load. reason: one line, for the run's incomplete_reason."""
        self._reasons.append(reason)
        with contextlib.suppress(OSError):  # closed: nobody waits any more
            os.write(self._write, (1).to_bytes(8, "little"))

    @property
    def is_set(self) -> bool:
        return bool(self._reasons)

    @property
    def reason(self) -> str | None:
        return self._reasons[0] if self._reasons else None

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        """Give the descriptors back; set() and is_set work on."""
        for fd in {self._read, self._write} - {-1}:
            os.close(fd)
        self._read = self._write = -1

    def __enter__(self) -> Stop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
