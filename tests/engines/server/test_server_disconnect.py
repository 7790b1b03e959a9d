"""Clients that hang up, in every state and every way, over real sockets with the production AppRunner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from aiohttp import http_parser, web_protocol

from tests.engines.server.live_server import LiveServer, RawClient

LONG = {"model": "mock", "max_tokens": 300, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
PROMPT = [7] * 150  # five chunks of 32


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that leaves is no news: nothing above info, from anybody."""
    caplog.set_level(logging.INFO)
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []


async def hang_up(scheduler: str, state: str, how: str, stream: bool) -> None:
    async with LiveServer(scheduler, gated=True, max_num_seqs=1 if state == "queued" else 4) as server:
        other = None
        if state == "queued":
            other = RawClient(server.port)
            await other.post(prompt=PROMPT, stream=True, **LONG)
            await server.until(lambda: server.runner.entered == 1, "the other runs")
        client = RawClient(server.port)
        await client.post(prompt=PROMPT, stream=stream, **LONG)
        if state == "queued":
            await server.until(lambda: server.metrics.received == 2, "received")
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.waiting == 1, "it waits")
            await server.until(lambda: server.runner.entered == 2, "the next pass")
        elif state == "prefill":
            passes = 2 if scheduler == "chunked" else 0  # a part of the prompt is computed
            server.runner.permit(passes)
            await server.until(lambda: server.runner.entered == passes + 1, "prefill")
        else:
            server.runner.permit(8)
            await server.until(lambda: server.runner.entered == 9, "decode")
            if stream:
                await client.read_to(b"token_ids")
        before = server.engine.stats
        assert before.kv_live > 0 or server.runner.entered == 1

        client.leave(how)
        await server.until(lambda: server.metrics.ended["abort"] == 1, "the server saw it")
        server.runner.permit(1)  # the pass that was under way
        await server.until(lambda: server.engine.stats.finished.get("abort") == 1, "the engine let go")
        after = server.engine.stats
        assert after.steps - before.steps <= 2
        assert (after.running, after.waiting) == (0 if other is None else 1, 0)
        if other is None:
            assert after.kv_live == 0
        assert server.metrics.generated_tokens < 20  # it could not have ended by itself
        if other is not None:
            other.leave("fin")
        client.socket.close()


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("scheduler", ["continuous", "chunked"])
def test_slot_and_kv_are_free_within_two_steps(scheduler: str, state: str, how: str) -> None:
    asyncio.run(hang_up(scheduler, state, how, stream=True))


@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
def test_a_client_that_does_not_stream_is_missed_as_well(state: str) -> None:
    asyncio.run(hang_up("chunked", state, "fin", stream=False))


def test_a_static_batch_goes_on_without_who_left() -> None:
    async def scenario() -> None:
        async with LiveServer("static", gated=True, reservation="max_model_len") as server:
            leaver, stayer = RawClient(server.port), RawClient(server.port)
            await stayer.post(prompt=[1] * 20, stream=True, **(LONG | {"max_tokens": 6}))
            await server.until(lambda: server.runner.entered == 1)
            await leaver.post(prompt=[1] * 20, stream=True, **(LONG | {"max_tokens": 6}))
            await server.until(lambda: server.metrics.received == 2)
            leaver.leave("rst")
            await server.until(lambda: server.metrics.ended["abort"] == 1)
            server.runner.open_gate()
            answer = await stayer.read_to(b"[DONE]")
            assert answer.count(b'"token_ids"') == 1  # drained: one chunk
            stayer.leave("fin")

    asyncio.run(scenario())


def test_leaving_at_every_moment_of_an_answer() -> None:
    """Whatever the pass at which the client leaves, writing to it included, every request is counted once."""

    async def scenario() -> None:
        async with LiveServer("chunked") as server:
            for delay in range(30):
                client = RawClient(server.port)
                await client.post(prompt=[delay] * 40, stream=delay % 3 > 0, **(LONG | {"max_tokens": 20}))
                await asyncio.sleep(delay / 3000)
                client.leave(("fin", "rst", "half")[delay % 3])
                client.socket.close()
            await server.until(lambda: server.metrics.ended.total() == server.metrics.received)
            await server.until(lambda: server.engine.stats.running + server.engine.stats.waiting == 0)
            stats = server.engine.stats
            assert stats.received == sum(stats.finished.values())
            assert server.metrics.ended["error"] == 0
            assert server.metrics.ended["abort"] > 0

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_holds_little_and_stops_nobody() -> None:
    async def scenario() -> None:
        async with LiveServer(max_model_len=4096, num_kv_blocks=2100, send_buffer=4096) as server:
            lazy = RawClient(server.port, receive_buffer=4096)
            tokens = 3000
            await lazy.post(prompt=[1], stream=True, **(LONG | {"max_tokens": tokens}))
            held = 0
            answered = 0
            while server.engine.stats.finished.get("length", 0) <= answered:  # it computes on
                busy = RawClient(server.port)
                await busy.post(prompt=[2], stream=True, **(LONG | {"max_tokens": 40}))
                assert (await busy.read_to(b"[DONE]")).count(b'"token_ids"') > 1
                busy.leave("fin")
                answered += 1
                transports = [c.transport for c in server.app_runner.server.connections]
                held = max([held, *(t.get_write_buffer_size() for t in transports if t is not None)])
            assert answered >= 2
            assert 65536 < held < 3 * 65536  # the rest waits as numbers, not as text
            answer = await lazy.read_to(b"[DONE]")
            ids = sum(len(part.split(b"]")[0].split(b",")) for part in answer.split(b'"token_ids":[')[1:])
            assert ids == tokens
            lazy.leave("fin")

    asyncio.run(scenario())


def test_a_full_connection_that_is_half_closed_is_given_up() -> None:
    """Nothing more can be written and nothing more will be read: only the next output can notice."""

    async def scenario() -> None:
        async with LiveServer(max_model_len=4096, num_kv_blocks=2100, send_buffer=4096) as server:
            lazy = RawClient(server.port, receive_buffer=4096)
            await lazy.post(prompt=[1], stream=True, **(LONG | {"max_tokens": 4000}))

            def full() -> bool:
                connections = server.app_runner.server.connections
                return any(c.transport and c.transport.get_write_buffer_size() > 65536 for c in connections)

            await server.until(full, "the connection is full")
            lazy.leave("half")
            await server.until(lambda: server.engine.stats.running == 0, "the engine is free")
            assert server.engine.stats.finished == {"abort": 1}
            await server.until(lambda: server.metrics.ended["abort"] == 1, "it is counted")
            lazy.leave("fin")

    asyncio.run(scenario())


def test_a_broken_body_is_the_clients_fault_with_the_parser_in_python_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where aiohttp's extension is not built, the fault comes while a handler waits for the body."""
    monkeypatch.setattr(web_protocol, "HttpRequestParser", http_parser.HttpRequestParserPy)
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    )

    async def scenario() -> None:
        async with LiveServer() as server:
            client, send = RawClient(server.port), asyncio.get_running_loop().sock_sendall
            await send(client.socket, chunked)
            web = server.app_runner.server
            await server.until(lambda: any(c._request_in_progress for c in web.connections), "it is read")
            await send(client.socket, b"no size\r\n")
            assert b"the body cannot be read: " in await client.read_to(b"}}")
            assert server.metrics.invalid == {400: 1}
            client.leave("fin")

    asyncio.run(scenario())
