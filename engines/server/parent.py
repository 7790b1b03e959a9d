"""Standard input as the line to whoever started the server: it ends with it, and takes orders from it.

The pipe closes when the parent dies, however it dies, and then the server ends. Until then a line of it may
be an order, one JSON object, which is answered by one JSON line on standard output:

    {"records": "FOLDER"}    close the records so far, and begin anew in that folder; null: write none
    -> {"event": "records", "folder": "FOLDER"}    or {"event": "error", "message": "..."}

"Anew" is the state of a server that has just been started, but for the model, which stays loaded: an empty
prefix cache, an empty queue, a scheduler that has learnt nothing (engines.server.recordings)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.server.engine_client import EngineClient
    from engines.server.launch import Stop

PATIENCE_S = 1.2  # how long a running iteration gets once the parent is gone
DEADLINE_S = 1.8  # then the process ends whatever it is doing
LONGEST_LINE = 65536

Announce = Callable[[dict[str, Any]], None]


class Parent:
    """Reads standard input in a thread of its own, from the start of the server on. No order is waited for
    there: the end of the pipe is always seen at once."""

    def __init__(self, stop: Stop, announce: Announce) -> None:
        self._stop = stop
        self._announce = announce
        self._engine: EngineClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._watch, name="stdin", daemon=True).start()

    def serve(self, engine: EngineClient) -> None:
        """Take orders from now on; on the event loop."""
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def _watch(self) -> None:
        line = b""
        with contextlib.suppress(OSError):
            while piece := os.read(0, 4096):
                *lines, line = (line + piece).split(b"\n")
                for whole in lines:
                    self._obey(whole)
                line = line[-LONGEST_LINE:]
        self._stop.set("standard input has closed", patience_s=PATIENCE_S)
        time.sleep(DEADLINE_S)
        os._exit(0)

    def _obey(self, line: bytes) -> None:
        """A line that is no order is answered too: nobody waits for an answer in vain."""
        if not line.strip():
            return None
        try:
            order = json.loads(line)
            folder = order["records"]
        except (ValueError, RecursionError, LookupError, TypeError):
            return self._answer({"event": "error", "message": f"no order: {line[:100]!r}"})
        if self._loop is None or not isinstance(folder, str | None):
            return self._answer({"event": "error", "message": f"records={folder!r:.200}: needs a folder"})
        done = asyncio.run_coroutine_threadsafe(self._record(folder), self._loop)
        return done.add_done_callback(lambda future: self._tell(future, folder))

    async def _record(self, folder: str | None) -> None:
        assert self._engine is not None
        self._engine.fail_open("the run has ended", refuse=True)
        await self._engine.ask("records", {"folder": folder})

    def _tell(self, done: Future[None], folder: str | None) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            self._answer({"event": "error", "message": str(error or "the server is going")})
        else:
            self._answer({"event": "records", "folder": folder})

    def _answer(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the parent has gone, which the pipe says
            self._announce(event)
