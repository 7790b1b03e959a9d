"""The life of the process: what ends it, and what it says then."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from engines.config import ConfigError
from engines.server.launch import Stop, serve
from engines.server.recordings import _step_log
from tests.engines.server.live_server import PATIENCE_S, LiveServer, RawClient


class StubService:
    """A mock model in the place of a real one."""

    def __init__(self) -> None:
        self.live = LiveServer()
        self.live.start_engine()
        self.engine = self.live.engine
        self.closed = False
        self.failure: str | None = None

    def application(self) -> Any:
        return self.live.server.build()

    def close(self, patience_s: float) -> str | None:
        self.closed = self.live.end_engine(patience_s)
        return self.failure


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
    assert (b'"code":"going"' in rest) == (b"the server is going" in rest)
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


def test_records_that_could_not_be_finished_are_said_and_are_no_success() -> None:
    async def scenario() -> None:
        stop, service = Stop(), StubService()
        service.failure = "--records: cannot be written (No space left on device)"
        assert await serve_until(stop, service, lambda: stop.set("SIGTERM")) == 1
        assert stop.reason == service.failure

    asyncio.run(scenario())


def test_an_answer_that_the_end_cuts_off_is_given_up_in_the_engine_too() -> None:
    stop, service = Stop(), StubService()
    assert asyncio.run(serve_until(stop, service, lambda: stop.set("SIGTERM"))) == 0
    assert service.live.raw_engine.counters.finished == {"abort": 1}
    left = service.live.raw_engine.stats()
    assert (left.running, left.waiting, left.kv_live) == (0, 0, 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_whole_answer_that_the_end_cuts_off_is_refused_as_those_that_wait(path: str) -> None:
    """Half computed, nothing of it sent: a status can still say so. The third one has no seat."""

    async def scenario() -> None:
        async with LiveServer("chunked", gated=True, max_num_seqs=2) as server:
            body: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
            chat = {"messages": [{"role": "user", "content": "a"}]}
            body |= chat if "chat" in path else {"prompt": [1, 2]}
            clients = [RawClient(server.port) for _ in range(3)]
            for client in clients:
                await client.post(path, **body)
            await server.until(lambda: server.metrics.received == 3)
            server.runner.permit(6)
            await server.until(lambda: server.engine.stats.output_tokens >= 6, "two have tokens")
            server.engine.fail_open("the server is going: SIGTERM", refuse=True)
            for client in clients:
                said = await client.read_to(b'"code":"going"')
                assert said.startswith(b"HTTP/1.1 503")
                assert b"Retry-After: " in said
                client.leave("fin")
            await server.until(lambda: server.metrics.refused["going"] == 3)
            server.runner.open_gate()

    asyncio.run(scenario())


def test_records_of_another_server_are_left_alone(tmp_path: Path) -> None:
    first = _step_log(tmp_path)
    with pytest.raises(ConfigError, match=r"steps\.arrow exists; give another folder"):
        _step_log(tmp_path)
    first.close()
