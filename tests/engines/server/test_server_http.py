"""Answers and refusals over HTTP: a mock model, a real socket, the production AppRunner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiohttp
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.server.detokenizer import Detokenizer
from tests.engines.server.live_server import LiveServer, RawClient
from tests.support.mock_runner import answer as oracle

PROMPT = list(b"Tell me a story")


Pair = tuple[LiveServer, aiohttp.ClientSession]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


@contextlib.asynccontextmanager
async def serving(scheduler: str = "chunked", **settings: Any) -> AsyncIterator[Pair]:
    async with (
        LiveServer(scheduler, **settings) as server,
        aiohttp.ClientSession(server.base_url) as http,
    ):
        yield server, http


async def whole(http: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def events(http: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """The data of every event of a stream; the last one must be [DONE], which is left out."""
    async with http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        raw = await response.read()
    parts = raw.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [orjson.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def scraped(raw: bytes) -> dict[str, float]:
    """Every sample of /metrics by name, summed over labels; with its reason where it has one."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(raw.decode()):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason") or sample.labels.get("reason")
            for name in {sample.name, f"{sample.name}/{reason}" if reason else sample.name}:
                found[name] = found.get(name, 0) + sample.value
    return found


@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked"])
def test_stream_and_whole_answer_are_the_same_and_right(scheduler: str) -> None:
    async def scenario() -> None:
        async with serving(scheduler, reservation="max_model_len") as (_, http):
            expected = oracle(PROMPT, 60)
            detokenizer = Detokenizer(lambda t: bytes([t]) if t < 256 else b"")
            text = detokenizer.push(expected).text + detokenizer.flush()[0]
            stop = text[4:6]
            for more, finish in (
                ({}, "length"),
                ({"batchmark": {"stop_after": 40}}, "stop"),
                ({"stop": stop}, "stop"),
            ):
                body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "return_token_ids": True} | more
                status, single = await whole(http, **body)
                assert status == 200
                chunks = await events(http, stream_options={"include_usage": True}, **body)
                choice = single["choices"][0]
                ids = [i for chunk in chunks for c in chunk["choices"] for i in c["token_ids"]]
                assert ids == choice["token_ids"] == expected[: len(ids)]
                assert text_of(chunks) == choice["text"]
                assert chunks[-1]["choices"] == []
                usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(ids)}
                assert (
                    chunks[-1]["usage"] == single["usage"] == usage | {"total_tokens": len(PROMPT) + len(ids)}
                )
                assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"] == finish
                assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2])
                if "stop" in more:
                    assert choice["text"] == text[: text.index(stop)]
                else:
                    assert len(ids) == (40 if more else 60)
                if scheduler == "static":
                    assert len(chunks) == 2  # drained: all tokens at once, then the usage
                assert all("token_ids" in c for chunk in chunks for c in chunk["choices"])

    run(scenario())


@pytest.mark.parametrize("scheduler", ["static", "chunked"])
@pytest.mark.parametrize("salt", ["none", "tenant"])
def test_usage_says_what_the_prefix_cache_had(scheduler: str, salt: str) -> None:
    """Blocks of four tokens: of 10 the cache can have 8; of another tenant's, with salt, none."""

    async def scenario() -> None:
        settings = {"reservation": "max_model_len", "prefix_cache": True, "prefix_cache_salt": salt}
        async with serving(scheduler, **settings) as (server, http):
            seen = []
            for tenant in ("a", "a", "b"):
                body = {"prompt": PROMPT[:10], "max_tokens": 4, "batchmark": {"tenant": tenant}}
                _, single = await whole(http, **body)
                seen.append(single["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert seen == ([0, 8, 0] if salt == "tenant" else [0, 8, 8])
            for more in ({}, {"stop": single["choices"][0]["text"][:2]}):  # the server ends that one itself
                more |= {"batchmark": {"tenant": "a"}, "stream_options": {"include_usage": True}}
                chunks = await events(http, prompt=PROMPT[:10], max_tokens=4, **more)
                assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
            chat = {"messages": [{"role": "user", "content": "tell me more"}], "max_tokens": 2}
            for expected in (False, True):
                async with http.post("/v1/chat/completions", json=chat) as response:
                    usage = (await response.json())["usage"]
                assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == expected
            await server.until(lambda: server.engine.stats.running == 0)
            hits = server.engine.stats.prefix_cache_hits
            assert hits == sum(seen) + 16 + usage["prompt_tokens_details"]["cached_tokens"]

    run(scenario())


def test_a_chunk_without_visible_text_is_sent_only_with_ids() -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
            for chunk in (await events(http, **body))[:-1]:
                assert chunk["choices"][0]["text"] != ""
                assert "token_ids" not in chunk["choices"][0]
            assert any(
                c["choices"][0]["text"] == "" for c in await events(http, return_token_ids=True, **body)
            )

    run(scenario())


def test_the_role_of_a_chat_leaves_with_the_first_token() -> None:
    async def scenario() -> None:
        async with serving(gated=True) as (server, http):
            message = {"role": "user", "content": "hi"}
            body = {"messages": [message], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
            raw = RawClient(server.port)
            await raw.post("/v1/chat/completions", stream=True, **body)
            await server.until(lambda: server.runner.entered == 1)
            with pytest.raises(TimeoutError):  # no header before the first token
                await asyncio.wait_for(raw.read(), 0.05)
            server.runner.permit(1)
            first = await raw.read()
            assert first.startswith(b"HTTP/1.1 200")
            assert first.index(b'"role":"assistant"') < first.index(b'"token_ids"')
            server.runner.open_gate()
            await raw.read_to(b"[DONE]")
            chunks = await events(http, "/v1/chat/completions", **body)
            _, single = await whole(http, "/v1/chat/completions", **body)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            content = "".join(delta.get("content", "") for delta in deltas)
            assert single["choices"][0]["message"] == {"role": "assistant", "content": content}
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "words"),
    [
        ("GET", "/nowhere", b"", 404, "no such path"),
        ("GET", "/v1/completions", b"", 405, "needs POST"),
        ("POST", "/v1/completions", b"{", 400, "not JSON"),
        ("POST", "/v1/completions", b'{"prompt":"\xff"}', 400, "UTF-8"),
        ("POST", "/v1/completions", b"[]", 400, "JSON object"),
        ("POST", "/v1/completions", b'{"prompt":"x","n":2}', 400, "n=2"),
        ("POST", "/v1/completions", b'{"prompt":"x","model":"y"}', 404, '"y"'),
        ("POST", "/v1/completions", b'{"prompt":"' + b"x" * 200_000 + b'"}', 413, "max_model_len=512"),
        ("POST", "/v1/completions", b'{"prompt":"' + b"x" * 600 + b'"}', 400, "max_model_len=512"),
        ("POST", "/v1/chat/completions", b"{}", 400, "messages=null"),
        ("GET", "/v1/models/other", b"", 404, '"mock"'),
    ],
)
def test_errors_have_openais_body(method: str, path: str, data: bytes, status: int, words: str) -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            async with http.request(method, path, data=data) as response:
                assert response.status == status
                error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert words in error["message"]
            assert (await whole(http, prompt="x", max_tokens=1))[0] == 200  # and it serves on

    run(scenario())


def test_a_body_that_comes_to_nothing_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with serving() as (server, http):
            client = RawClient(server.port)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            await asyncio.get_running_loop().sock_sendall(client.socket, head)
            client.leave("fin")
            assert (await whole(http, prompt="x", max_tokens=1))[0] == 200
            await server.until(lambda: not any(c.transport for c in server.app_runner.server.connections[1:]))

    run(scenario())


def test_what_is_not_http_is_refused_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving() as (server, http):
            for garbage in (
                b"\x16\x03\x01\x02\x00\r\n\r\n",
                b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
                b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
                b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
            ):
                client = RawClient(server.port)
                await asyncio.get_running_loop().sock_sendall(client.socket, garbage)
                assert (await client.read()).startswith(b"HTTP/1.0 400")
                client.leave("fin")
            assert (await whole(http, prompt="x", max_tokens=1))[0] == 200

    run(scenario())
    assert caplog.records == []


def test_a_body_that_is_not_what_its_headers_say_is_refused_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with serving() as (server, http):
            headers = {"Content-Encoding": "gzip", "Connection": "close"}
            async with http.post("/v1/completions", data=b"junk", headers=headers) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"].startswith("the body cannot be read: ")
            assert (await whole(http, prompt="x", max_tokens=1))[0] == 200
            assert server.metrics.invalid == {400: 1}

    run(scenario())
    assert caplog.records == []


def test_only_local_names_reach_a_local_server() -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            for headers, status in (
                ({"Host": "localhost:80"}, 200),
                ({"Host": "[::1]:8000"}, 200),
                ({"Host": "evil.example"}, 403),
                ({"Host": "localhost.evil.example"}, 403),
                ({"Origin": "http://evil.example"}, 403),
                ({"Origin": "http://localhost:3000"}, 200),
                ({"Origin": "null"}, 403),
            ):
                async with http.get("/v1/models", headers=headers) as response:
                    assert response.status == status, headers
        async with (
            serving(host="0.0.0.0") as (_, http),
            http.get("/health", headers={"Host": "box"}) as response,
        ):
            assert response.status == 200

    run(scenario())


def test_an_api_key_is_asked_for() -> None:
    async def scenario() -> None:
        async with serving(api_key="s3cret") as (_, http):
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({"Authorization": "s3cret"}, 401),
                ({"Authorization": "Bearer s3cret"}, 200),
            ):
                async with http.get("/v1/models", headers=headers) as response:
                    assert response.status == status
                    assert "s3cret" not in await response.text()
            async with http.get("/health") as response:
                assert response.status == 200

    run(scenario())


def test_refusals_are_statuses_and_everything_is_counted_once() -> None:
    async def scenario() -> None:
        async with serving(
            gated=True, max_num_seqs=1, max_waiting_requests=1, queue_timeout_ms=150.0, num_kv_blocks=50
        ) as (server, http):
            body = {"prompt": [1] * 10, "max_tokens": 5, "temperature": 0}
            first = asyncio.create_task(whole(http, **body))
            await server.until(lambda: server.runner.entered == 1)
            second = asyncio.create_task(whole(http, **body))
            await server.until(lambda: server.metrics.received == 2)
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.waiting == 1)
            third = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await server.until(lambda: server.metrics.received == 3)
            server.runner.permit(1)
            async with await third as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
                refused = (await response.json())["error"]
            assert refused["code"] == "queue_full"
            assert "engine.max_waiting_requests" in refused["message"]
            await asyncio.sleep(0.2)  # longer than the queue's timeout
            server.runner.open_gate()
            assert (await first)[0] == 200
            status, late = await second
            assert (status, late["error"]["code"]) == (503, "queue_timeout")
            status, never = await whole(http, prompt=[1] * 100, max_tokens=200)
            assert (status, never["error"]["code"]) == (400, "never_fits")
            assert (await whole(http, **body, n=3))[0] == 400
            assert (await whole(http, **body, stop=chr(oracle([1] * 10, 1)[0] % 256)))[0] == 200
            async with http.get("/metrics") as response:
                assert response.content_type == "text/plain"
                seen = scraped(await response.read())
            assert seen["batchmark:requests_received_total"] == 5
            refusals = {
                k.split("/")[1]: v
                for k, v in seen.items()
                if k.startswith("vllm:admission_rejections_total/")
            }
            assert refusals == {"queue_full": 1, "queue_timeout": 1, "never_fits": 1}
            assert seen["vllm:request_success_total"] == 2
            assert seen["vllm:request_success_total"] + sum(refusals.values()) == 5
            assert seen["batchmark:requests_invalid_total"] == 1
            assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
            assert seen["vllm:kv_cache_usage_perc"] == 0
            assert seen["vllm:time_to_first_token_seconds_count"] == 2
            assert seen["vllm:request_queue_time_seconds_count"] == 2
            assert seen["vllm:iteration_tokens_total_count"] == seen["batchmark:steps_total"] > 2
            assert seen["vllm:generation_tokens_total"] >= 5

    run(scenario())


def test_clients_with_the_same_id_do_not_cross() -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            same = {"run": "R", "id": "r0", "attempt": 0}
            prompts = [[n] * (n + 3) for n in range(6)]
            asked = [
                whole(http, prompt=p, max_tokens=20, temperature=0, return_token_ids=True, batchmark=same)
                for p in prompts
            ]
            for prompt, (_, body) in zip(prompts, await asyncio.gather(*asked), strict=True):
                assert body["choices"][0]["token_ids"] == oracle(prompt, 20)

    run(scenario())


def test_a_pass_that_fails_is_an_error_to_its_clients_only() -> None:
    class Failing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.fail = False

        def run(self, batch: Any) -> Any:
            if self.fail:
                self.fail = False
                raise RuntimeError("the device is on fire")
            return self.inner.run(batch)

    async def scenario() -> None:
        async with serving(gated=True, wrap=Failing) as (server, http):
            client = RawClient(server.port)
            await client.post(prompt=[1, 2], max_tokens=9, stream=True, return_token_ids=True)
            await server.until(lambda: server.runner.entered == 1)
            server.runner.permit(1)
            await client.read_to(b"token_ids")
            await server.until(lambda: server.runner.entered == 2)
            server.runner.inner.fail = True
            server.runner.permit(1)
            broken = await client.read_to(
                b"0\r\n\r\n"
            )  # the status is out: the stream says it, and has no [DONE]
            assert b'data: {"error":' in broken
            assert b"on fire" in broken
            assert b"[DONE]" not in broken
            task = asyncio.create_task(whole(http, prompt=[1, 2], max_tokens=9))
            await server.until(lambda: server.runner.entered == 3)
            server.runner.inner.fail = True
            server.runner.open_gate()
            status, body = await task
            assert (status, body["error"]["type"]) == (500, "server_error")
            assert (await whole(http, prompt=[1, 2], max_tokens=9))[0] == 200
            assert server.metrics.ended["error"] == 2

    run(scenario())


def test_when_the_engine_dies_everybody_learns_it(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(gated=True) as (server, http):
            reasons: list[str] = []
            server.engine.on_death = reasons.append

            def leak() -> None:
                raise RuntimeError("KV blocks have leaked")

            asked = asyncio.create_task(whole(http, prompt=[1], max_tokens=5))
            await server.until(lambda: server.runner.entered == 1)
            server.raw_engine.step = leak  # type: ignore[method-assign]
            server.runner.open_gate()
            status, body = await asked
            assert status == 500
            assert "KV blocks have leaked" in body["error"]["message"]
            assert reasons == ["RuntimeError: KV blocks have leaked"]
            for path in ("/health", "/v1/completions"):
                async with http.request(
                    "POST" if "v1" in path else "GET", path, json={"prompt": "x"}
                ) as response:
                    assert response.status == 503
                    assert "KV blocks have leaked" in (await response.json())["error"]["message"]

    run(scenario())
    assert "KV blocks have leaked" in capfd.readouterr().err


def test_tokens_leave_without_delay() -> None:
    """TCP_NODELAY on every connection: a token must not wait for the acknowledgement of the last one."""
    import socket

    async def scenario() -> None:
        async with serving() as (server, http):
            assert (await whole(http, prompt="x", max_tokens=1))[0] == 200
            connections = [c.transport for c in server.app_runner.server.connections if c.transport]
            assert connections
            for transport in connections:
                peer = transport.get_extra_info("socket")
                assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    run(scenario())
