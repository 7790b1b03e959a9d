"""PATCH /admin/limits: every body that changes nothing is told so."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.engines.server.live_server import LiveServer
from tests.engines.server.test_server_control import ask, routes_of, run, serving


@pytest.mark.parametrize(
    ("query", "body", "words"),
    [
        ("", {}, "needs at least one limit"),
        ("", {"max_num_seqs": 0}, "engine.max_num_seqs=0: needs a whole number above 0"),
        ("", {"max_num_seqs": True}, "needs a whole number"),
        ("", {"kv_high_watermark": 2}, "engine.kv_high_watermark=2.0"),
        ("", {"scheduler": "static"}, "cannot be changed while it runs"),
        ("", {"enabled": False}, "enabled=false: the default route takes what is left"),
        ("", {"enabled": None}, "enabled=null: needs true or false"),
        ("?route=slow", {"enabled": None}, "enabled=null: needs true or false"),
        ("?route=slow", {"enabled": 0}, "enabled=0: needs true or false"),
        ("?route=slow", {"enabled": False, "max_num_seqs": None}, "engine.max_num_seqs=null: needs a value"),
        ("?route=slow", {}, "the body is {}: needs at least one limit"),
        ("?rout=slow", {"max_num_seqs": 2}, "needs ?route=, once"),
        ("?route=slow&route=default", {"max_num_seqs": 2}, "needs ?route=, once"),
        ("?route=", {"max_num_seqs": 2}, "choose from slow"),
        ("", {"max_num_seqs": "3"}, "needs a whole number"),
        ("", {"max_num_seqs": [3]}, "needs a whole number"),
        ("", {"deadline_admission": None}, "engine.deadline_admission=null: needs a value"),
        ("", {"deadline_admission": 1}, "needs true or false"),
        ("", {"tenant_rate": {}}, "needs a finite number"),
        ("", {"": 1}, "cannot be changed while it runs"),
        ("", {"max_num_seqs": 2, "policy": {}}, "engine.policy cannot be changed while it runs"),
        ("", None, "the body is null: needs a JSON object"),
        ("", "x", "needs a JSON object"),
        ("", [], "the body is []: needs a JSON object"),
        ("?route=nope", {"max_num_seqs": 2}, "choose from slow, alias, chat, default"),
    ],
)
def test_a_change_that_cannot_work_is_a_400_and_changes_nothing(query: str, body: Any, words: str) -> None:
    async def scenario() -> None:
        routes = routes_of(LiveServer(max_num_batched_tokens=512).config)
        async with serving(routes=routes, num_kv_blocks=1200, max_num_batched_tokens=512) as (_, http):
            before = await ask(http, "GET", "/admin/limits")
            data = orjson.dumps(body)
            status, told = await ask(http, "PATCH", "/admin/limits" + query, data=data)
            assert status == 400
            assert words in told["error"]["message"]
            assert await ask(http, "GET", "/admin/limits") == before

    run(scenario())
