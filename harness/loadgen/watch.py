"""Watches over a load: how late the event loop runs, and whether a server that broke connections is still
there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from urllib.parse import urlsplit

SAMPLE_S = 0.05
PROBE_EVERY_S = 0.25
PROBE_TIMEOUT_S = 1.0
DEAD_AFTER_S = 3.0


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
    """Probes a server after an exchange broke; calls on_dead when it has not accepted a connection for 3
    s."""

    def __init__(self, base_url: str, on_dead: Callable[[str], None]) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._on_dead = on_dead
        self._task: asyncio.Task[None] | None = None

    def suspect(self) -> None:
        """An exchange broke. Starts probing, unless that is under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._probe())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self) -> None:
        since = time.monotonic()
        while not await self._accepts():
            if time.monotonic() - since >= DEAD_AFTER_S:
                where = f"{self._host}:{self._port}"
                self._on_dead(f"server unreachable: {where} took no connection for {DEAD_AFTER_S:g} s")
                return
            await asyncio.sleep(PROBE_EVERY_S)

    async def _accepts(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
