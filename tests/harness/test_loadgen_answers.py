"""What counts as a token, and on which channel: without a network."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.loadgen import answer as answer_module
from harness.loadgen.answer import Answer
from harness.loadgen.sse import SSEParser
from tests.support.answers import chunks, outcome, read
from tests.support.script_server import DONE, chat, completion, sse, usage


def test_role_and_empty_chunks_are_events_but_no_tokens() -> None:
    answer = read(
        chat({"role": "assistant"}),
        chat({"role": "assistant", "content": ""}),
        chat({"content": "a"}),
        chat({}, finish="stop"),
        DONE,
    )
    assert answer.first_event_ns == 10
    assert chunks(answer) == [(30, 1)]
    assert outcome(answer) == ("completed", None)


def test_usage_in_every_chunk_and_a_usage_chunk_at_the_end() -> None:
    answer = read(
        completion("a", [1], usage={"completion_tokens": 1, "prompt_tokens": 3}),
        completion("b", [2], usage={"completion_tokens": 2, "prompt_tokens": 3}),
        completion(finish="length"),
        usage(2),
        DONE,
    )
    assert chunks(answer) == [(10, 1), (20, 1)]
    assert (answer.usage_output, answer.usage_prompt, answer.ids) == (2, 3, 2)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"function_call": {"arguments": "{"}},
        {"tool_calls": [{"index": 0, "type": "custom", "custom": {"name": "f", "input": ""}}]},
        {"tool_calls": [{"index": 0, "type": "custom", "custom": {"input": "x = 1"}}]},
        {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
        {"content": [{"type": "thinking", "thinking": "hm"}]},
    ],
)
def test_every_channel_carries_tokens(delta: dict[str, Any]) -> None:
    assert chunks(read(chat({"role": "assistant"}), chat(delta), chat({}, finish="stop"), DONE)) == [(20, 1)]


@pytest.mark.parametrize(
    "delta",
    [
        {},
        {"content": None},
        {"content": "", "reasoning_content": ""},
        {"tool_calls": []},
        {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]},
        {"tool_calls": None},
        {"tool_calls": [{"type": "custom", "custom": {"input": ""}}, None, {"custom": "x"}]},
        {"content": []},
        {"content": [{"type": "text", "text": ""}, {"type": "image_url"}, None, 3, [[]]]},
        {"content": [{"type": "thinking", "thinking": [{"text": ""}, None]}]},
        {"content": {"text": "of no known shape"}},
    ],
)
def test_empty_deltas_do_not(delta: dict[str, Any]) -> None:
    assert chunks(read(chat(delta), chat({"content": "x"}), chat({}, finish="stop"))) == [(20, 1)]


def test_the_first_output_comes_after_the_reasoning() -> None:
    """kubernetes-sigs/inference-perf#559: 200 reasoning deltas, then text. All are tokens; the first one that
    is no reasoning has a stamp of its own."""
    thoughts = [chat({"reasoning_content": "hm"}) for _ in range(200)]
    details: dict[str, Any] = {
        "completion_tokens": 203,
        "completion_tokens_details": {"reasoning_tokens": 200},
        "prompt_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    answer = read(
        chat({"role": "assistant"}),
        *thoughts,
        chat({"content": "a"}),
        chat({"content": "b"}),
        chat({"reasoning": "again"}),
        sse({"choices": [], "usage": details}),
        DONE,
    )
    assert answer.chunk_ns[0] == 20
    assert answer.first_output_ns == answer.chunk_ns[200] == 2020
    assert (answer.tokens, answer.usage_output, answer.usage_reasoning) == (203, 203, 200)
    assert (answer.usage_prompt, answer.usage_cached) == (40, 32)


@pytest.mark.parametrize(
    ("deltas", "first_output"),
    [
        ([{"content": "a"}], 10),
        ([{"reasoning": "a"}], None),
        ([{"reasoning": "a"}, {"reasoning": "b", "content": "c"}], 20),
        ([{"reasoning": "a"}, {"tool_calls": [{"function": {"arguments": "{"}}]}], 20),
        ([{"reasoning_content": "a"}, {"refusal": "no"}], 20),
        ([{"content": ""}, {"function_call": {"name": "f"}}], 20),
        ([{"content": [{"thinking": [{"text": "a"}]}]}, {"content": [{"text": "b"}]}], 20),
        ([{"reasoning": "a"}, {"tool_calls": [{"custom": {"input": "b"}}]}], 20),
    ],
)
def test_what_is_output(deltas: list[dict[str, Any]], first_output: int | None) -> None:
    assert read(*map(chat, deltas)).first_output_ns == first_output


def test_ids_without_text_are_on_the_channel_of_the_text_before_them() -> None:
    def ids(delta: dict[str, Any], *ids: int) -> bytes:
        return sse({"choices": [{"index": 0, "delta": delta, "token_ids": ids}]})

    answer = read(ids({"reasoning": "a"}, 1), ids({}, 2), ids({"content": "b"}, 3))
    assert chunks(answer) == [(10, 1), (20, 1), (30, 1)]
    assert answer.first_output_ns == 30
    assert read(ids({}, 1), ids({"content": "b"}, 2)).first_output_ns == 10


def test_chunks_of_one_read_are_counted_as_coalesced() -> None:
    a, role = completion("a", [1]), chat({"role": "assistant"})
    answer = Answer(stream=True, keep_text=False)
    answer.begin(0, 200, "text/event-stream")
    answer.feed(10, role + a + a)  # the role chunk is nobody's gap
    answer.feed(20, a[:7])
    answer.feed(30, a[7:])
    answer.feed(40, a)
    answer.feed(40, a + a)  # two pieces of one read
    assert chunks(answer) == [(10, 1), (10, 1), (30, 1), (40, 1), (40, 1), (40, 1)]
    assert (answer.reads, answer.coalesced) == (4, 3)


def test_ids_count_also_while_their_text_is_held_back() -> None:
    answer = read(
        completion("", [200, 201]),  # half a character
        completion("ü", [202]),
        completion("tail", []),  # text of tokens that were counted before
        completion(finish="stop"),
    )
    assert chunks(answer) == [(10, 2), (20, 1)]
    assert answer.counted_by_ids
    assert answer.text == "ütail"


def test_text_without_ids_counts_a_chunk_as_one_and_is_not_called_ids() -> None:
    answer = read(
        completion("several words at once"), completion("more"), completion(finish="stop"), usage(9)
    )
    assert chunks(answer) == [(10, 1), (20, 1)]
    assert not answer.counted_by_ids
    assert answer.usage_output == 9


def test_bundles() -> None:
    answer = read(
        *(completion("x" * 20, list(range(20))) for _ in range(5)), completion(finish="length"), DONE
    )
    assert chunks(answer) == [(10 * k, 20) for k in range(1, 6)]


def test_a_body_in_one_piece_is_one_chunk_of_all_its_tokens() -> None:
    body = {
        "choices": [{"index": 0, "message": {"content": "all of it"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 7, "prompt_tokens": 3},
    }
    raw = json.dumps(body).encode()
    answer = read(raw[:9], raw[9:], stream=False, kind="application/json; charset=utf-8")
    assert chunks(answer) == [(20, 7)]
    assert outcome(answer) == ("completed", None)
    with_ids = {"choices": [{"text": "abc", "token_ids": [1, 2, 3], "finish_reason": "length"}]}
    assert chunks(read(json.dumps(with_ids).encode(), stream=False, kind="application/json")) == [(10, 3)]


def state(answer: Answer) -> dict[str, Any]:
    """All that an answer has understood, without when and in how many reads it came."""
    names = ("verdict", "chunk_tokens", "tokens", "ids", "usage_output", "usage_prompt", "usage_reasoning")
    more = ("finish_reason", "done", "text", "counted_by_ids", "ended")
    values = {name: getattr(answer, name) for name in names + more}
    return values | {"event": answer.first_event_ns is None, "output": answer.first_output_ns is None}


USUAL = (
    *(completion("a"), completion("b", [7]), completion("", [8, 9]), completion(), completion(finish="stop")),
    *(chat({"role": "assistant", "content": ""}), chat({"content": "c"}), chat({"reasoning": "r"})),
    *(chat({"role": "assistant", "content": "d"}), chat({"content": "e", "reasoning": "f"}), chat({})),
    *(chat({"tool_calls": [{"function": {"arguments": "{"}}]}), usage(5), DONE, b": ping\n\n", b"data:\n\n"),
    *(
        b"data: {bad\n\n",
        sse({"error": "x"}),
        sse({"error": None, "choices": []}),
        b"event: error\ndata: {}\n\n",
    ),
    *(b"data: 7\n\n", b"\n", b"data: [1]\ndata: 2\n\n", b"data:  [DONE] \n\n", b"id: 1\ndata: {}\n\n"),
    *(sse({"choices": [{"text": "t", "delta": {"content": "u"}}]}), sse({"choices": [{"text": 1}]})),
    *(sse({"choices": [{"delta": {"content": "v"}}, {"delta": {"reasoning": "w"}}]}), sse({"choices": [3]})),
    *(
        sse({"choices": [{"index": 1, "text": "x"}]}),
        chat({"content": [{"text": "y"}]}),
        sse({"error": False}),
    ),
    *(b'data: {"choices": [{"text": "\xff", "logprobs": NaN}]}\n\n', b"event: ping\ndata: alive\n\n"),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(USUAL), max_size=7),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=4),
)
def test_the_short_way_understands_what_the_long_way_does(
    events: list[bytes], crlf: bool, cuts: list[int]
) -> None:
    """Whole, event by event, cut anywhere and byte by byte, with either line end; and with the short cuts of
    parser and chunk taken out."""
    stream = b"".join(events).replace(b"\n", b"\r\n" if crlf else b"\n")
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    ways = [
        [stream],
        [event.replace(b"\n", b"\r\n" if crlf else b"\n") for event in events],
        [stream[a:b] for a, b in pairwise(borders)],
        [bytes([byte]) for byte in stream],
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SSEParser, "whole", lambda self, piece: None)
        patch.setattr(answer_module, "_is_content", lambda delta: False)
        long_way = state(read(stream))
    for pieces in ways:
        assert state(read(*pieces)) == long_way


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["content", "reasoning", "reasoning_content", "refusal", "role"]),
        st.sampled_from(["", "x", "yz", None, 3]),
    ),
    st.sampled_from(["absent", None, "", "t"]),
)
def test_all_texts_of_a_choice_are_kept(delta: dict[str, Any], text: str | None) -> None:
    choice = {"delta": delta} | ({} if text == "absent" else {"text": text})
    answer = read(sse({"choices": [choice]}))
    values = [v for k, v in delta.items() if k != "role"] + [text if text != "absent" else None]
    texts = [v for v in values if isinstance(v, str)]
    assert sorted(answer.text or "") == sorted("".join(texts))
    assert answer.tokens == any(texts)


@pytest.mark.parametrize("claimed", [2**63, 2**64 - 1, 10**30, -1, 1.5, "7", True])
def test_a_count_that_no_answer_can_have_is_no_count(claimed: Any) -> None:
    answer = read(completion("a"), completion("b"), completion(finish="stop"), usage(claimed), DONE)
    assert outcome(answer) == ("completed", None)
    assert answer.usage_output is None
