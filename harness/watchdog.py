"""Notices that a server of ours is stopped (SIGSTOP): it then takes connections and says nothing, so that
every open request would wait for its own timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

PATIENCE_S = 10.0
"""How long it may be stopped: a shorter stop is a stall like any other, and measured."""
LOOK_EVERY_S = 0.5


class Watchdog:
    """For the length of a `with`: calls on_stopped(what), once and from a thread of its own, when one of the
    processes has been stopped for patience_s."""

    def __init__(
        self, pids: Iterable[int], on_stopped: Callable[[str], None], patience_s: float = PATIENCE_S
    ) -> None:
        self._pids = list(pids)
        self._on_stopped = on_stopped
        self._patience_s = patience_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._pids:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def _watch(self) -> None:
        import psutil

        since: dict[int, float] = {}
        while not self._ending.wait(min(LOOK_EVERY_S, self._patience_s)):
            now = time.monotonic()
            for pid in self._pids:
                try:
                    stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
                except psutil.Error:  # its end is for others to notice
                    stopped = False
                if not stopped:
                    since.pop(pid, None)
                elif now - since.setdefault(pid, now) >= self._patience_s:
                    return self._on_stopped(
                        f"process {pid} has been stopped (SIGSTOP) for {self._patience_s:g} s"
                    )
        return None
