"""The real server: `python -m engines.server` with the tiny model, in a process of its own, and the official
client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from omegaconf import OmegaConf

from engines.config import ConfigError
from engines.server import __main__ as main
from harness.conf import compose
from tests.support.server_command import PATIENCE_S, ROOT, process

pytestmark = pytest.mark.e2e


class Running:
    def __init__(self, ready: dict[str, Any], records: Path) -> None:
        self.ready = ready
        self.records = records
        self.url = f"http://127.0.0.1:{ready['port']}"
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    def until(self, name: str, value: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (seen := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {seen}, not {value}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    records = tmp_path_factory.mktemp("records")
    with process(
        "+engine=chunked", "model=tiny", "server.port=0", "--records", str(records), "--exit-with-stdin"
    ) as started:
        ready = started.line()
        assert ready["event"] == "ready", ready
        yield Running(ready, records)
        started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait(PATIENCE_S) == 0
        assert started.end() == (0, "")


def test_the_ready_line_says_what_a_client_needs(server: Running) -> None:
    facts = {
        "host": "127.0.0.1",
        "model": "tiny",
        "tokenizer": "bytes",
        "scheduler": "chunked",
        "device": "cpu",
    }
    assert facts.items() <= server.ready.items()
    for name in (
        "port",
        "vocab_size",
        "max_model_len",
        "num_kv_blocks",
        "block_size",
        "threads",
        "parameters",
        "pid",
        "engine_pid",
    ):
        assert server.ready[name] > 0
    assert server.ready["engine_pid"] != server.ready["pid"]
    assert {"eos_token_ids", "dtype", "attention", "determinism"} <= server.ready.keys()
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"


def test_completions_stream_and_whole_agree(server: Running) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Once upon a time",
        "max_tokens": 20,
        "temperature": 0,
    }
    single = server.client.completions.create(**asked)
    chunks = list(
        server.client.completions.create(
            **asked,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == single.choices[0].text != ""
    assert chunks[-1].usage == single.usage
    assert single.usage is not None
    assert single.usage.prompt_tokens == len("Once upon a time")
    assert (
        sum(len(c.choices[0].model_extra["token_ids"]) for c in chunks[:-1]) == single.usage.completion_tokens
    )
    assert single.choices[0].finish_reason == chunks[-2].choices[0].finish_reason in ("length", "stop")
    by_ids = server.client.completions.create(**(asked | {"prompt": list(b"Once upon a time")}))
    assert by_ids.choices[0].text == single.choices[0].text


def test_chat_stream_and_whole_agree(server: Running) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 12,
        "temperature": 0,
    }
    single = server.client.chat.completions.create(**asked)
    chunks = list(server.client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == single.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == single.choices[0].finish_reason


def test_stop_strings_end_the_answer_before_them(server: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "temperature": 0}
    text = server.client.completions.create(**asked).choices[0].text
    stop = text[7:9]
    expected = text[: text.index(stop)]
    answer = server.client.completions.create(**asked, stop=["never to be seen", stop]).choices[0]
    assert (answer.text, answer.finish_reason) == (expected, "stop")
    chunks = server.client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_a_seed_names_the_answer_whatever_runs_beside_it(server: Running) -> None:
    def sample(seed: int | None) -> str:
        answer = server.client.completions.create(
            model="tiny",
            prompt="abc",
            max_tokens=24,
            temperature=1.0,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    alone = sample(7)
    beside: list[str] = []
    threads = [threading.Thread(target=lambda: sample(None)) for _ in range(3)]
    threads.append(threading.Thread(target=lambda: beside.append(sample(7))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert beside == [alone]
    assert sample(8) != alone


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "gpt-5"),
        ({"n": 2}, openai.BadRequestError, "n=2"),
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1"),
        ({"prompt": [0] * 5000}, openai.BadRequestError, "max_model_len"),
        ({"prompt": [384]}, openai.BadRequestError, "from 0 to 383"),
        ({"logprobs": 5}, openai.BadRequestError, "logprobs=5"),
        ({"prompt": "x" * 1_000_000}, openai.APIStatusError, "bytes"),
    ],
)
def test_the_client_raises_the_right_error(
    server: Running, fields: dict[str, Any], error: type[openai.APIStatusError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        server.client.completions.create(**({"model": "tiny", "prompt": "x"} | fields))
    assert isinstance(caught.value.body, dict)
    assert {"message", "type", "param", "code"} <= caught.value.body.keys()


def test_killing_a_client_frees_what_it_held(server: Running) -> None:
    body = json.dumps({"prompt": "x" * 1000, "max_tokens": 3000, "ignore_eos": True, "stream": True})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    script = (
        "import socket, sys\n"
        f"s = socket.create_connection(('127.0.0.1', {server.ready['port']}))\n"
        f"s.sendall({request.encode()!r})\n"
        "s.recv(100)\n"
        "print('streaming', flush=True)\n"
        "while s.recv(4096): pass\n"
    )
    aborted = server.metric("vllm:request_success_total")
    client = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"streaming\n"
        assert server.metric("vllm:num_requests_running") == 1
    finally:
        client.kill()
        client.wait()
        client.stdout.close()
    server.until("vllm:request_success_total", aborted + 1)
    server.until("vllm:num_requests_running", 0)
    assert server.metric("batchmark:kv_blocks_live") == 0


def test_every_request_received_is_accounted_for(server: Running) -> None:
    received = server.metric("batchmark:requests_received_total")
    assert received > 0
    server.until("vllm:request_success_total", received - server.metric("vllm:admission_rejections_total"))
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def test_a_low_soft_limit_of_open_files_does_not_limit_connections() -> None:
    code = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from engines.server.__main__ import MOST_FILES, allow_connections\n"
        "allow_connections()\n"
        "soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "print(soft == min(MOST_FILES, hard if hard != resource.RLIM_INFINITY else MOST_FILES))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_resolved_configuration_a_key_and_ctrl_c(tmp_path: Path) -> None:
    config, records = tmp_path / "config.yaml", tmp_path / "records"
    overrides = ["engine=static", "engine.max_model_len=256", "engine.api_key_env=SERVER_KEY"]
    OmegaConf.save(compose(overrides), config)
    with process("--config", str(config), "--records", str(records), env={"SERVER_KEY": "abc"}) as started:
        ready = started.line()
        assert (ready["scheduler"], ready["max_model_len"]) == ("static", 256)
        url = f"http://127.0.0.1:{ready['port']}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="x").models.list()
        client = openai.OpenAI(base_url=url, api_key="abc")
        client.completions.create(model="tiny", prompt="x", max_tokens=3, extra_body={"ignore_eos": True})
        started.popen.send_signal(signal.SIGINT)
        assert started.popen.wait(PATIENCE_S) == 0
        assert started.end() == (0, "")
    lines = (records / "engine_requests.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["output_tokens"] == 3


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(f"server.port={port}") as started:
            message = f"server.port={port} is in use: choose another or 0"
            assert started.line() == {"event": "error", "message": message}
            assert started.end() == (2, "")


def test_a_setting_that_only_the_engine_can_judge_is_one_line() -> None:
    with process("engine.kv_memory_gb=0.00001") as started:
        event = started.line()
        assert event["event"] == "error"
        assert event["message"].startswith("engine.kv_memory_gb=1e-05")
        assert started.end() == (2, "")


def refusal(args: list[str]) -> str:
    """What `python -m engines.server ARGS` says before it loads anything."""
    with pytest.raises(ConfigError) as caught:
        main.run(args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["engine=nothing"], "engine=nothing"),
        (["engine=openai", "engine.base_url=http://x"], "engine=openai runs elsewhere"),
        (["engine.block_size=0"], "engine.block_size=0"),
        (["server.host=999.1.1.1"], "server.host=999.1.1.1"),
        (["engine.api_key_env=BATCHMARK_NO_SUCH_KEY"], "BATCHMARK_NO_SUCH_KEY"),
        (["--config", "/nowhere/config.yaml"], "no such file"),
        (["--config"], "--config: needs a file"),
        (["--config=x.yaml", "seed=1"], "seed=1"),
        (["--what"], "--what: is not an option"),
    ],
)
def test_settings_that_cannot_work_are_one_line(args: list[str], words: str) -> None:
    message = refusal(args)
    assert words in message
    assert "\n" not in message


def test_configuration_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    cases = (("engine: [", "cannot be read"), ("[1]", "holds no settings"), ("seed: 1", "is missing"))
    for text, words in cases:
        file.write_text(text)
        assert words in refusal(["--config", str(file)])


def test_the_server_itself_has_no_torch(server: Running) -> None:
    """Its interpreter and its memory are those of a small program; a process of Linux shows what it
    loaded."""
    script = "import sys, engines.server.__main__, engines.server.launch\n"
    script += "assert not {'torch', 'pyarrow', 'engines.engine'} & sys.modules.keys()\n"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    if sys.platform == "linux":
        assert "libtorch" in Path(f"/proc/{server.ready['engine_pid']}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{server.ready['pid']}/maps").read_text()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is for both")
def test_the_server_leaves_the_engine_its_cores(server: Running) -> None:
    allowed = os.sched_getaffinity(0)
    assert os.sched_getaffinity(server.ready["engine_pid"]) == allowed
    assert len(os.sched_getaffinity(server.ready["pid"])) == len(allowed) - server.ready["threads"]


def test_help_needs_no_torch() -> None:
    script = (
        "import runpy, sys\n"
        "sys.argv = ['server', '--help']\n"
        "try: runpy.run_module('engines.server', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'aiohttp', 'hydra', 'omegaconf'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: python -m engines.server")
