"""What a client may ask: the bodies of POST /v1/completions and /v1/chat/completions, checked field by field.

A field that we know is used, a field whose value changes nothing is accepted, and everything else is refused
with a message that names it: an option that is silently ignored would make a benchmark lie.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engines.request import Request, SamplingParams
from engines.server.errors import ApiError, shown

MAX_STOPS = 4
MAX_STOP_CHARS = 256
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's API has it; a chat answer may fill the context
GREEDY_BELOW = 1e-5  # temperatures that only overflow a float32 softmax
ROLES = ("system", "developer", "user", "assistant", "tool")
NO_LABEL: Mapping[str, Any] = {}

_COMMON = (
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "ignore_eos",
    "n",
    "priority",
    "batchmark",
    "return_token_ids",
)
COMPLETION_FIELDS = (*_COMMON, "prompt")
CHAT_FIELDS = (*_COMMON, "messages", "max_completion_tokens")
_BATCHMARK_FIELDS = ("run", "id", "attempt", "tenant", "request_class", "deadline_ms", "stop_after")

_UNREAD = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Say who asks and how it is billed, not what the answer is."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
}
"""Fields of other servers that we do not implement, with the values (beside null) that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked body. `prompt` is text or token ids, `messages` a conversation: one of the two is None."""

    model: str | None  # as the client named it
    prompt: str | list[int] | None
    messages: list[dict[str, str]] | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    max_tokens: int | None  # None: as many as the context holds
    sampling: SamplingParams
    stop: tuple[str, ...]
    ignore_eos: bool
    priority: int
    batchmark: Mapping[str, Any] = field(default_factory=dict)

    def to_request(self, prompt_token_ids: list[int], max_model_len: int) -> Request:
        """For the engine, which refuses what can never fit. Raises ApiError when the prompt leaves no room
        for max_tokens (as vLLM does: an answer cut in silence would be another benchmark), or when stop_after
        > max_tokens."""
        room = max(
            1, max_model_len - len(prompt_token_ids)
        )  # a prompt without room is the engine's to refuse
        limit = self.max_tokens or room
        if limit > room and len(prompt_token_ids) < max_model_len:
            raise ApiError(
                f"max_tokens={limit}: the prompt has {len(prompt_token_ids)} tokens, which leaves {room} of "
                f"engine.max_model_len={max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        mark = self.batchmark
        stop_after = mark.get("stop_after")
        if stop_after is not None and stop_after > limit:
            raise _wrong("batchmark.stop_after", stop_after, f"a whole number from 1 to max_tokens={limit}")
        return Request(
            prompt_token_ids=prompt_token_ids,
            max_tokens=limit,
            sampling=self.sampling,
            ignore_eos=self.ignore_eos,
            stop_after=stop_after,
            priority=self.priority,
            tenant=mark.get("tenant") or "",
            request_class=mark.get("request_class") or "",
            deadline_ms=mark.get("deadline_ms"),
            label={key: mark.get(key) for key in ("run", "id", "attempt")},
        )


def max_body_bytes(max_model_len: int) -> int:
    """The largest body that is read: no prompt that fits needs more than 64 bytes of JSON a token."""
    return 65536 + 64 * max_model_len


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError(400) for anything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _name_non_finite(body)
        raise ApiError(f"the body is not JSON in UTF-8: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body is {shown(value)}: needs a JSON object", code="invalid_json")
    return value


def parse_completion(body: Mapping[str, Any], models: Sequence[str], vocab_size: int) -> Generation:
    """The body of POST /v1/completions. Raises ApiError."""
    _check_fields(body, COMPLETION_FIELDS)
    check_model(body.get("model"), models)
    return _generation(
        body,
        prompt=_prompt(body, vocab_size),
        messages=None,
        max_tokens=_integer(body, "max_tokens", 1) or DEFAULT_MAX_TOKENS,
    )


def parse_chat(body: Mapping[str, Any], models: Sequence[str]) -> Generation:
    """The body of POST /v1/chat/completions. Raises ApiError."""
    _check_fields(body, CHAT_FIELDS)
    check_model(body.get("model"), models)
    old = _integer(body, "max_tokens", 1)
    new = _integer(body, "max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise _wrong(
            "max_completion_tokens", new, f"the same value as max_tokens={old}, or only one of the two"
        )
    return _generation(body, prompt=None, messages=_messages(body), max_tokens=new or old)


def _generation(
    body: Mapping[str, Any],
    prompt: str | list[int] | None,
    messages: list[dict[str, str]] | None,
    max_tokens: int | None,
) -> Generation:
    n = _integer(body, "n", 1)
    if n not in (None, 1):
        raise _wrong("n", n, "1; send the request as often as you want answers")
    temperature = _number(body, "temperature", 0.0, 2.0)
    top_p = _number(body, "top_p", 0.0, 1.0, above=True)
    seed = _integer(body, "seed", -(2**63), 2**63 - 1)
    stream = _flag(body, "stream")
    return Generation(
        model=body.get("model"),
        prompt=prompt,
        messages=messages,
        stream=stream,
        include_usage=_include_usage(body, stream),
        return_token_ids=_flag(body, "return_token_ids"),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=1.0 if temperature is None else temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=1.0 if top_p is None else top_p,
            seed=None if seed is None else seed % 2**63,
        ),
        stop=_stop(body),
        ignore_eos=_flag(body, "ignore_eos"),
        priority=_integer(body, "priority", -(2**31), 2**31 - 1) or 0,
        batchmark=_batchmark(body),
    )


def _prompt(body: Mapping[str, Any], vocab_size: int) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ApiError(
                f"prompt holds {len(prompt)} prompts: needs one; send a request for each", param="prompt"
            )
        prompt = prompt[0]
    what = "text or a list of token ids, not empty"
    if prompt is None or prompt == "" or prompt == []:
        raise _wrong("prompt", prompt, what)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise _wrong("prompt", prompt, what)
    if not all(type(token) is int for token in prompt):
        at = next(i for i, token in enumerate(prompt) if type(token) is not int)
        raise _wrong(f"prompt[{at}]", prompt[at], "a token id, a whole number", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise _wrong(f"prompt[{at}]", prompt[at], f"a token id from 0 to {vocab_size - 1}", param="prompt")
    return prompt


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of {role, content}, not empty")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(name: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(name, message, "an object with role and content", param="messages")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}", param="messages")
    for key in message:
        if key not in ("role", "content", "name") and message[key]:
            raise ApiError(f"{name}.{key} is not supported: leave it out", param="messages")
    if isinstance(content, list):
        parts = []
        for i, part in enumerate(content):
            if not (
                isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            ):
                raise _wrong(f"{name}.content[{i}]", part, '{"type":"text","text":…}', param="messages")
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise _wrong(f"{name}.content", content, "text, or a list of text parts", param="messages")
    return {"role": role, "content": content}


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, '{"include_usage": true}')
    if not stream:
        raise _wrong("stream_options", options, "stream=true beside it, or leave it out")
    for key, value in options.items():
        if key != "include_usage" and value:
            raise ApiError(f"stream_options.{key}={shown(value)}: not supported", param="stream_options")
    return _flag(options, "include_usage", "stream_options.")


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops)
    ):
        raise _wrong("stop", stop, f"up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _batchmark(body: Mapping[str, Any]) -> Mapping[str, Any]:
    mark = body.get("batchmark")
    if mark is None:
        return NO_LABEL
    if not isinstance(mark, dict):
        raise _wrong("batchmark", mark, f"an object of {', '.join(_BATCHMARK_FIELDS)}")
    for key in mark:
        if key not in _BATCHMARK_FIELDS:
            raise ApiError(
                f"batchmark.{key} is not a field: choose from {', '.join(_BATCHMARK_FIELDS)}",
                param="batchmark",
            )
    for key in ("run", "id", "tenant", "request_class"):
        value = mark.get(key)
        if value is not None and not (isinstance(value, str) and len(value) <= 200):
            raise _wrong(f"batchmark.{key}", value, "text of at most 200 characters", param="batchmark")
    _integer(mark, "attempt", 0, 2**31 - 1, "batchmark.")
    _integer(mark, "stop_after", 1, 2**31 - 1, "batchmark.")
    return mark | {"deadline_ms": _number(mark, "deadline_ms", 0.0, 1e12, "batchmark.", above=True)}


def _check_fields(body: Mapping[str, Any], known: Sequence[str]) -> None:
    for name, value in body.items():
        if name in known or name in _UNREAD or value is None:
            continue
        if name in _NEUTRAL:
            if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
                allowed = " or ".join(shown(v) for v in _NEUTRAL[name])
                raise ApiError(
                    f"{name}={shown(value)}: not supported by this server; leave it out or send {allowed}",
                    param=name,
                    code="unsupported_parameter",
                )
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        raise ApiError(f"{shown(name)} is not a field: {hint}", param=name[:100], code="unknown_parameter")


def check_model(model: Any, served: Sequence[str]) -> None:
    """Raises ApiError(404) when a client asks for a model by another name than those that are served."""
    if model is None or model in served:
        return
    names = " or ".join(shown(name) for name in served)
    if not isinstance(model, str):
        raise _wrong("model", model, f"text: {names}")
    raise ApiError(f"model={shown(model)} is not served here: needs {names}", 404, "model", "model_not_found")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, with a flag never equal to a number: logprobs=0 asks for something, logprobs=false does not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _wrong(name: str, value: Any, needs: str, param: str | None = None) -> ApiError:
    return ApiError(f"{name}={shown(value)}: needs {needs}", param=param or name, code="invalid_value")


def _flag(body: Mapping[str, Any], name: str, prefix: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(prefix + name, value, "true or false")
    return bool(value)


def _integer(
    body: Mapping[str, Any], name: str, low: int, high: int = 2**31 - 1, prefix: str = ""
) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise _wrong(prefix + name, value, f"a whole number from {low} to {high}")
    return value


def _number(
    body: Mapping[str, Any], name: str, low: float, high: float, prefix: str = "", above: bool = False
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (above and value == low):
        border = "a number above" if above else "a number from"
        raise _wrong(prefix + name, value, f"{border} {low:g} {'up ' if above else ''}to {high:g}")
    return float(value)


def _name_non_finite(body: bytes) -> None:
    """NaN and Infinity are not JSON, but Python's json writes them: name the field that holds one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return
    for name, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, float) and not math.isfinite(item):
            raise ApiError(
                f"{shown(name)}={item}: needs a finite number", param=name[:100], code="invalid_value"
            )
