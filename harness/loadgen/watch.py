"""Watches over a load: how late the event loop runs, and whether a server that broke connections is still
there."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from urllib.parse import urlsplit

from harness.loadgen.stop import Stop

SAMPLE_S = 0.05
PROBE_EVERY_S = 0.25
PROBE_TIMEOUT_S = 1.0
DEAD_AFTER_S = 3.0
CLOSE_S = 0.2


class LoopLag:
    """Samples 20 times a second by how much a timer of the event loop is late, in ms."""

    def __init__(self) -> None:
        self.samples_ms: list[float] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + SAMPLE_S
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            now = loop.time()
            self.samples_ms.append(round((now - due) * 1000, 3))
            # After a long stall the next sample is a whole interval away: one stall, one sample.
            due = max(due, now) + SAMPLE_S


class Lifeline:
    """Probes a server after an exchange broke, from a thread of its own; stops the load when the server has
    not accepted a connection for 3 s. The thread is started by the first suspicion and sleeps between
    them."""

    def __init__(self, base_url: str, stop: Stop) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._stop = stop
        self._suspected = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def suspect(self) -> None:
        """An exchange broke."""
        self._suspected.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the probing. It may still wait for a connection, but stops nothing any more."""
        self._closing.set()
        self._suspected.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)

    def _watch(self) -> None:
        while self._suspected.wait() and not self._closing.is_set():
            self._suspected.clear()
            if not self._comes_back():
                return
            self._closing.wait(PROBE_EVERY_S)

    def _comes_back(self) -> bool:
        """Probe until it accepts (True), or has been away for too long (False: the load was stopped)."""
        since = time.monotonic()
        while not self._accepts():
            if self._closing.is_set():
                return False
            if time.monotonic() - since >= DEAD_AFTER_S:
                where = f"{self._host}:{self._port}"
                self._stop.set(f"server unreachable: {where} took no connection for {DEAD_AFTER_S:g} s")
                return False
            self._closing.wait(PROBE_EVERY_S)
        return True

    def _accepts(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), timeout=PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True
