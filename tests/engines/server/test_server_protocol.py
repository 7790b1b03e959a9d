"""Bodies of requests: what is taken, and what is refused in words that help."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.server import wire
from engines.server.errors import ApiError
from engines.server.protocol import max_body_bytes, parse_chat, parse_completion, parse_json

VOCAB = 384


def completion(**fields: Any) -> Any:
    return parse_completion({"model": "tiny", "prompt": "hi", **fields}, ("tiny",), VOCAB)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert "\n" not in caught.value.message
    return caught.value


def test_every_field_arrives() -> None:
    asked = completion(
        prompt=[[1, 2, 3]],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        stop=["a", "b", "a"],
        ignore_eos=True,
        n=1,
        priority=-2,
        return_token_ids=True,
        batchmark={
            "run": "R",
            "id": "r1",
            "attempt": 2,
            "tenant": "t",
            "request_class": "c",
            "deadline_ms": 5.5,
            "stop_after": 3,
        },
        user="me",
        logprobs=None,
        presence_penalty=0,
    )
    request = asked.to_request(asked.prompt, 100)
    assert (asked.stream, asked.include_usage, asked.return_token_ids) == (True, True, True)
    assert asked.stop == ("a", "b")
    assert request.prompt_token_ids == [1, 2, 3]
    assert (request.max_tokens, request.stop_after, request.ignore_eos, request.priority) == (7, 3, True, -2)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    assert request.sampling.seed == 2**63 - 1  # taken modulo 2**63
    assert (request.tenant, request.request_class, request.deadline_ms) == ("t", "c", 5.5)
    assert request.label == {"run": "R", "id": "r1", "attempt": 2}


def test_defaults_are_openais() -> None:
    asked = completion()
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p, asked.stream) == (
        16,
        1.0,
        1.0,
        False,
    )
    chat = parse_chat({"messages": [{"role": "user", "content": "x"}]}, ("tiny",))
    assert chat.to_request([1] * 30, 100).max_tokens == 70


def test_an_answer_is_never_cut_in_silence() -> None:
    asked = completion(max_tokens=70)
    assert asked.to_request([1] * 30, 100).max_tokens == 70
    with pytest.raises(
        ApiError, match=r"max_tokens=70: the prompt has 31 tokens, which leaves 69 of"
    ) as error:
        asked.to_request([1] * 31, 100)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert asked.to_request([1] * 100, 100).max_tokens == 70  # too long a prompt is the engine's to refuse


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, "prompt=null"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": []}, "not empty"),
        ({"prompt": 5}, "prompt=5"),
        ({"prompt": ["a", "b"]}, "2 prompts"),
        ({"prompt": [1, True]}, "prompt[1]=true"),
        ({"prompt": [1, 2.0]}, "prompt[1]=2.0"),
        ({"prompt": [1, VOCAB]}, f"from 0 to {VOCAB - 1}"),
        ({"prompt": [-1]}, "prompt[0]=-1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": "4"}, 'max_tokens="4"'),
        ({"max_tokens": 4.0}, "whole number"),
        ({"max_tokens": True}, "max_tokens=true"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": "hot"}, "from 0 to 2"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "above 0 up to 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": 2**63}, "seed="),
        ({"n": 2}, "n=2: needs 1"),
        ({"n": 0}, "n=0"),
        ({"stream": 1}, "true or false"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream=true"),
        ({"stream": True, "stream_options": 1}, "stream_options=1"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"stop": ""}, "1 to 256"),
        ({"stop": ["a"] * 5}, "up to 4"),
        ({"stop": [1]}, "stop=[1]"),
        ({"ignore_eos": 0}, "ignore_eos=0"),
        ({"priority": 1.5}, "priority=1.5"),
        ({"batchmark": []}, "batchmark=[]"),
        ({"batchmark": {"tennant": "x"}}, "batchmark.tennant"),
        ({"batchmark": {"id": 7}}, "batchmark.id=7"),
        ({"batchmark": {"stop_after": 0}}, "batchmark.stop_after=0"),
        ({"batchmark": {"deadline_ms": -1}}, "batchmark.deadline_ms=-1"),
        ({"logprobs": 0}, "logprobs=0"),
        ({"logprobs": True}, "logprobs=true"),
        ({"best_of": 2}, "best_of=2"),
        ({"echo": True}, "echo=true"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"frequency_penalty": -1}, "frequency_penalty=-1"),
        ({"top_k": 40}, "top_k=40"),
        ({"temprature": 0}, "did you mean temperature?"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], words: str) -> None:
    error = refused(**fields)
    assert error.status == 400
    assert words in error.message
    assert error.param
    assert next(iter(fields)).startswith(error.param[:6])


@pytest.mark.parametrize("number", [1, 0, 0.5])
def test_every_number_is_one_that_the_engine_reads(number: float) -> None:
    """To JSON 500 and 500.0 are the same, to a message for the engine they are not."""
    fields: dict[str, Any] = {"temperature": number, "top_p": number or 1, "priority": int(number)}
    fields["batchmark"] = {"deadline_ms": number * 500 or 1, "stop_after": 1, "attempt": int(number)}
    asked = completion(prompt=[1], **fields)
    sent = wire.Add(1, 2, asked.to_request(asked.prompt, 100))
    frame = wire.encode(sent)
    assert wire.decode(frame[4], frame[wire.HEAD.size :]) == sent


def test_unknown_model_is_404() -> None:
    error = refused(model="gpt-5")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "tiny" in error.message
    assert refused(model=3).status == 400


def test_stop_after_lies_within_max_tokens() -> None:
    asked = completion(max_tokens=4, batchmark={"stop_after": 5})
    with pytest.raises(ApiError, match="from 1 to max_tokens=4"):
        asked.to_request([1], 100)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages=null"),
        ([], "not empty"),
        (["x"], "messages[0]"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content=null"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "tool_calls"),
    ],
)
def test_messages_are_checked(messages: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"messages": messages}, ("tiny",))
    assert words in caught.value.message


def test_text_parts_are_joined_and_the_two_limits_agree() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = parse_chat(
        {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 3}, ("tiny",)
    )
    assert asked.messages == [{"role": "user", "content": "ab"}]
    assert asked.max_tokens == 3
    with pytest.raises(ApiError, match="max_completion_tokens=3"):
        parse_chat({"messages": asked.messages, "max_completion_tokens": 3, "max_tokens": 4}, ("tiny",))


@pytest.mark.parametrize("depth", [100, 500, 1000])
@pytest.mark.parametrize("name", ["prompt", "stop", "model", "logit_bias", "batchmark", "colour"])
def test_a_value_of_any_depth_is_only_refused(name: str, depth: int) -> None:
    body = {"prompt": "x", **parse_json(f'{{"{name}":{"[" * depth}{"]" * depth}}}'.encode())}
    with pytest.raises(ApiError) as caught:
        parse_completion(body, ("tiny",), 256)
    assert (caught.value.status, name in caught.value.message) == (400, True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"prompt": "\xe9"}', "UTF-8"),
        (b"[" * 5000, "not JSON"),
        (b'{"a":' * 5000, "not JSON"),
        (b'{"temperature": NaN}', '"temperature"=nan: needs a finite number'),
        (b'{"top_p": 1e999}', '"top_p"=inf: needs a finite number'),
    ],
)
def test_bodies_that_are_not_json(body: bytes, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400
    assert words in caught.value.message


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p")
FIELDS += ("seed", "stop", "n", "ignore_eos", "priority", "batchmark", "return_token_ids", "logit_bias", "x")


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), anything))
def test_nothing_but_a_refusal_comes_of_nonsense(body: dict[str, Any]) -> None:
    refusals = []
    for parse in (lambda: parse_completion(body, ("tiny",), VOCAB), lambda: parse_chat(body, ("tiny",))):
        try:
            parse()
        except ApiError as error:
            refusals.append(error)
    assert len(refusals) >= 1  # no body is right for both
    assert all(error.status in (400, 404) and "\n" not in error.message for error in refusals)


def test_every_prompt_that_fits_is_under_the_limit_of_the_body() -> None:
    ids = orjson.dumps({"prompt": [151_935] * 4096})
    escaped = orjson.dumps({"prompt": "\x01" * 4096})  # six bytes a character
    assert max(len(ids), len(escaped)) < max_body_bytes(4096)
