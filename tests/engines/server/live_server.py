"""A server in this event loop for tests: mock model, the production AppRunner, engine loop and channel, real
sockets."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from aiohttp import web

from engines.batch import RaggedBatch, StepResult
from engines.config import EngineConfig
from engines.model.tokenizer import ByteTokenizer
from engines.overlap import build_engine
from engines.routes import DEFAULT, Route, shares
from engines.server.app import Server, ServerConfig, app_runner
from engines.server.channel import Channel, socket_pair
from engines.server.engine_client import EngineClient
from engines.server.engine_loop import EngineLoop, ReportLog
from engines.shared_runner import SharedRunner
from engines.turns import Engines
from tests.support.mock_runner import VOCAB, MockRunner

PATIENCE_S = 8.0
"""How long a test waits for what must happen: never a measure of speed."""


class GatedRunner:
    """A pass waits for a permit of the test, until the gate is open. `entered` counts passes that began."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.entered = 0
        self.open = False
        self._permits = threading.Semaphore(0)

    def permit(self, passes: int) -> None:
        for _ in range(passes):
            self._permits.release()

    def open_gate(self) -> None:
        self.open = True
        self._permits.release(1000)

    def run(self, batch: RaggedBatch) -> StepResult:
        self.entered += 1
        time.sleep(0.0002)  # as a real pass does, leave the interpreter to the event loop for a while
        if not self.open and not self._permits.acquire(timeout=PATIENCE_S):
            raise TimeoutError("the test gave no permit")
        return self.inner.run(batch)


class LiveServer:
    """async with LiveServer(...) as server: server.port is open. At its end the engine must hold nothing."""

    def __init__(
        self,
        scheduler: str = "chunked",
        gated: bool = False,
        wrap: Callable[[Any], Any] | None = None,
        send_buffer: int | None = None,
        host: str = "127.0.0.1",
        api_key: str | None = None,
        admin_token: str | None = None,
        routes: Sequence[Route] = (),
        tenants: int = 20,
        **settings: Any,
    ) -> None:
        """`routes` stand before the default one and have the same pool size."""
        values: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_model_len": 512,
            "block_size": 4,
            "num_kv_blocks": 600,
        }
        values["max_num_batched_tokens"] = 32 if scheduler == "chunked" else 512
        self.config = EngineConfig(**({"name": scheduler, "scheduler": scheduler} | values | settings))
        runner: Any = MockRunner(self.config.num_kv_blocks or 0, self.config.block_size)
        self.runner = GatedRunner(wrap(runner) if wrap else runner)
        if not gated:
            self.runner.open_gate()
        log = ReportLog(None)
        every = [*routes, Route(DEFAULT, self.config, 1.0 - sum(route.kv_share for route in routes))]
        made, ids = {}, itertools.count()
        for route, (offset, blocks) in zip(every, shares(every, self.config.num_kv_blocks or 0), strict=True):
            own = log if route.name == DEFAULT else ReportLog(None, route.name, log)
            made[route.name] = build_engine(
                route.engine,
                SharedRunner(self.runner, offset, self.config.block_size),
                num_kv_blocks=blocks,
                eos_token_ids=(),
                step_log=own,  # type: ignore[arg-type]
                ids=ids,
            )
        self.engines = Engines(made)
        self.raw_engine = made[DEFAULT]
        ours, self._engine_end = socket_pair()
        loop = EngineLoop(self.engines, log, Channel(self._engine_end))
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._channel = Channel(ours)
        self.engine = EngineClient(self._channel, self.engines.stats(), lambda: "it has gone")
        vocab = min(VOCAB, 256)
        self.server = Server(
            ServerConfig(
                "mock",
                scheduler,
                self.config.max_model_len,
                vocab,
                host,
                api_key,
                admin_token,
                tuple(every),
                tenants,
            ),
            self.engine,
            ByteTokenizer(VOCAB),
        )
        self.metrics = self.server.metrics
        self._listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port: int = self._listener.getsockname()[1]

    def start_engine(self) -> None:
        """The production loop, with a thread in the place of a process."""
        self._thread.start()

    def end_engine(self, patience_s: float = PATIENCE_S) -> bool:
        self.engine.close()
        self._thread.join(patience_s)
        self._channel.close()
        return not self._thread.is_alive()

    def _run(self, loop: EngineLoop) -> None:
        loop.run()
        self._engine_end.close()

    async def __aenter__(self) -> LiveServer:
        self.start_engine()
        self.engine.start()
        self.app_runner = app_runner(self.server.build())
        await self.app_runner.setup()
        await web.SockSite(self.app_runner, self._listener).start()
        return self

    async def __aexit__(self, kind: Any, *_: object) -> None:
        self.runner.open_gate()
        self.engine.fail_open("the test is over")
        await self.app_runner.cleanup()
        if kind is None and self.engine.dead is None:
            await self.until(lambda: self.engine.stats.running == self.engine.stats.waiting == 0)
            assert self.engine.stats.kv_live == 0
        self.engine.close()
        assert await asyncio.to_thread(self.end_engine)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"never happened: {what} ({self.engine.stats})")
            await asyncio.sleep(0.001)
        for _ in range(2):  # reports that were sent before it came true are read
            await asyncio.sleep(0)


class RawClient:
    """An HTTP client that can be rude: one POST over a plain socket."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)

    async def post(self, path: str = "/v1/completions", **body: Any) -> None:
        data = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(self.socket, head.encode() + data)

    async def read(self, size: int = 65536) -> bytes:
        receive = asyncio.get_running_loop().sock_recv(self.socket, size)
        return await asyncio.wait_for(receive, PATIENCE_S)

    async def read_to(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            more = await self.read()
            assert more, f"the server closed after {data[-200:]!r}"
            data += more
        return data

    def leave(self, how: str) -> None:
        """fin: close; rst: close with a reset; half: close only our own direction."""
        if how == "half":
            self.socket.shutdown(socket.SHUT_WR)
            return
        if how == "rst":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
