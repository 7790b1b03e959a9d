"""From a resolved configuration to a server that answers, and to its orderly end. Importing this imports
torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from aiohttp import web

from engines.config import ConfigError, EngineConfig
from engines.engine import Engine
from engines.runner import build_runner
from engines.server.app import Server, ServerConfig, app_runner
from engines.server.engine_thread import EngineThread
from engines.server.metrics import MeteredLog
from engines.step_log import StepLog

SIGNAL_PATIENCE_S = 8.0  # how long a running iteration gets after a signal


class Service:
    """Model, engine and application of one server. Raises ConfigError, one line, for what cannot work."""

    def __init__(
        self,
        config: Mapping[str, Any],
        engine_config: EngineConfig,
        api_key: str | None,
        records: Path | None,
    ) -> None:
        self._runner = build_runner(
            config["model"], engine_config, config["device"], config["dtype"], config["seed"]
        )
        loaded = self._runner.loaded
        self._log = MeteredLog(_step_log(records))
        engine = Engine(
            engine_config,
            self._runner,
            num_kv_blocks=self._runner.num_kv_blocks,
            eos_token_ids=loaded.tokenizer.eos_token_ids,
            seed=config["seed"],
            step_log=cast(StepLog, self._log),
        )
        vocab_size = min(loaded.config.vocab, loaded.tokenizer.vocab_size)
        self.engine = EngineThread(engine)
        self._server_config = ServerConfig(
            model=loaded.name,
            engine=engine_config.name,
            max_model_len=engine_config.max_model_len,
            vocab_size=vocab_size,
            host=config["server"]["host"],
            api_key=api_key,
        )
        self._tokenizer = loaded.tokenizer
        info = self._runner.info()
        self.facts = {
            "model": loaded.name,
            "tokenizer": loaded.tokenizer_ref,
            "vocab_size": vocab_size,
            "eos_token_ids": list(loaded.tokenizer.eos_token_ids),
            "max_model_len": engine_config.max_model_len,
            "num_kv_blocks": self._runner.num_kv_blocks,
            "block_size": engine_config.block_size,
            "scheduler": engine_config.scheduler,
            "pid": os.getpid(),
        } | {
            key: info[key] for key in ("device", "dtype", "threads", "attention", "determinism", "parameters")
        }

    def application(self) -> web.Application:
        return Server(self._server_config, self.engine, self._tokenizer, self._log).build()

    def close(self) -> str | None:
        """After the engine thread has ended. What kept the last records from being written, or None."""
        self._runner.close()
        try:
            self._log.close()
        except OSError as error:
            return f"--records: cannot be written ({error.strerror or error})"
        return None


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
    gc.freeze()  # weights and modules stay for good: no collection has to look at them again
    on_ready()
    await stop.wait()
    await site.stop()
    service.engine.fail_open(f"the server is going: {stop.reason}", refuse=True)
    await runner.cleanup()
    if service.engine.stop(stop.patience_s):
        failure = service.close()
        if failure is not None and stop.exit_code == 0:
            stop.reason, stop.exit_code = failure, 1
    else:  # a pass that does not end: what the records hold so far is on file
        _leave(stop)
    return stop.exit_code


def _on_signal(stop: Stop, number: int) -> None:
    if stop.reason is not None:
        os._exit(128 + number)  # asked twice
    stop.set(signal.Signals(number).name)


def _leave(stop: Stop) -> None:
    """Python would wait for, or crash in, a thread that is inside a pass."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(stop.exit_code)


def _step_log(records: Path | None) -> StepLog | None:
    if records is None:
        return None
    try:
        pa.array([0])  # pyarrow loads pandas at the first conversion: not in the middle of an iteration
        return StepLog(records)
    except FileExistsError as error:
        raise ConfigError(f"--records {records}: {error.filename} exists; give another folder") from None
    except OSError as error:
        raise ConfigError(f"--records {records}: cannot be written ({error.strerror})") from None
