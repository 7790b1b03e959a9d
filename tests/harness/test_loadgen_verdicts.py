"""How an answer ends, whatever a server sends: without a network."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.loadgen import answer as answer_module
from harness.loadgen.answer import ERROR_CHARS, LABEL_CHARS, Answer, Verdict
from harness.loadgen.call import Call
from harness.loadgen.dispatch import Due
from harness.loadgen.sse import SSEParser
from tests.support.answers import chunks, outcome, read
from tests.support.load import request
from tests.support.script_server import DONE, completion, sse, usage

A = completion("a", [1])


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([A, completion(finish="stop"), DONE], ("completed", None)),
        ([A, completion(finish="stop")], ("completed", None)),
        ([A, DONE], ("completed", None)),
        ([A], ("failed", "ended_early")),
        ([], ("failed", "ended_early")),
        ([A, b'data: {"choi'], ("failed", "ended_early")),
        ([A, b'data: {"choi\n\n'], ("failed", "malformed")),
        ([A, b"data: 7\n\n"], ("failed", "malformed")),
        ([sse({"choices": "text"})], ("failed", "malformed")),
        ([sse({"choices": [None]})], ("failed", "malformed")),
        ([A, sse({"error": {"message": "boom"}}), DONE], ("failed", "error_event")),
        ([A, sse({"error": "boom"}), DONE], ("failed", "error_event")),
        ([A, sse({"message": "boom"}, event="error"), DONE], ("failed", "error_event")),
        ([A, completion(finish="error"), DONE], ("failed", "finish_error")),
        ([A, completion(finish="abort"), DONE], ("failed", "finish_abort")),
        ([completion(finish="queue_timeout"), DONE], ("rejected", "queue_timeout")),
        ([sse({"error": {"message": "late", "code": "queue_timeout"}})], ("rejected", "queue_timeout")),
        ([b": ping\n\n", b"data:\n\n", A, completion(finish="stop")], ("completed", None)),
        ([A, completion(finish="stop"), DONE, b"data: junk\n\n"], ("completed", None)),
        ([A, completion(finish="")], ("failed", "ended_early")),
        ([A, completion(finish=" ")], ("failed", "ended_early")),
        ([A, sse("boom", event="error"), DONE], ("failed", "error_event")),
        ([A, b"event: error\ndata: boom\n\n", DONE], ("failed", "error_event")),
        ([b"event: ping\ndata: alive\n\n", A, completion(finish="stop")], ("completed", None)),
        ([A, sse({"error": "of another kind"}, event="news"), DONE], ("completed", None)),
        ([A, b"event: done\ndata: [DONE]\n\n"], ("completed", None)),
        ([A, sse({"error": {"code": "queue_timeout"}}), DONE], ("rejected", "queue_timeout")),
    ],
)
def test_how_a_stream_ends(pieces: list[bytes], wanted: tuple[str, str | None]) -> None:
    assert outcome(read(*pieces)) == wanted


FINISHED = [A, completion(finish="stop")]
AFTERWARDS = [
    sse({"error": {"message": "boom", "code": "queue_timeout"}}),
    sse({"message": "boom"}, event="error"),
    b"data: {bad\n\n",
    b"data: 7\n\n",
    sse({"choices": "text"}),
    completion(finish="error"),
    b"data: " + b"x" * 2000,  # larger than the parser keeps
]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("after", AFTERWARDS)
@pytest.mark.parametrize("done", [b"", DONE])
def test_nothing_unmakes_an_answer_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, together: bool, after: bytes, done: bytes
) -> None:
    monkeypatch.setattr(answer_module, "SSEParser", lambda: SSEParser(1000))
    pieces = [*FINISHED, done, after]
    answer = read(*([b"".join(pieces)] if together else pieces))
    assert outcome(answer) == ("completed", None)
    assert (answer.finish_reason, answer.tokens) == ("stop", 1)
    unfinished = read(*([A + after] if together else [A, after]))
    assert outcome(unfinished)[0] != "completed"
    assert unfinished.tokens == 1


@pytest.mark.parametrize("after", AFTERWARDS[:-1])
def test_usage_is_read_also_after_nonsense(after: bytes) -> None:
    answer = read(*FINISHED, after, usage(9), DONE)
    assert (outcome(answer), answer.usage_output) == (("completed", None), 9)


@pytest.mark.parametrize("error", [False, None, "", 0, {}, []])
def test_an_error_that_says_nothing_is_none(error: Any) -> None:
    body = {"error": error, "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    assert outcome(read(sse(body))) == ("completed", None)
    whole = read(json.dumps(body).encode(), stream=False, kind="application/json")
    assert (outcome(whole), chunks(whole)) == (("completed", None), [(10, 1)])


def choice(index: Any, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish}


@pytest.mark.parametrize(
    ("events", "wanted", "finish_reason"),
    [
        ([[choice(0, "a")], [choice(1, "b")], [choice(0, "", "stop")]], "reset", "stop"),
        ([[choice(0, "a"), choice(1, "b")], [choice(0, "", "stop")]], "reset", "stop"),
        ([[choice(0, "a", "stop"), choice(1)]], "reset", "stop"),
        (
            [[choice(0, "a")], [choice(1, "b")], [choice(0, "", "stop")], [choice(0, "", "stop")]],
            "reset",
            "stop",
        ),
        ([[choice(0, "a")], [choice(1, "b", "length")], [choice(0, "", "stop")]], None, "length"),
        ([[choice(0, "a", "stop")], [choice(1, "b", "error")]], "finish_error", "error"),
        ([[choice(0, "a", "abort")], [choice(1, "b", "stop")]], "finish_abort", "abort"),
        ([[choice(0, "a", "stop")], [choice(0, "late")]], None, "stop"),
        ([[choice(None, "a")], [choice([0], "b")], [choice("x", "", "stop")]], None, "stop"),
        ([[choice(json.loads("[" * 900 + "]" * 900), "a")]] * 2 + [[choice(0, "", "stop")]], None, "stop"),
    ],
)
def test_an_answer_of_several_choices_has_ended_when_all_of_them_have(
    events: list[list[dict[str, Any]]], wanted: str | None, finish_reason: str
) -> None:
    """What is no index is index 0. The connection breaks after the last event."""
    answer = Answer(stream=True, keep_text=False)
    answer.begin(0, 200, "text/event-stream")
    for choices in events:
        assert answer.feed(10, sse({"choices": choices}))
    verdict = answer.finish(Verdict("failed", "reset", "broke"))
    assert (verdict.reason, answer.finish_reason) == (wanted, finish_reason)
    answer = read(*(sse({"choices": choices}) for choices in events), DONE)
    assert outcome(answer)[1] == (None if wanted == "reset" else wanted)


DEEP = b"[" * 300 + b"]" * 300
DEEPER = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("nest", [DEEP, DEEPER])
@pytest.mark.parametrize("template", [b'{"error": %b}', b'{"error": {"message": %b, "code": %b}}', b"%b"])
@pytest.mark.parametrize("status", [200, 400])
def test_depth_raises_nothing(nest: bytes, template: bytes, status: int) -> None:
    body = template.replace(b"%b", nest)
    for pieces, kind in (([body], "application/json"), ([b"data: " + body + b"\n\n"], "text/event-stream")):
        answer = read(*pieces, status=status, kind=kind)
        assert outcome(answer)[0] == "failed"
        assert answer.verdict is not None
        assert 0 < len(answer.verdict.error or "") <= ERROR_CHARS


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"choices":[{"text":"a\xffb"}]}', "a\ufffdb"),
        (b'{"choices":[{"text":"\xf0\x9f\x99"}]}', "\ufffd"),  # the maximal part of a character is one
        (b'{"choices":[{"text":"\xed\xa0\x80"}]}', "\ufffd" * 3),  # a surrogate is no part of any
        (b'{"choices":[{"text":"a\\ud83d"}]}', "a\ufffd"),
        (b'{"choices":[{"text":"\\ud83d"},{"index":1,"text":"\\ude42"}]}', "🙂"),  # halves in two pieces
        (b'{"choices":[{"text":"a","logprobs":[-Infinity,NaN,Infinity]}]}', "a"),
        (b'{"choices":[{"text":"a","delta":{"content":"\xff"}}]}', "a\ufffd"),
    ],
)
def test_what_is_not_quite_unicode_or_json_is_read_all_the_same(raw: bytes, text: str) -> None:
    """Invalid UTF-8 in an event stream is replaced: WHATWG HTML 9.2.6, Encoding 6 (the maximal subpart)."""
    answer = read(b"data: " + raw + b"\n\n", DONE)
    assert (outcome(answer), answer.text, len(answer.chunk_ns)) == (("completed", None), text, 1)
    whole = Answer(stream=False, keep_text=True)
    whole.begin(0, 200, "application/json")
    whole.feed(1, raw)
    whole.finish()
    assert whole.text == text


@pytest.mark.parametrize(
    ("status", "body", "wanted"),
    [
        (400, {"error": {"message": "prompt too long"}}, ("failed", "http_400")),
        (404, {"error": {"message": "no such model"}}, ("failed", "http_404")),
        (400, {"error": {"message": "too large", "code": "never_fits"}}, ("failed", "never_fits")),
        (500, {}, ("failed", "http_500")),
        (302, {}, ("failed", "http_302")),
        (429, {"error": {"code": "queue_full"}}, ("rejected", "queue_full")),
        (503, {"error": {"code": "queue_timeout"}}, ("rejected", "queue_timeout")),
        (503, {"error": {"code": 503}}, ("rejected", "http_503")),
        (429, [1], ("rejected", "http_429")),
    ],
)
def test_status_decides(status: int, body: Any, wanted: tuple[str, str]) -> None:
    answer = read(json.dumps(body).encode(), status=status, kind="application/json")
    assert outcome(answer) == wanted
    assert answer.verdict is not None
    assert answer.verdict.error is not None
    message = body["error"].get("message") if isinstance(body, dict) and body else None
    assert answer.verdict.error == (message or json.dumps(body))


def test_the_error_keeps_the_first_300_characters() -> None:
    answer = read(b"no " * 500, status=400, kind="text/html")
    assert answer.verdict is not None
    assert answer.verdict.error == ("no " * 100)[:300]


hostile = st.text(
    st.characters(categories=["L", "Cc", "Cs", "Zs", "Zl", "Cf"]), max_size=20
) | st.sampled_from(["x" * 5000, "\ud800" * 400, "two\nlines", "\x1b[31m", " " * 9000, "queue_timeout"])


@settings(max_examples=200, deadline=None)
@given(hostile, hostile, hostile, st.sampled_from(["error", "refusal", "finish", "broke", "whole"]))
def test_the_record_holds_little_of_what_a_server_says(
    code: str, message: str, finish: str, way: str
) -> None:
    """And it can be written, and printed."""
    call = Call(Due(request(), 0, 0), timeout_s=None, keep_text=True)
    call.dispatched(1)
    call.on_send(1)
    error = {"error": {"code": code, "type": code, "message": message}}
    call.on_headers(
        2, 400 if way == "refusal" else 200, "application/json" if way == "whole" else "text/event-stream"
    )
    if way in ("error", "refusal", "whole"):
        call.on_data(3, sse(error) if way == "error" else json.dumps(error).encode())
    elif way == "finish":
        call.on_data(3, sse({"choices": [{"text": message, "finish_reason": finish}]}))
    if way == "broke":
        call.broke(4, "reset", message)
    else:
        call.finish(4)
    record = call.record(0, keep_text=True, final=True)
    for said, chars in (
        (record.error, ERROR_CHARS),
        (record.reason, LABEL_CHARS),
        (record.finish_reason, LABEL_CHARS),
    ):
        assert said is None or (len(said) <= chars and said.isprintable())
    assert b'"outcome":"' in record.to_json()
    if way == "error":
        assert record.outcome == ("rejected" if code == "queue_timeout" else "failed")


def test_a_refusal_without_end_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "MAX_BODY_BYTES", 1000)
    assert outcome(read(b"no " * 200, b"no " * 200, status=429, kind="text/html")) == ("rejected", "http_429")
    too_large = read(b"x" * 600, b"x" * 600, stream=False, kind="application/json")
    assert outcome(too_large) == ("failed", "malformed")


WORDS = (
    *("choices", "text", "delta", "message", "content", "token_ids", "usage", "completion_tokens"),
    *("error", "finish_reason", "tool_calls", "function", "arguments", "code", "index", "thinking"),
    *("custom", "input", "type", "completion_tokens_details"),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["\ud800", "🙂", "stop", "error", "queue_timeout"]),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(
            st.sampled_from(WORDS),
            v,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(json_values | st.binary(max_size=10), max_size=5),
    st.booleans(),
    st.sampled_from([200, 400, 503]),
)
def test_whatever_comes_there_is_a_verdict_and_chunks_of_at_least_one_token(
    values: list[Any], stream: bool, status: int
) -> None:
    payloads = [v if isinstance(v, bytes) else json.dumps(v).encode() for v in values]
    pieces = [b"data: " + payload + b"\n\n" for payload in payloads]
    kind = "text/event-stream" if stream else "application/json"
    answer = read(*(pieces if stream else payloads), stream=stream, status=status, kind=kind)
    assert answer.verdict is not None
    assert len(answer.chunk_ns) == len(answer.chunk_tokens)
    assert all(n >= 1 for n in answer.chunk_tokens)
    assert sum(answer.chunk_tokens) == answer.tokens
    assert orjson.dumps([answer.text, answer.finish_reason, answer.verdict.error, answer.verdict.reason])
