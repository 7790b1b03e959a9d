"""Clients that leave, or stop reading, under every preset of harness/conf/engine, and in the states that only
some of them have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from engines.config import EngineConfig
from engines.server.engine_client import Stream
from harness.conf import choices, compose
from tests.engines.server.live_server import LiveServer, RawClient

PRESETS = [name for name in choices("engine") if name != "openai"]
LONG = {"max_tokens": 300, "temperature": 0, "return_token_ids": True, "ignore_eos": True, "stream": True}
PROMPT = [7] * 150


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that leaves is no news: nothing above info, from anybody."""
    caplog.set_level(logging.INFO)
    yield
    assert [
        r.getMessage() for r in caplog.records if r.levelno > logging.INFO and r.name[:5] != "batch"
    ] == []


def server_of(preset: str, **changes: Any) -> LiveServer:
    """The preset with a small pool; prompts are cut where the strategy cuts them."""
    made = OmegaConf.to_container(compose([f"engine={preset}"]).engine, resolve=True)
    assert isinstance(made, dict)
    made |= {"max_model_len": 512, "block_size": 4, "num_kv_blocks": 600, "max_num_seqs": 4}
    made |= {"prefill_chunk_size": 32} if made["scheduler"] == "chunked" else {}
    made |= changes
    EngineConfig.from_mapping({str(key): value for key, value in made.items()})
    made.pop("kind")
    return LiveServer(gated=True, **made)


async def hang_up(preset: str, state: str, how: str) -> None:
    async with server_of(preset, max_num_seqs=1 if state == "queued" else 4) as server:
        other = None
        if state == "queued":
            other = RawClient(server.port)
            await other.post(prompt=PROMPT, **LONG)
            await server.until(lambda: server.runner.entered == 1, "the other runs")
        client = RawClient(server.port)
        await client.post(prompt=PROMPT, **LONG)
        if state == "queued":
            await server.until(lambda: server.metrics.received == 2, "received")
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.waiting == 1, "it waits")
        elif state == "prefill":
            await server.until(lambda: server.runner.entered == 1, "prefill")
        else:
            server.runner.permit(8)
            await server.until(lambda: server.runner.entered == 9, "decode")
        before = server.engine.stats
        client.leave(how)
        await server.until(lambda: server.metrics.ended["abort"] == 1, "the server saw it")
        server.runner.permit(1)  # the pass that was under way
        await server.until(lambda: server.engine.stats.finished.get("abort") == 1, "the engine let go")
        after = server.engine.stats
        assert after.steps - before.steps <= 2
        assert after.waiting == 0
        assert sum(after.aborted.values()) == 1
        if other is None:
            assert (after.running, after.kv_live) == (0, 0)
        else:
            assert after.aborted == {"queued": 1}
            other.leave("fin")
        client.socket.close()


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("preset", PRESETS)
def test_seat_and_kv_are_free_within_two_steps(preset: str, state: str, how: str) -> None:
    asyncio.run(hang_up(preset, state, how))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_client_that_stops_reading_is_disconnected(preset: str) -> None:
    """Its connection stays open, and nothing but a write that does not end tells that it is of no use."""

    async def scenario() -> None:
        small: dict[str, Any] = {
            "max_model_len": 2560,
            "num_kv_blocks": 2600,
            "max_num_batched_tokens": 65536,
        }
        small |= {"drain": False}
        made = OmegaConf.to_container(compose([f"engine={preset}"]).engine, resolve=True)
        assert isinstance(made, dict)
        made.pop("kind")
        values = {str(key): value for key, value in (made | small).items()}
        values |= {"block_size": 4, "max_num_seqs": 2, "stream_idle_timeout_ms": 50.0}
        async with LiveServer(send_buffer=4096, **values) as server:
            lazy = RawClient(server.port, receive_buffer=4096)
            await lazy.post(prompt=[1], **(LONG | {"max_tokens": 2500}))
            await server.until(lambda: server.metrics.idle_streams == 1, "it is noticed")
            await server.until(lambda: server.engine.stats.finished, "it has left the engine")
            assert server.engine.stats.finished in ({"abort": 1}, {"length": 1})
            assert server.engine.stats.kv_live == 0
            assert server.metrics.ended["abort"] == 1
            with pytest.raises((ConnectionError, AssertionError)):  # what the kernel held, and then the end
                await lazy.read_to(b"[DONE]")
            await answered(server)
            lazy.leave("fin")

    asyncio.run(scenario())


async def answered(server: LiveServer) -> None:
    """Others are served as if nothing had been."""
    busy = RawClient(server.port)
    await busy.post(prompt=[2], **(LONG | {"max_tokens": 20}))
    assert b"token_ids" in await busy.read_to(b"[DONE]")
    busy.leave("fin")


def test_a_slow_reader_is_no_idle_one() -> None:
    async def scenario() -> None:
        async with LiveServer(
            max_model_len=2048, num_kv_blocks=1100, send_buffer=4096, stream_idle_timeout_ms=5000.0
        ) as server:
            slow = RawClient(server.port, receive_buffer=4096)
            await slow.post(prompt=[1], **(LONG | {"max_tokens": 900}))
            data = b""
            while b"[DONE]" not in data:
                data += await slow.read(8192)
                await asyncio.sleep(0.0005)
            assert server.metrics.idle_streams == 0
            slow.leave("fin")

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_client_leaves_while_it_is_preempted(preemption: str, how: str) -> None:
    async def scenario() -> None:
        blocks = 60  # two prompts of 25 blocks fit, their answers do not
        settings: dict[str, Any] = {"num_kv_blocks": blocks, "max_num_batched_tokens": 512}
        async with LiveServer("chunked", gated=True, preemption=preemption, **settings) as server:
            stayer, leaver = RawClient(server.port), RawClient(server.port)
            await stayer.post(prompt=[1] * 100, **(LONG | {"max_tokens": 120}))
            await server.until(lambda: server.runner.entered == 1, "the first runs")
            await leaver.post(prompt=[2] * 100, **(LONG | {"max_tokens": 120}))
            await server.until(lambda: server.metrics.received == 2)
            while server.engine.stats.preemptions == 0:
                passes = server.runner.entered
                server.runner.permit(1)
                await server.until(lambda n=passes: server.runner.entered > n, "the next pass")
            leaver.leave(how)
            await server.until(lambda: server.metrics.ended["abort"] == 1, "the server saw it")
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.finished.get("abort") == 1, "the engine let go")
            assert server.engine.stats.aborted == {"preempted": 1}
            assert server.engine.stats.waiting == 0
            server.runner.open_gate()
            assert b"[DONE]" in await stayer.read_to(b"[DONE]")
            stayer.leave("fin")
            leaver.socket.close()

    asyncio.run(scenario())


def test_a_client_leaves_a_static_batch_and_its_row_is_held_to_the_end() -> None:
    async def scenario() -> None:
        async with LiveServer("static", gated=True, reservation="max_model_len") as server:
            first, stayer, leaver = (RawClient(server.port) for _ in range(3))
            await first.post(prompt=[3] * 4, **(LONG | {"max_tokens": 1}))
            await server.until(lambda: server.runner.entered == 1, "a batch of one runs")
            await stayer.post(prompt=[1] * 20, **(LONG | {"max_tokens": 12}))
            await leaver.post(prompt=[2] * 20, **(LONG | {"max_tokens": 12}))
            await server.until(lambda: server.metrics.received == 3)
            server.runner.permit(4)
            await server.until(lambda: server.runner.entered == 5, "both decode")
            leaver.leave("fin")
            await server.until(lambda: server.metrics.ended["abort"] == 1, "the server saw it")
            server.runner.permit(1)
            await server.until(lambda: server.engine.stats.aborted == {"held": 1}, "the engine knows")
            assert server.engine.stats.running == 2  # generate() could not drop it
            server.runner.open_gate()
            assert b"[DONE]" in await stayer.read_to(b"[DONE]")
            await server.until(lambda: server.engine.stats.kv_live == 0, "all is free")
            for client in (first, stayer):
                client.leave("fin")

    asyncio.run(scenario())


def test_giving_up_twice_is_giving_up_once() -> None:
    async def scenario() -> None:
        async with LiveServer("chunked", gated=True) as server:
            streams: list[Stream] = []
            submit = server.engine.submit

            def noted(*args: Any, **more: Any) -> Stream:
                streams.append(submit(*args, **more))
                return streams[-1]

            server.engine.submit = noted  # type: ignore[method-assign]
            client = RawClient(server.port)
            await client.post(prompt=PROMPT, **LONG)
            await server.until(lambda: server.runner.entered == 1)
            client.leave("rst")
            await server.until(lambda: server.metrics.ended["abort"] == 1)
            for _ in range(3):
                server.engine.abort(streams[0])
            server.runner.open_gate()
            await server.until(lambda: server.engine.stats.finished == {"abort": 1})
            assert server.engine.stats.aborted == {"prefill": 1}
            assert server.metrics.ended["abort"] == 1

    asyncio.run(scenario())
