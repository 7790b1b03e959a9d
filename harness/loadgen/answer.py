"""One answer as it arrives: which pieces carry tokens, how many, how it ended. It knows bytes, no network.

A chunk carries tokens iff it has token ids or a non-empty delta on any channel (text, content, reasoning,
tool call): role-only, empty and usage-only chunks never count. Once a stream has shown ids, the ids alone
are counted, since text that was held back (a split UTF-8 character, a stop string) belongs to tokens that
were counted before. Ids without text are on the channel of the text before them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from harness.loadgen.sse import SSEError, SSEParser

ERROR_CHARS = 300
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_TOKENS = 1_000_000_000
"""A server that claims more for one request does not count: the records hold 64 bits."""
_OUTPUT_CHANNELS = ("content", "refusal")
_REASONING_CHANNELS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a request ended: one of harness.records.OUTCOMES, and for all but completed the reason."""

    outcome: str
    reason: str | None = None
    error: str | None = None
    status: int | None = None  # of HTTP, where it decided


class Answer:
    """Accumulates one response. `verdict` is set once, when the answer says how it ended.

    Stamps are CLOCK_MONOTONIC ns of the read that brought the bytes. Nothing that a server sends raises: what
    cannot be understood ends in a verdict.
    """

    def __init__(self, *, stream: bool, keep_text: bool) -> None:
        self.stream = stream
        self.verdict: Verdict | None = None
        self.status: int | None = None
        self.headers_ns: int | None = None
        self.first_event_ns: int | None = None
        self.first_output_ns: int | None = None  # the first token that is no reasoning
        self.last_data_ns: int | None = None
        self.reads = 0  # that brought bytes of the body
        self.chunk_ns: list[int] = []
        self.chunk_tokens: list[int] = []
        self.tokens = 0  # that have arrived, as far as the chunks tell
        self.ids = 0  # of these, counted by their ids
        self.usage_output: int | None = None
        self.usage_prompt: int | None = None
        self.usage_reasoning: int | None = None
        self.finish_reason: str | None = None
        self.done = False  # [DONE] was read
        self._keep_text = keep_text
        self._text: list[str] = []
        self._unidentified = False  # some chunk carried text without ids
        self._reasons = False  # the last text was reasoning
        self._parser: SSEParser | None = None
        self._body = bytearray()

    @property
    def text(self) -> str | None:
        return "".join(self._text) if self._keep_text else None

    @property
    def ended(self) -> bool:
        """The server has said that the answer is whole; what follows (usage, end of body) is formality."""
        return self.done or self.finish_reason is not None

    @property
    def counted_by_ids(self) -> bool:
        return self.ids > 0 and not self._unidentified

    @property
    def coalesced(self) -> int:
        """Chunks with tokens that came in one read with an earlier one: their gap is not the server's."""
        return sum(before == after for before, after in pairwise(self.chunk_ns))

    def begin(self, now_ns: int, status: int, content_type: str) -> None:
        """The response's head has arrived."""
        self.headers_ns, self.status = now_ns, status
        is_json = content_type.partition(";")[0].strip().lower() == "application/json"
        is_stream = "text/event-stream" in content_type.lower() or (self.stream and not is_json)
        if status == 200 and is_stream:
            self._parser = SSEParser()

    def feed(self, now_ns: int, piece: bytes) -> bool:
        """Bytes of the body; those of one read have one stamp. False: the verdict is in, there is no reason
        to read on."""
        if now_ns != self.last_data_ns:
            self.reads += 1
            self.last_data_ns = now_ns
        if self._parser is None:
            if len(self._body) + len(piece) > MAX_BODY_BYTES:
                self._fail("malformed", f"the body is larger than {MAX_BODY_BYTES} bytes")
                return False
            self._body += piece
            return True
        try:
            whole = self._parser.whole(piece)
            if whole is not None:
                for data in whole:
                    self._message(now_ns, data)
                    if self.verdict is not None:
                        return False
                return True
            for event in self._parser.feed(piece):
                self._event(now_ns, event.event, event.data)
                if self.verdict is not None:
                    return False
        except SSEError as exc:
            self._fail("malformed", str(exc))
            return False
        return True

    def finish(self, broken: Verdict | None = None) -> Verdict:
        """The body has ended, or the connection broke (`broken` says how). Returns the verdict."""
        if self.verdict is None and self.status is not None and self._parser is None:
            if broken is None:
                self._whole_body()
            elif self.status != 200:
                self.verdict = self._refusal()
        if self.verdict is None:
            if self.ended:
                self.verdict = self._finished()
            elif broken is not None:
                self.verdict = broken
            else:
                self._fail("ended_early", "stream ended early: no finish_reason and no [DONE]")
        assert self.verdict is not None
        return self.verdict

    def _message(self, now_ns: int, data: bytes) -> None:
        """An event without a name: the usual chunk by the short way, all else by _event."""
        if self.done:
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = None
        if type(chunk) is dict and "error" not in chunk:
            self._chunk(now_ns, chunk, data)
        else:
            self._event(now_ns, "message", data)

    def _event(self, now_ns: int, name: str, data: bytes) -> None:
        data = data.strip()
        if self.done or not data:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            self._fail("malformed", f"not JSON: {_short(data)}")
            return
        if not isinstance(chunk, dict):
            self._fail("malformed", f"not a JSON object: {_short(data)}")
        elif name == "error" or chunk.get("error") is not None:
            self.verdict = _error_verdict(chunk.get("error", chunk))
        else:
            self._chunk(now_ns, chunk, data)

    def _chunk(self, now_ns: int, chunk: dict[str, Any], data: bytes) -> None:
        if (usage := chunk.get("usage")) is not None:
            self._usage(usage)
        choices = chunk.get("choices")
        if not choices:
            return
        if not isinstance(choices, list) or any(type(choice) is not dict for choice in choices):
            self._fail("malformed", f"choices is not a list of objects: {_short(data)}")
            return
        if self.first_event_ns is None:
            self.first_event_ns = now_ns
        tokens, output = 0, False
        for choice in choices:
            brought = self._choice(choice)
            tokens += brought
            output = output or (brought > 0 and not self._reasons)
        if tokens:
            self.chunk_ns.append(now_ns)
            self.chunk_tokens.append(tokens)
            self.tokens += tokens
            if output and self.first_output_ns is None:
                self.first_output_ns = now_ns

    def _choice(self, choice: dict[str, Any]) -> int:
        """Take in one choice of a chunk or of a whole body; the tokens that it brings."""
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason
        text, delta = choice.get("text"), choice.get("delta")
        if text is None and delta is not None and _is_content(delta):
            text, delta = delta["content"], None
        if type(text) is str and delta is None and "message" not in choice:  # the usual chunk
            if text:
                self._reasons = False
                if self._keep_text:
                    self._text.append(text)
        else:
            reasoning, output = _delta_pieces(choice)
            text = reasoning or output
            if text:
                self._reasons = not output
                if self._keep_text:
                    self._text += reasoning
                    self._text += output
        ids = choice.get("token_ids")
        if ids and isinstance(ids, list):
            self.ids += len(ids)
            return len(ids)
        if self.ids or not text:
            return 0
        self._unidentified = True
        return 1

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        output, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if _is_count(output):
            self.usage_output = output
        if _is_count(prompt):
            self.usage_prompt = prompt
        details = usage.get("completion_tokens_details")
        if isinstance(details, dict) and _is_count(reasoning := details.get("reasoning_tokens")):
            self.usage_reasoning = reasoning

    def _whole_body(self) -> None:
        """A response that is one JSON document: a refusal, or an answer that came in one piece."""
        if self.status != 200:
            self.verdict = self._refusal()
            return
        try:
            body = orjson.loads(self._body)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            self._fail("malformed", f"not a JSON object: {_short(bytes(self._body[:1000]))}")
            return
        if body.get("error") is not None:
            self.verdict = _error_verdict(body["error"])
            return
        now_ns = self.last_data_ns or self.headers_ns or 0
        self._chunk(now_ns, body, bytes(self._body[:1000]))
        if self.chunk_tokens and not self.ids and self.usage_output:
            # One piece: all of its tokens came with it.
            self.tokens = self.chunk_tokens[-1] = self.usage_output

    def _refusal(self) -> Verdict:
        """A status other than 200. 429 and 503 are the server's refusals, everything else is a failure. Where
        the body is an OpenAI error, its code and message are kept."""
        text, reason = _short(bytes(self._body[: 4 * ERROR_CHARS])), f"http_{self.status}"
        try:
            error = orjson.loads(self._body)["error"]
            code, message = error.get("code"), error.get("message")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            code = message = None
        reason = code if isinstance(code, str) and code else reason
        text = message[:ERROR_CHARS] if isinstance(message, str) and message else text or reason
        outcome = "rejected" if self.status in (429, 503) else "failed"
        return Verdict(outcome, reason, text, self.status)

    def _finished(self) -> Verdict:
        if self.finish_reason == "queue_timeout":
            return Verdict("rejected", "queue_timeout")
        if self.finish_reason in ("error", "abort"):
            return Verdict("failed", f"finish_{self.finish_reason}", f"finish_reason {self.finish_reason}")
        return Verdict("completed")

    def _fail(self, reason: str, error: str) -> None:
        self.verdict = Verdict("failed", reason, error[:ERROR_CHARS])


def _is_content(delta: Any) -> bool:
    """A delta of the usual shape: content, and at most the role beside it."""
    return type(delta) is dict and "content" in delta and len(delta) == 1 + ("role" in delta)


def _delta_pieces(choice: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The non-empty texts of a choice, streamed (delta) or whole (message): (reasoning, all the rest)."""
    output = [choice.get("text")]
    reasoning: list[Any] = []
    delta = choice.get("delta") or choice.get("message")
    if isinstance(delta, dict):
        reasoning = [delta.get(name) for name in _REASONING_CHANNELS]
        output += [delta.get(name) for name in _OUTPUT_CHANNELS]
        calls = delta.get("tool_calls")
        functions = (
            [c.get("function") for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
        )
        functions.append(delta.get("function_call"))
        for function in functions:
            if isinstance(function, dict):
                output += [function.get("name"), function.get("arguments")]
    return _texts(reasoning), _texts(output)


def _texts(values: list[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str) and value]


def _error_verdict(error: Any) -> Verdict:
    """An error that came inside a stream of status 200."""
    message = _short(orjson.dumps(error))
    labels: tuple[Any, ...] = ()
    if isinstance(error, dict):
        labels = (error.get("code"), error.get("type"))
        if isinstance(error.get("message"), str):
            message = error["message"][:ERROR_CHARS]
    if "queue_timeout" in labels:
        return Verdict("rejected", "queue_timeout", message)
    return Verdict("failed", "error_event", message)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


def _short(data: bytes) -> str:
    return " ".join(data.decode("utf-8", "replace").split())[:ERROR_CHARS]
