"""Our figures against the log of a server that knows the truth.

Client stamps can only be late, so each one is held between the server's own stamps: never before the send
that caused it, and before what the server did next.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.loadgen import Target
from harness.tokenizer import ByteTokenizer
from tests.support.load import Driven, drive, every, request
from tests.support.script_server import (
    DONE,
    Script,
    ScriptServer,
    Seen,
    Step,
    answer,
    chat,
    completion,
    ending,
    plain,
    tokens,
    usage,
)

GAP_S = 0.15
"""Between sends, where a stamp must fall before the next one: longer than a machine holds a process up."""


Run = Callable[..., tuple[Driven, list[Seen]]]


@pytest.fixture
def run(backend: str) -> Run:
    """A load against a script, by each backend."""

    def run(script, folder: Path, requests=None, *, target=None, **kwargs):
        async def go():
            async with ScriptServer(script) as server:
                url = server.base_url
                kwargs["target"] = target(url) if target else None
                driven = await drive(url, requests or [request()], folder, backend=backend, **kwargs)
                return driven, server.seen

        return asyncio.run(go())

    return run


def assert_follows(driven, seen: Seen) -> None:
    """Every token chunk was stamped after its own send and before the server's next token send."""
    record = driven.only
    stamps = [driven.t0_ns + ns for ns in record.chunk_ns]
    assert list(record.chunk_tokens) == [n for _, n in seen.sends]
    sends = [ns for ns, _ in seen.sends]
    assert all(client >= server for client, server in zip(stamps, sends, strict=True))
    assert all(client < later for client, later in zip(stamps, sends[1:], strict=False))


def test_role_and_empty_chunks_do_not_make_ttft(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#15106: role chunk at once, empty text, then the first text."""
    script = Script(
        [
            plain(chat({"role": "assistant"})),
            plain(chat({"content": ""}), GAP_S),
            Step("tokens", GAP_S, chat({"content": "a"}), 1),
            Step("tokens", GAP_S, chat({"content": "b"}), 1),
            plain(chat({}, finish="stop")),
            plain(usage(2)),
            plain(DONE),
        ]
    )

    def target(url: str) -> Target:
        return Target(url, "m", api="chat", dialect="openai", tokenizer=ByteTokenizer())

    driven, (seen,) = run(script, tmp_path, target=target)
    assert_follows(driven, seen)
    record = driven.only
    assert record.first_event_ns is not None
    role, empty = seen.plain_ns[:2]
    assert role <= driven.t0_ns + record.first_event_ns < empty
    assert (record.output_tokens, record.token_source, record.outcome) == (2, "usage", "completed")


def test_bundled_tokens_keep_their_times_and_counts(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#27485: 5 chunks of 20 tokens: TPOT divides by the tokens after the first chunk."""
    script = Script([*(tokens(20, GAP_S) for _ in range(5)), *ending(100)])
    driven, (seen,) = run(script, tmp_path)
    assert_follows(driven, seen)
    record = driven.only
    assert (record.output_tokens, record.token_mismatch) == (100, False)
    span = record.chunk_ns[-1] - record.chunk_ns[0]
    true_span = seen.sends[-1][0] - seen.sends[0][0]
    assert span / 80 == pytest.approx(true_span / 80, rel=0.2)


def test_first_token_is_no_gap_and_the_tail_is_no_token(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#7242, sgl-project/genai-bench#44: a long TTFT, short gaps, then a late usage chunk
    and a later [DONE]."""
    script = Script(
        [
            tokens(1, 2 * GAP_S),
            *(tokens(1, 0.01) for _ in range(9)),
            plain(completion(finish="length"), GAP_S),
            plain(usage(10), GAP_S),
            plain(DONE, GAP_S),
        ]
    )
    driven, (seen,) = run(script, tmp_path)
    record = driven.only
    assert len(record.chunk_ns) == 10
    gaps = [b - a for a, b in zip(record.chunk_ns, record.chunk_ns[1:], strict=False)]
    assert record.send_ns is not None
    assert max(gaps) < record.chunk_ns[0] - record.send_ns
    finish, usage_sent, done = seen.plain_ns
    assert driven.t0_ns + record.chunk_ns[-1] < finish
    assert record.end_ns is not None
    assert driven.t0_ns + record.end_ns >= done > usage_sent


def test_reasoning_is_tokens(run: Run, tmp_path: Path) -> None:
    """kubernetes-sigs/inference-perf#559: 200 reasoning deltas, then text."""
    script = Script(
        [
            Step("tokens", GAP_S, chat({"reasoning_content": "r"}), 1),
            *(Step("tokens", 0.0, chat({"reasoning_content": "r"}), 1) for _ in range(199)),
            Step("tokens", GAP_S, chat({"content": "a"}), 1),
            plain(chat({}, finish="stop")),
            plain(usage(201)),
        ]
    )
    driven, (seen,) = run(script, tmp_path)
    record = driven.only
    assert len(record.chunk_ns) == 201
    assert seen.sends[0][0] <= driven.t0_ns + record.chunk_ns[0] < seen.sends[200][0]
    assert record.output_tokens == 201


@pytest.mark.parametrize("split", [1, 2, 3, 7])
def test_network_borders_change_nothing(run: Run, tmp_path: Path, split: int) -> None:
    steps = [tokens(2, text="grüße"), tokens(1, text="🙂"), *ending(3)]
    driven, _ = run(Script(steps, split=split), tmp_path, keep_text=True)
    record = driven.only
    assert (record.outcome, record.chunk_tokens, record.text) == ("completed", (2, 1), "grüße🙂")


def test_send_is_stamped_before_the_server_has_the_request_and_headers_with_the_first_token(
    run: Run,
    tmp_path: Path,
) -> None:
    script = Script([tokens(1), *ending(1)], head_after_s=GAP_S)
    driven, (seen,) = run(script, tmp_path, [request(prompt_tokens=3000, segments=(("s", 3000),))])
    record = driven.only
    assert record.send_ns is not None
    assert record.headers_ns is not None
    assert driven.t0_ns <= driven.t0_ns + record.send_ns <= seen.received_ns
    assert seen.received_ns < driven.t0_ns + record.headers_ns
    assert seen.sends[0][0] <= driven.t0_ns + record.chunk_ns[0]
    assert record.prompt_tokens == 3
    assert record.planned_prompt_tokens == 3000


def test_not_streamed_is_one_chunk(run: Run, tmp_path: Path) -> None:
    body = {
        "choices": [{"index": 0, "text": "abcd", "token_ids": [1, 2, 3, 4], "finish_reason": "length"}],
        "usage": {"completion_tokens": 4, "prompt_tokens": 3},
    }
    script = Script([Step("tokens", GAP_S, json.dumps(body).encode(), 4)], content_type="application/json")
    driven, (seen,) = run(script, tmp_path, [request(stream=False)])
    assert_follows(driven, seen)
    assert seen.body["stream"] is False
    assert "stream_options" not in seen.body
    assert (driven.only.output_tokens, driven.only.outcome) == (4, "completed")


def test_counts_come_from_usage_then_ids_then_the_whole_text(run: Run, tmp_path: Path) -> None:
    """kubernetes-sigs/inference-perf#364, and a server whose usage disagrees with its own ids."""

    def script(body, number):
        return [
            Script([tokens(3), *ending(3)]),
            Script([tokens(3), *ending(5)]),
            Script([tokens(3), *ending(3, with_usage=False)]),
            Script(
                [tokens(2, with_ids=False, text="grü"), tokens(2, with_ids=False, text="ße"), plain(DONE)]
            ),
        ][number]

    def target(url: str) -> Target:
        return Target(url, "m", dialect="openai", tokenizer=ByteTokenizer())

    driven, _ = run(script, tmp_path, every(0.05, 4), target=target)
    counted = [
        (r.output_tokens, r.token_source, r.token_mismatch, r.chunk_tokens)
        for _, r in sorted(driven.records.items())
    ]
    assert counted == [
        (3, "usage", False, (3,)),
        (5, "usage", True, (3,)),
        (3, "ids", False, (3,)),
        (len("grüße".encode()), "retokenised", False, (1, 1)),
    ]


def test_what_our_servers_are_sent(run: Run, tmp_path: Path) -> None:
    changes = {"tenant": "t", "request_class": "c", "priority": 2, "deadline_ms": 9.5}
    _, (seen,) = run(answer(4), tmp_path, [request(stop_after=4, **changes)])
    assert seen.path == "/v1/completions"
    assert seen.body == {
        "model": "m",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "prompt": [0, 1, 2],
        "max_tokens": 14,
        "priority": 2,
        "return_token_ids": True,
        "batchmark": {
            "run": "test",
            "id": "r000000",
            "attempt": 1,
            "tenant": "t",
            "request_class": "c",
            "deadline_ms": 9.5,
            "stop_after": 4,
        },
    }


@pytest.mark.parametrize(
    ("api", "send_ids", "path", "field", "prompt"),
    [
        ("completions", True, "/v1/completions", "prompt", [0, 1, 2]),
        ("completions", False, "/v1/completions", "prompt", "\x00\x01\x02"),
        ("chat", True, "/v1/chat/completions", "messages", [{"role": "user", "content": "\x00\x01\x02"}]),
    ],
)
def test_what_other_servers_are_sent(run: Run, tmp_path: Path, api, send_ids, path, field, prompt) -> None:
    def target(url: str) -> Target:
        key, tokenizer = "s3cret", ByteTokenizer()
        return Target(url + "/v1/", "m", api, "openai", api_key=key, send_ids=send_ids, tokenizer=tokenizer)

    _, (seen,) = run(answer(4), tmp_path, target=target)
    assert seen.path == path
    assert seen.headers["authorization"] == "Bearer s3cret"
    assert seen.body[field] == prompt
    assert set(seen.body) == {
        "model",
        "temperature",
        "stream",
        "stream_options",
        "ignore_eos",
        "max_tokens",
        field,
    }
    assert seen.body["max_tokens"] == 4


def test_the_key_never_shows() -> None:
    assert "s3cret" not in repr(Target("http://x", "m", api_key="s3cret"))


def test_connections_are_reused(run: Run, tmp_path: Path) -> None:
    """Every answer is read to the end of its body, so its connection serves the next request."""
    driven, seen = run(answer(3), tmp_path, every(0.0, 6), kind="closed", concurrency=1)
    assert driven.result.counts["completed"] == len(seen) == 6
    assert len({s.connection for s in seen}) == 1  # lean takes one of those that it opened ahead
