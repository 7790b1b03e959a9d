"""From an engine process that is loading to a server that answers, and to its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from engines.config import allowed_cores
from engines.model.tokenizer import from_description
from engines.routes import Route
from engines.server.app import Server, ServerConfig, app_runner
from engines.server.engine_client import EngineClient
from engines.server.engine_process import EngineProcess

SIGNAL_PATIENCE_S = 8.0  # how long a running iteration gets after a signal


@dataclass(frozen=True, slots=True)
class Secrets:
    """From environment variables, and nowhere else."""

    api_key: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)


class Service:
    """Engine and application of one server."""

    def __init__(
        self, server: Mapping[str, Any], routes: Sequence[Route], secrets: Secrets, process: EngineProcess
    ) -> None:
        """Waits until the model is loaded. Raises ConfigError, one line, for what cannot work, and
        EngineDied."""
        ready = process.wait_ready()
        self.facts: dict[str, Any] = ready.facts | {"pid": os.getpid()}
        if ready.facts["device"] == "cpu":
            _leave_cores(ready.facts["threads"], ready.facts["cpu_affinity"])
        self.engine = EngineClient(process.channel, ready.stats, process.how_it_ended)
        self._process = process
        self._tokenizer = from_description(ready.tokenizer)
        self._server_config = ServerConfig(
            model=ready.facts["model"],
            engine=routes[-1].engine.name,
            max_model_len=routes[-1].engine.max_model_len,
            vocab_size=ready.facts["vocab_size"],
            host=server["host"],
            api_key=secrets.api_key,
            admin_token=secrets.admin_token,
            routes=tuple(routes),
            metrics_tenants=server.get("metrics_tenants", 20),
        )

    def application(self) -> web.Application:
        return Server(self._server_config, self.engine, self._tokenizer).build()

    def close(self, patience_s: float) -> str | None:
        """End the engine process. What kept the last records from being written, or None; they are whole
        unless the last iteration outlasts our patience."""
        self.engine.close()
        return self._process.end(patience_s)


def _leave_cores(threads: int, cpu_affinity: list[int] | None) -> None:
    """Run beside the engine's threads, on cores that are not theirs (those of cpu_affinity, else the first).
    Left alone, the system often wakes the event loop on a core of theirs, right when the engine sends a
    report, and so the engine would wait."""
    allowed = allowed_cores()
    taken = allowed[:threads] if cpu_affinity is None else cpu_affinity
    rest = [core for core in allowed if core not in taken]
    if rest and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, rest)


class Stop:
    """Why and how patiently the server ends; may be set from any thread, before the loop runs too."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.patience_s = SIGNAL_PATIENCE_S
        self.exit_code = 0
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, reason: str, exit_code: int = 0, patience_s: float = SIGNAL_PATIENCE_S) -> None:
        if self.reason is None:
            self.reason, self.exit_code, self.patience_s = reason, exit_code, patience_s
        if self._loop is not None and self._event is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it is ending already
                self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        if self.reason is None:
            await self._event.wait()


async def serve(service: Service, listener: socket.socket, stop: Stop, on_ready: Callable[[], None]) -> int:
    """Answer until `stop` is set or the engine dies; the exit code. The listener must be bound already."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop, number)
    service.engine.on_death = lambda reason: stop.set(f"the engine has stopped: {reason}", exit_code=1)
    service.engine.start()
    runner = app_runner(service.application())
    await runner.setup()
    site = web.SockSite(runner, listener)
    await site.start()
    gc.collect()
    gc.freeze()  # modules stay for good: no collection has to look at them again
    on_ready()
    await stop.wait()
    await site.stop()
    service.engine.fail_open(f"the server is going: {stop.reason}", refuse=True)
    await runner.cleanup()
    failure = service.close(stop.patience_s)
    if failure is not None and stop.exit_code == 0:
        stop.reason, stop.exit_code = failure, 1
    return stop.exit_code


def _on_signal(stop: Stop, number: int) -> None:
    if stop.reason is not None:
        os._exit(128 + number)  # asked twice
    stop.set(signal.Signals(number).name)
