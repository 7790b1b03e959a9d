"""Routes, limits, dumps and the log of the real server, in processes of their own."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_command import PATIENCE_S, process

pytestmark = pytest.mark.e2e

ROUTE = "server.routes=[{name:slow,match:{tenant:acme},preset:static,engine:{max_num_seqs:2},kv_share:0.25}]"


def call(url: str, method: str = "GET", body: Any = None, token: str = "admin-token") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_one_tenant_runs_static_until_it_is_taken_back(tmp_path: Path) -> None:
    env = {"SERVER_ADMIN": "admin-token", "SERVER_KEY": "client-key"}
    settings = ["+engine=chunked", "model=tiny", "engine.max_model_len=256", "server.log_format=json", ROUTE]
    settings += ["engine.admin_token_env=SERVER_ADMIN", "engine.api_key_env=SERVER_KEY"]
    with process(*settings, "engine.num_kv_blocks=101", env=env, stdin=None) as started:
        ready = started.line()
        assert ready["routes"] == ["slow", "default"]
        url = f"http://127.0.0.1:{ready['port']}"
        texts = []
        for enabled in (True, False):
            changes = {"enabled": enabled, "max_num_seqs": 1}
            status, told = call(url + "/admin/limits?route=slow", "PATCH", changes)
            assert (status, told["routes"][0]["enabled"]) == (200, enabled)
            body = {"prompt": "to whom", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            mark = {"batchmark": {"tenant": "acme"}}
            status, answer = call(url + "/v1/completions", "POST", body | mark, token="client-key")
            assert status == 200
            texts.append(answer["choices"][0]["text"])
        assert texts[0] == texts[1]  # the strategy is no business of the answer
        assert call(url + "/admin/limits", token="client-key")[0] == 401
        assert call(url + "/admin/limits", "PATCH", {"max_num_batched_tokens": 4})[0] == 400
        _, told = call(url + "/debug/steps?last=1000")
        assert [step["route"] for step in told["steps"]] == ["slow"] * 12 + ["default"] * 12
        started.popen.send_signal(signal.SIGTERM)
        code, log = started.end()
    assert code == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["route"] for line in lines if line["event"] == "request"] == ["slow", "default"]
    assert len([line for line in lines if line["event"] == "limits_changed"]) == 2
    assert "admin-token" not in log
    assert "client-key" not in log
    assert "to whom" not in log


def test_the_records_of_a_route_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    args = ["+engine=chunked", "model=tiny", "engine.max_model_len=256", "engine.num_kv_blocks=101", ROUTE]
    with process(*args, "--records", str(tmp_path), stdin=None) as started:
        url = f"http://127.0.0.1:{started.line()['port']}/v1/completions"
        for tenant in ("acme", "b", "acme"):
            body = {"prompt": "x", "max_tokens": 3, "batchmark": {"tenant": tenant}}
            assert call(url, "POST", body)[0] == 200
        started.popen.send_signal(signal.SIGTERM)
        assert started.end()[0] == 0
    for folder, tenants in ((tmp_path, ["b"]), (tmp_path / "routes" / "slow", ["acme", "acme"])):
        rows = [json.loads(line) for line in (folder / "engine_requests.jsonl").read_text().splitlines()]
        assert [row["tenant"] for row in rows] == tenants
        assert json.loads((folder / "engine_end.json").read_text())["integrity"] == "ok"
