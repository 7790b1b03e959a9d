"""A request that can no longer make its deadline is refused before its first token."""

from __future__ import annotations

import asyncio

from tests.engines.server.test_server_http import run, scraped, serving, whole


def test_a_dropped_request_is_a_503_with_its_reason() -> None:
    async def scenario() -> None:
        async with serving(gated=True, max_num_seqs=1, queue="deadline") as (server, http):
            body = {"prompt": [1] * 10, "max_tokens": 5, "temperature": 0}
            first = asyncio.create_task(whole(http, **body))
            await server.until(lambda: server.runner.entered == 1)
            second = asyncio.create_task(whole(http, **body, batchmark={"deadline_ms": 100.0}))
            await server.until(lambda: server.metrics.received == 2)
            await asyncio.sleep(0.15)  # longer than that deadline
            server.runner.open_gate()
            assert (await first)[0] == 200
            status, late = await second
            assert (status, late["error"]["code"]) == (503, "deadline")
            async with http.get("/metrics") as response:
                seen = scraped(await response.read())
            assert seen["vllm:admission_rejections_total/deadline"] == 1

    run(scenario())
