"""Admission, limits, routes and step dumps over HTTP, and what is logged and counted of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.config import EngineConfig
from engines.routes import Route
from engines.server.log import JsonFormatter
from tests.engines.server.live_server import LiveServer, RawClient
from tests.support.mock_runner import answer as oracle

TOKEN = {"Authorization": "Bearer secret-token"}
ASK = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}

Pair = tuple[LiveServer, aiohttp.ClientSession]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


@contextlib.asynccontextmanager
async def serving(scheduler: str = "chunked", **settings: Any) -> AsyncIterator[Pair]:
    async with (
        LiveServer(scheduler, **({"admin_token": "secret-token"} | settings)) as server,
        aiohttp.ClientSession(server.base_url) as http,
    ):
        yield server, http


async def ask(http: aiohttp.ClientSession, method: str, path: str, **more: Any) -> tuple[int, Any]:
    async with http.request(method, path, **({"headers": TOKEN} | more)) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, tenant: str = "", **body: Any) -> tuple[int, Any, Any]:
    mark = {"batchmark": {"tenant": tenant}}
    async with http.post("/v1/completions", json=ASK | mark | body) as response:
        return response.status, await response.json(), response.headers


async def samples(http: aiohttp.ClientSession) -> dict[tuple[str, str], float]:
    """By name and its own labels."""
    async with http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    found = {}
    for family in families:
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name", "le")}
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(orjson.loads(self.format(record)))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


@pytest.fixture
def log() -> Iterator[Lines]:
    """What server.log_format=json would write."""
    handler, logger = Lines(), logging.getLogger("batchmark")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


# -- admission


def test_a_refusal_says_when_to_come_again(log: Lines) -> None:
    async def scenario() -> None:
        async with serving(tenant_rate=0.1, tenant_burst=1) as (server, http):
            assert (await complete(http, "a"))[0] == 200
            status, body, headers = await complete(http, "a")
            assert (status, body["error"]["code"]) == (429, "rate_limit")
            assert body["error"]["type"] == "rate_limit_error"
            assert 1 < int(headers["Retry-After"]) <= 10  # computed: a token every ten seconds
            assert (await complete(http, "b"))[0] == 200
            figures = await samples(http)
            assert figures["vllm:admission_rejections_total", "reason=rate_limit"] == 1
            assert figures["batchmark:requests_by_tenant_total", "outcome=refused,tenant=a"] == 1
            assert server.engine.stats.refusals == {"rate_limit": 1}

    run(scenario())
    (line,) = log.of("refused")
    assert (line["tenant"], line["reason"]) == ("a", "rate_limit")
    assert len(log.of("request")) == 2


def test_above_the_reject_watermark_it_is_503() -> None:
    async def scenario() -> None:
        marks = {"kv_high_watermark": 0.02, "kv_reject_watermark": 0.05}
        async with serving(gated=True, num_kv_blocks=101, **marks) as (server, http):
            first = RawClient(server.port)
            await first.post(prompt=[5] * 30, max_tokens=20, stream=True, ignore_eos=True)
            await server.until(lambda: server.runner.entered == 1, "it runs")
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.kv_live > 5, "more than 5 % of the pool is live")
            status, body, headers = await complete_when_open(server, http)
            assert (status, body["error"]["code"]) == (503, "kv_reject_watermark")
            assert int(headers["Retry-After"]) >= 1
            first.leave("fin")

    async def complete_when_open(server: LiveServer, http: aiohttp.ClientSession) -> tuple[int, Any, Any]:
        asking = asyncio.create_task(complete(http))
        await server.until(lambda: server.metrics.received == 2, "received")
        server.runner.permit(1)  # commands are read between two passes
        return await asking

    run(scenario())


# -- limits


async def passes(server: LiveServer, condition: Callable[[], bool]) -> None:
    """One pass after the other, until it holds."""
    while not condition():
        entered = server.runner.entered
        server.runner.permit(1)
        await server.until(lambda entered=entered: server.runner.entered > entered or condition())


@pytest.mark.parametrize("path", ["/admin/limits", "/debug/steps"])
def test_without_a_token_these_paths_do_not_exist_and_with_one_it_is_asked_for(path: str) -> None:
    async def scenario() -> None:
        async with serving(admin_token=None) as (_, http):
            assert (await ask(http, "GET", path))[0] == 404
        async with serving(api_key="client-key") as (_, http):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer client-key"}):
                status, body = await ask(http, "GET", path, headers=headers)
                assert (status, body["error"]["code"]) == (401, "invalid_admin_token")
            assert (await ask(http, "GET", path))[0] == 200
            assert (await ask(http, "GET", "/v1/models"))[0] == 401  # nor does the token open the rest

    run(scenario())


def test_limits_change_while_it_runs(log: Lines) -> None:
    async def scenario() -> None:
        async with serving(gated=True, max_num_seqs=1) as (server, http):
            clients = [RawClient(server.port) for _ in range(3)]
            for client in clients:
                await client.post(prompt=[9] * 8, max_tokens=400, stream=True, ignore_eos=True)
            await server.until(lambda: server.metrics.received == 3)
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.waiting == 2, "two wait for the seat")
            change = asyncio.create_task(ask(http, "PATCH", "/admin/limits", json={"max_num_seqs": 3}))
            await passes(server, change.done)
            status, told = await change
            assert status == 200
            assert told["changed"] == {"max_num_seqs": {"old": 1, "new": 3}}
            await passes(server, lambda: server.engine.stats.running == 3)
            server.runner.open_gate()
            _, shown = await ask(http, "GET", "/admin/limits")
            assert shown["routes"][0]["limits"]["max_num_seqs"] == 3
            for client in clients:
                assert b"[DONE]" in await client.read_to(b"[DONE]")
                client.leave("fin")

    run(scenario())
    (line,) = log.of("limits_changed")
    assert line["changed"] == {"max_num_seqs": {"old": 1, "new": 3}}
    assert line["level"] == "warning"
    assert "secret-token" not in str(log.lines)


# -- step dumps


def test_each_steps_decision_can_be_looked_at() -> None:
    async def scenario() -> None:
        async with serving(max_num_seqs=1) as (_, http):
            await asyncio.gather(*(complete(http, max_tokens=6) for _ in range(3)))
            _, told = await ask(http, "GET", "/debug/steps?last=10000")
            steps = told["steps"]
            assert len(steps) == 18
            assert [step["step"] for step in steps] == list(range(18))
            assert steps[0]["kind"] == ["prefill"]
            assert steps[0]["tokens"] == [3]
            assert {step["kind"][0] for step in steps[1:6]} == {"decode"}
            assert {step["route"] for step in steps} == {"default"}
            assert "seats" in {step["head_blocked_by"] for step in steps}
            assert all((step["head_blocked_by"] is None) == (step["waiting"] == 0) for step in steps)
            _, told = await ask(http, "GET", "/debug/steps?last=2")
            assert told["steps"] == steps[-2:]
            for wrong in ("0", "-1", "10001", "x", "1.5", "1" * 5000):
                assert (await ask(http, "GET", f"/debug/steps?last={wrong}"))[0] == 400

    run(scenario())


def test_a_long_dump_comes_in_pieces() -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            await asyncio.gather(*(complete(http, max_tokens=300, ignore_eos=True) for _ in range(4)))
            _, told = await ask(http, "GET", "/debug/steps?last=10000")
            numbers = [step["step"] for step in told["steps"]]
            assert len(numbers) >= 300
            assert numbers == list(range(len(numbers)))

    run(scenario())


# -- routes


def routes_of(config: EngineConfig) -> list[Route]:
    static = replace(config, name="static", scheduler="static", reservation="max_model_len")
    return [
        Route("slow", static, 0.25, {"tenant": ("acme",)}),
        Route("alias", replace(config, max_num_seqs=2), 0.25, {"model": ("mock-small",)}),
        Route("chat", config, 0.1, {"path": ("/v1/chat/completions",)}),
    ]


def test_a_tenant_gets_another_scheduler_and_it_can_be_taken_back(log: Lines) -> None:
    async def scenario() -> None:
        routes = routes_of(LiveServer(max_num_batched_tokens=512).config)
        async with serving(routes=routes, num_kv_blocks=1200, max_num_batched_tokens=512) as (server, http):
            expected = oracle(ASK["prompt"], 4)
            for tenant in ("acme", "other"):
                status, body, _ = await complete(http, tenant)
                assert (status, body["choices"][0]["token_ids"]) == (200, expected)
            stats = {name: engine.stats() for name, engine in server.engines.by_name.items()}
            assert (stats["slow"].received, stats["default"].received) == (1, 1)
            assert (await complete(http, model="mock-small"))[1]["model"] == "mock-small"
            assert server.engines.by_name["alias"].stats().received == 1
            assert (await complete(http, model="mock-tiny"))[0] == 404
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            async with http.post("/v1/chat/completions", json=chat) as response:
                assert response.status == 200
            assert server.engines.by_name["chat"].stats().received == 1

            status, told = await ask(http, "PATCH", "/admin/limits?route=slow", json={"enabled": False})
            assert told["changed"] == {"enabled": {"old": True, "new": False}}
            await complete(http, "acme")
            assert server.engines.by_name["slow"].stats().received == 1
            assert server.engines.by_name["default"].stats().received == 2
            await ask(http, "PATCH", "/admin/limits?route=slow", json={"enabled": True, "max_num_seqs": 2})
            await complete(http, "acme")
            assert server.engines.by_name["slow"].stats().received == 2
            _, told = await ask(http, "GET", "/admin/limits")
            assert [r["limits"]["max_num_seqs"] for r in told["routes"]] == [2, 2, 4, 4]
            figures = await samples(http)
            assert figures["batchmark:requests_by_route_total", "outcome=length,route=slow"] == 2
            name = "batchmark:requests_by_model_total"
            assert figures[name, "model=mock-small,outcome=length"] == 1
            name = "batchmark:requests_by_endpoint_total"
            assert figures[name, "endpoint=/v1/chat/completions,outcome=length"] == 1
            _, told = await ask(http, "GET", "/debug/steps")
            assert {step["route"] for step in told["steps"]} == {"slow", "alias", "chat", "default"}

    run(scenario())
    routes = [line["route"] for line in log.of("request")]
    assert sorted(routes) == ["alias", "chat", "default", "default", "slow", "slow"]


def test_clients_leave_on_every_route() -> None:
    async def scenario() -> None:
        routes = routes_of(LiveServer(max_num_batched_tokens=512).config)
        async with serving(routes=routes, num_kv_blocks=1200, max_num_batched_tokens=512) as (server, _):
            for tenant in ("acme", "b"):
                client = RawClient(server.port)
                await client.post(
                    prompt=[1] * 20,
                    max_tokens=400,
                    stream=True,
                    ignore_eos=True,
                    batchmark={"tenant": tenant},
                )
                await server.until(lambda: server.engine.stats.running == 1, "it runs")
                client.leave("rst")
                await server.until(lambda: server.engine.stats.running == 0, "it is gone")
            assert server.engine.stats.finished == {"abort": 2}

    run(scenario())


# -- figures and warnings


def test_the_figures_of_a_thousand_tenants_are_bounded() -> None:
    async def scenario() -> None:
        async with serving(tenants=3) as (_, http):
            for i in range(40):
                await complete(http, f"tenant-{i}", max_tokens=1)
            figures = await samples(http)
            labels = [label for name, label in figures if name == "batchmark:requests_by_tenant_total"]
            expected = ["tenant-0", "tenant-1", "tenant-2", "other"]
            assert sorted(labels) == sorted(f"outcome=length,tenant={name}" for name in expected)
            assert figures["batchmark:requests_by_tenant_total", "outcome=length,tenant=other"] == 37
            assert figures["batchmark:tokens_by_tenant_total", "kind=prompt,tenant=other"] == 37 * 3
            name = "batchmark:time_to_first_token_seconds_by_tenant_count"
            assert figures[name, "tenant=other"] == 37

    run(scenario())


def test_queues_speeds_and_room_are_shown_and_fall_back_to_nothing() -> None:
    async def scenario() -> None:
        async with serving(gated=True, max_num_seqs=1, queue_timeout_ms=60_000) as (server, http):
            marks = [{"request_class": "chat", "tenant": f"t{i}"} for i in range(3)]
            clients = [RawClient(server.port) for _ in marks]
            for client, mark in zip(clients, marks, strict=True):
                await client.post(prompt=[9] * 8, max_tokens=20, stream=True, ignore_eos=True, batchmark=mark)
            await server.until(lambda: server.metrics.received == 3)
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.waiting == 2)
            await server.until(lambda: bool(server.engine.queues), "the queues are told")
            figures = await samples(http)
            assert figures["vllm:num_requests_waiting_by_reason", "reason=capacity"] == 2
            server.runner.open_gate()
            for client in clients:
                await client.read_to(b"[DONE]")
                client.leave("fin")
            await server.until(lambda: server.engine.stats.running == 0)
            figures = await samples(http)
            assert figures["batchmark:queue_waiting", "route=default"] == 0
            assert figures["batchmark:queue_running", "route=default"] == 0
            assert figures["batchmark:queue_admissible_requests", "route=default"] == 1
            assert figures["batchmark:prefill_tokens_total", ""] == 24
            assert figures["batchmark:decode_tokens_total", ""] == 3 * 19
            assert figures["batchmark:kv_blocks_released_total", ""] == 3 * 7
            for name in ("prefill_tokens", "decode_tokens", "released_blocks"):
                assert figures[f"batchmark:{name}_per_second", ""] > 0
            assert figures["batchmark:admission_waits_total", "reason=queue"] >= 1
            assert (
                figures["batchmark:requests_by_request_class_total", "outcome=length,request_class=chat"] == 3
            )

    run(scenario())


def test_a_pass_without_memory_is_counted() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    class Full:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def run(self, batch: Any) -> Any:
            raise OutOfMemoryError("CUDA out of memory")

    async def scenario() -> None:
        async with serving(wrap=Full) as (_, http):
            assert (await complete(http))[0] == 500
            assert (await samples(http))["batchmark:out_of_memory_total", ""] == 1

    run(scenario())


def test_a_client_that_will_not_wait_as_long_as_the_server_may_is_told(log: Lines) -> None:
    async def scenario() -> None:
        async with serving(queue_timeout_ms=5000) as (_, http):
            for headers, warned in (
                ({"X-Request-Timeout": "2"}, True),
                ({"X-Stainless-Read-Timeout": "2"}, True),
                ({"X-Request-Timeout": "5"}, False),
                ({"X-Stainless-Read-Timeout": "never"}, False),
                ({}, False),
            ):
                async with http.post("/v1/completions", json=ASK, headers=headers) as response:
                    assert response.status == 200
                    warning = response.headers.get("X-Batchmark-Warning", "")
                    assert ("engine.queue_timeout_ms=5000" in warning) == warned
            headers = {"X-Request-Timeout": "soon"}
            async with http.post("/v1/completions", json=ASK, headers=headers) as response:
                assert response.status == 400
                assert "X-Request-Timeout" in (await response.json())["error"]["message"]
            assert (await samples(http))["batchmark:client_timeout_warnings_total", ""] == 2

    run(scenario())
    assert len(log.of("client_timeout")) == 2


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"best_of": 3}, {"use_beam_search": True}, {"n": 2, "best_of": 2}]
)
def test_several_answers_to_one_request_are_refused(more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serving() as (_, http):
            status, body, _ = await complete(http, **more)
            assert status == 400
            assert body["error"]["param"] in more

    run(scenario())


def test_no_line_of_the_log_holds_a_prompt_an_answer_or_a_key(log: Lines) -> None:
    async def scenario() -> None:
        async with serving(api_key="client-key") as (_, http):
            http.headers["Authorization"] = "Bearer client-key"
            text = "the quick brown fox"
            for body in ({"prompt": text, "max_tokens": 8}, {"prompt": text, "colour": text}, {"n": text}):
                async with http.post("/v1/completions", json=body):
                    pass

    run(scenario())
    assert [line["event"] for line in log.lines] == ["request", "invalid", "invalid"]
    written = str(log.lines)
    assert "fox" not in written
    assert "client-key" not in written
    (line,) = log.of("request")
    assert line["outcome"] in ("length", "stop")
    assert line["output_tokens"] == 8
    assert line["prompt_tokens"] == 19
    assert 0 < line["ttft_ms"] <= line["e2e_ms"]
