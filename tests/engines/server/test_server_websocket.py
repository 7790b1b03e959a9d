"""Answers over a WebSocket: the messages of the stream of events, refusals, hang-ups, over real sockets with
the production AppRunner."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import WSMsgType

from tests.engines.server.live_server import LiveServer, RawClient
from tests.engines.server.test_server_control import samples
from tests.engines.server.test_server_http import run, serving

PATH = "/v1/completions/ws"
ASK = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
LONG = {"prompt": [7] * 150, "max_tokens": 300, "temperature": 0, "return_token_ids": True}
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def talk(http: aiohttp.ClientSession, path: str = PATH, **body: Any) -> tuple[list[str], int | None]:
    """All messages of one answer, and the close code."""
    async with http.ws_connect(path) as ws:
        await ws.send_str(orjson.dumps(ASK | body).decode())
        return [message.data async for message in ws], ws.close_code


async def told(http: aiohttp.ClientSession, **body: Any) -> tuple[dict[str, Any], int | None]:
    """The one message of a refusal."""
    (message,), code = await talk(http, **body)
    return orjson.loads(message), code


async def events(http: aiohttp.ClientSession, path: str, **body: Any) -> list[str]:
    async with http.post(path, json=ASK | body | {"stream": True}) as response:
        text = await response.text()
    return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]


def folded(chunks: list[str]) -> dict[str, Any]:
    """An answer without what differs between two: its name, and how many tokens a pass of the engine gave."""
    assert chunks[-1] == "[DONE]"
    *some, last, usage = [orjson.loads(chunk) for chunk in chunks[:-1]]
    choices = [chunk["choices"][0] for chunk in [*some, last]]
    return {
        "keys": [sorted(chunk) for chunk in (some[0], last, usage)],
        "kinds": {(chunk["object"], chunk["model"]) for chunk in [*some, last, usage]},
        "role": choices[0].get("delta", {}).get("role"),
        "ids": [token for choice in choices for token in choice.get("token_ids", [])],
        "text": "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices),
        "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": usage["usage"],
    }


@pytest.mark.parametrize("chat", [False, True])
def test_its_messages_are_the_events_of_the_stream(chat: bool) -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            path, body = "/v1/completions", {"stream_options": {"include_usage": True}}
            if chat:
                path = "/v1/chat/completions"
                body |= {"prompt": None, "messages": [{"role": "user", "content": "hi"}]}
            messages, code = await talk(http, path + "/ws", **body)
            wanted = await events(http, path, **body)
            assert folded(messages) == folded(wanted)
            assert len(folded(messages)["ids"]) == 5
            assert code == 1000
            seen = await samples(http)
            for endpoint in (path, path + "/ws"):
                name = "batchmark:requests_by_endpoint_total"
                assert seen[name, f"endpoint={endpoint},outcome=length"] == 1

    run(scenario())


def test_what_goes_wrong_has_the_status_that_it_would_have_had() -> None:
    async def scenario() -> None:
        async with serving() as (server, http):
            for body, status, param in (
                ({"max_tokens": 0}, 400, "max_tokens"),
                ({"model": "other"}, 404, "model"),
                ({"stream": False}, 400, "stream"),
                ({"prompt": [1] * 600}, 400, None),
            ):
                error, code = await told(http, **body)
                assert (error["status"], code) == (status, 4000 + status)
                assert error["error"]["param"] == param
            assert server.metrics.invalid == {400: 2, 404: 1}

    run(scenario())


def test_a_refusal_says_when_to_come_again() -> None:
    async def scenario() -> None:
        async with serving(gated=True, max_num_seqs=1, max_waiting_requests=1) as (server, http):
            others = [asyncio.create_task(talk(http))]
            await server.until(lambda: server.runner.entered == 1)
            others.append(asyncio.create_task(talk(http)))
            await server.until(lambda: server.metrics.received == 2)
            late = asyncio.create_task(told(http))
            await server.until(lambda: server.metrics.received == 3)
            server.runner.permit(1)
            error, code = await late
            assert (error["status"], code, error["error"]["code"]) == (503, 4503, "queue_full")
            assert error["retry_after_s"] >= 1
            server.runner.open_gate()
            assert [code for _, code in await asyncio.gather(*others)] == [1000, 1000]

    run(scenario())


@pytest.mark.parametrize(
    ("send", "code"),
    [
        (lambda ws: ws.send_bytes(b"{}"), 4400),
        (lambda ws: ws.send_str("{oops"), 4400),
        (lambda ws: ws.send_str("[]"), 4400),
        (lambda ws: ws.send_str("x" * 200_000), 1009),
        (lambda ws: ws.send_frame(b"\xff\xfe", WSMsgType.TEXT), 1007),
    ],
)
def test_what_is_no_request_is_refused_and_counted(send: Any, code: int) -> None:
    async def scenario() -> None:
        async with serving() as (server, http), http.ws_connect(PATH) as ws:
            await send(ws)
            async for message in ws:
                assert orjson.loads(message.data)["status"] == 400
            assert ws.close_code == code
            assert server.metrics.invalid == {413 if code == 1009 else 400: 1}
            assert server.metrics.received == 0

    run(scenario())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
    ],
)
def test_a_handshake_is_refused_as_a_request_is(headers: dict[str, str], status: int) -> None:
    async def scenario() -> None:
        async with serving(api_key="right") as (_, http):
            headers_ = {"Authorization": "Bearer right"} | headers
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(PATH, headers=headers_)
            assert refused.value.status == status
            async with http.get(PATH, headers={"Authorization": "Bearer right"}) as response:  # no handshake
                assert response.status == 400

    run(scenario())


def test_a_page_of_another_site_is_refused_wherever_the_server_listens() -> None:
    async def scenario() -> None:
        async with serving(host="0.0.0.0") as (_, http):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(PATH, headers={"Origin": "http://evil.example"})
            async with http.ws_connect(PATH, headers={"Origin": "http://127.0.0.1:1"}):
                pass

    run(scenario())


def client_frame(payload: bytes, opcode: int = 1) -> bytes:
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([0x80 | opcode]) + length + bytes(4) + payload  # a mask of zeros


async def ask_raw(server: LiveServer, **body: Any) -> RawClient:
    client = RawClient(server.port)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client.socket, HANDSHAKE.format(path=PATH).encode())
    await client.read_to(b"\r\n\r\n")
    await loop.sock_sendall(client.socket, client_frame(orjson.dumps(LONG | body)))
    return client


WAYS = [
    *itertools.product(["queued", "prefill", "decode"], ["fin", "rst", "half", "close frame"]),
    ("decode", "second request"),
]


@pytest.mark.parametrize(("state", "how"), WAYS)
def test_whoever_leaves_frees_slot_and_kv(state: str, how: str) -> None:
    async def scenario() -> None:
        queued = state == "queued"
        async with LiveServer("chunked", gated=True, max_num_seqs=1 if queued else 4) as server:
            if queued:
                other = await ask_raw(server)
                await server.until(lambda: server.runner.entered == 1, "the other runs")
            client = await ask_raw(server)
            await server.until(lambda: server.metrics.received == 1 + queued, "received")
            if queued:
                server.runner.permit(1)
                await server.until(lambda: server.engine.stats.waiting == 1, "it waits")
            else:
                passes = 2 if state == "prefill" else 8
                server.runner.permit(passes)
                await server.until(lambda: server.runner.entered == passes + 1, state)
                if state == "decode":
                    await client.read_to(b"token_ids")
            if how in ("close frame", "second request"):
                frame = client_frame(b"\x03\xe8", 8) if how == "close frame" else client_frame(b"{}")
                await asyncio.get_running_loop().sock_sendall(client.socket, frame)
            else:
                client.leave(how)
            await server.until(lambda: server.metrics.ended["abort"] == 1, "the server saw it")
            server.runner.permit(1)  # the pass that was under way
            await server.until(lambda: server.engine.stats.finished.get("abort") == 1, "the engine let go")
            stats = server.engine.stats
            assert (stats.running, stats.waiting) == (1 if queued else 0, 0)
            assert queued or stats.kv_live == 0
            if queued:
                other.leave("fin")
            client.socket.close()

    asyncio.run(scenario())


def test_a_ping_is_answered_while_an_answer_is_under_way() -> None:
    async def scenario() -> None:
        async with LiveServer("chunked", gated=True) as server:
            client = await ask_raw(server, max_tokens=4)
            await server.until(lambda: server.runner.entered == 1)
            await asyncio.get_running_loop().sock_sendall(client.socket, client_frame(b"are you there", 9))
            assert b"are you there" in await client.read_to(b"are you there")
            server.runner.open_gate()
            assert b'"finish_reason":"length"' in await client.read_to(b"[DONE]")
            client.leave("fin")
            await server.until(lambda: server.metrics.ended["length"] == 1)

    asyncio.run(scenario())


def test_an_engine_that_fails_in_the_middle_says_so_as_the_last_message() -> None:
    async def scenario() -> None:
        async with serving(gated=True) as (server, http), http.ws_connect(PATH) as ws:
            await ws.send_str(orjson.dumps(LONG | {"prompt": [1]}).decode())
            server.runner.permit(3)
            assert "token_ids" in (await ws.receive()).data
            server.engine.fail_open("it broke")
            last = [message.data async for message in ws][-1]
            assert orjson.loads(last)["error"]["message"].endswith("it broke")
            assert ws.close_code == 4500
            server.runner.open_gate()

    run(scenario())


@pytest.mark.parametrize("asked", [False, True])
def test_a_client_that_says_or_takes_nothing_is_disconnected(asked: bool) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {"max_model_len": 8192, "num_kv_blocks": 4200, "send_buffer": 4096}
        async with LiveServer(stream_idle_timeout_ms=150.0, **settings) as server:
            if not asked:
                client = RawClient(server.port)
                await asyncio.get_running_loop().sock_sendall(
                    client.socket, HANDSHAKE.format(path=PATH).encode()
                )
                await client.read_to(b"\r\n\r\n")
                assert await client.read() == b""
                return
            lazy = RawClient(server.port, receive_buffer=4096)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(lazy.socket, HANDSHAKE.format(path=PATH).encode())
            await lazy.read_to(b"\r\n\r\n")
            await loop.sock_sendall(lazy.socket, client_frame(orjson.dumps(LONG | {"max_tokens": 8000})))
            await server.until(lambda: server.metrics.idle_streams == 1, "it was given up")
            await server.until(lambda: server.engine.stats.running == 0, "the engine is free")
            assert server.engine.stats.finished == {"abort": 1}
            lazy.leave("fin")

    asyncio.run(scenario())
