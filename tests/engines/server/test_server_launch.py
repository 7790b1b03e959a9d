"""The life of the process: what ends it, and what it says then."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from engines.server.launch import Stop, serve
from tests.engines.server.live_server import PATIENCE_S, LiveServer, RawClient


class StubService:
    """A mock model in the place of a real one."""

    def __init__(self) -> None:
        self.live = LiveServer()
        self.engine = self.live.engine
        self.closed = False

    def application(self) -> Any:
        return self.live.server.build()

    def close(self) -> None:
        self.closed = True


async def serve_until(stop: Stop, service: StubService, then: Any) -> int:
    ready = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(serve(service, listener, stop, ready.set))  # type: ignore[arg-type]
    await ready.wait()
    client = RawClient(port)
    await client.post(prompt=[1], max_tokens=500, stream=True, ignore_eos=True, return_token_ids=True)
    await client.read_to(b"token_ids")
    then()
    rest = await client.read_to(b"0\r\n\r\n")
    assert b'data: {"error":' in rest  # the open answer says why it ends
    assert b"[DONE]" not in rest
    client.leave("fin")
    code = await asyncio.wait_for(task, PATIENCE_S)
    with pytest.raises(ConnectionRefusedError):
        RawClient(port)
    return code


def test_it_ends_with_1_and_the_reason_when_the_engine_dies(capfd: pytest.CaptureFixture[str]) -> None:
    stop, service = Stop(), StubService()

    def leak() -> None:
        raise RuntimeError("KV blocks have leaked")

    def break_it() -> None:
        service.live.raw_engine.step = leak  # type: ignore[method-assign]

    assert asyncio.run(serve_until(stop, service, break_it)) == 1
    assert stop.reason == "the engine has stopped: RuntimeError: KV blocks have leaked"
    assert service.closed
    assert "KV blocks have leaked" in capfd.readouterr().err


def test_it_ends_with_0_when_it_is_asked_to() -> None:
    stop, service = Stop(), StubService()
    assert asyncio.run(serve_until(stop, service, lambda: stop.set("SIGTERM"))) == 0
    assert service.closed


def test_it_does_not_start_to_serve_when_it_was_stopped_while_loading() -> None:
    async def scenario() -> int:
        stop, service = Stop(), StubService()
        stop.set("standard input has closed")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return await asyncio.wait_for(serve(service, listener, stop, lambda: None), PATIENCE_S)  # type: ignore[arg-type]

    assert asyncio.run(scenario()) == 0
