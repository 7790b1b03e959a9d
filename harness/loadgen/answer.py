"""One answer as it arrives: which pieces carry tokens, how many, how it ended. It knows bytes, no network.

A chunk carries tokens iff it has token ids or a non-empty delta on any channel (text, content, reasoning,
tool call): role-only, empty and usage-only chunks never count. Once a stream has shown ids, the ids alone
are counted, since text that was held back (a split UTF-8 character, a stop string) belongs to tokens that
were counted before. Ids without text are on the channel of the text before them.

An answer has ended with [DONE], or once each choice that has shown itself has a finish_reason. What comes
after that may add to it (usage, a late token), and can't unmake it: neither an error nor nonsense."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from harness.loadgen.sse import SSEError, SSEParser

ERROR_CHARS = 300
LABEL_CHARS = 64
"""Of a server's error code or finish_reason."""
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_TOKENS = 1_000_000_000
"""A server that claims more for one request does not count: the records hold 64 bits."""
_OUTPUT_CHANNELS = ("content", "refusal")
_REASONING_CHANNELS = ("reasoning_content", "reasoning")
_NOT_SERVED = ("queue_timeout", "error", "abort")  # finish_reasons


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
    cannot be understood ends in a verdict. What a server says of itself (error, code, finish_reason) is kept
    short and printable. With several choices the tokens are those of all, and finish_reason is that of the
    first to end, or of one that was not served.
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
        self.usage_cached: int | None = None  # of the prompt, found in the server's prefix cache
        self.finish_reason: str | None = None
        self.done = False  # [DONE] was read
        self._keep_text = keep_text
        self._text: list[str] = []
        self._unidentified = False  # some chunk carried text without ids
        self._reasons = False  # the last text was reasoning
        self._index: int | None = None  # of the choice that came last
        self._choices: dict[int, bool] = {}  # that have shown themselves: index -> has it ended
        self._open = 0  # of these, those that have not
        self._parser: SSEParser | None = None
        self._body = bytearray()

    @property
    def text(self) -> str | None:
        return _unicode("".join(self._text)) if self._keep_text else None

    @property
    def ended(self) -> bool:
        """The server has said that the answer is whole; what follows (usage, end of body) is formality."""
        return self.done or (self.finish_reason is not None and not self._open)

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
        """Bytes of the body; those of one read have one stamp. False: there is no reason to read on, finish()
        has the verdict."""
        if now_ns != self.last_data_ns:
            self.reads += 1
            self.last_data_ns = now_ns
        if self._parser is None:
            if len(self._body) + len(piece) > MAX_BODY_BYTES:
                if self.status == 200:
                    self._fail("malformed", f"the body is larger than {MAX_BODY_BYTES} bytes")
                else:
                    self.verdict = self._refusal()
                return False
            self._body += piece
            return True
        if self.done:
            return True
        whole = self._parser.whole(piece)
        if whole is not None:
            for data in whole:
                self._message(now_ns, data)
                if self.verdict is not None:
                    return False
            return True
        too_large = None
        try:
            events = self._parser.feed(piece)
        except SSEError as exc:
            events, too_large = exc.before, exc
        for event in events:
            self._event(now_ns, event.event, event.data)
            if self.verdict is not None:
                return False
        if too_large is None or self.done:
            return True
        self._fail("malformed", str(too_large))
        return False

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
        if data == b"[DONE]":  # whatever the event's name
            self.done = True
            return
        if name not in ("message", "error"):  # a ping, or news that a client of OpenAI's API did not ask for
            return
        chunk = _json(data)
        if name == "error" or (isinstance(chunk, dict) and chunk.get("error")):
            if not self.ended:
                self.verdict = _error_verdict(chunk, data)
        elif isinstance(chunk, dict):
            self._chunk(now_ns, chunk, data)
        else:
            self._fail("malformed", f"not a JSON object: {_short(data)}")

    def _chunk(self, now_ns: int, chunk: dict[str, Any], data: bytes) -> None:
        if (usage := chunk.get("usage")) is not None:
            self._usage(usage)
        choices = chunk.get("choices")
        if not choices:
            return
        if type(choices) is not list:
            choices = [None]
        for choice in choices:
            if type(choice) is not dict:
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
        index, reason = choice.get("index"), choice.get("finish_reason")
        if reason or index != self._index or not self._choices:
            self._progress(index, reason)
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

    def _progress(self, index: Any, reason: Any) -> None:
        """A choice has shown itself, or ends."""
        number = index if isinstance(index, int) else 0
        self._index = None if index is None else number
        if number not in self._choices:
            self._choices[number] = False
            self._open += 1
        reason = printable(reason, LABEL_CHARS) if isinstance(reason, str) else ""
        if reason and not self._choices[number]:
            self._choices[number] = True
            self._open -= 1
            if self.finish_reason is None or reason in _NOT_SERVED:
                self.finish_reason = reason

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
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and _is_count(cached := details.get("cached_tokens")):
            self.usage_cached = cached

    def _whole_body(self) -> None:
        """A response that is one JSON document: a refusal, or an answer that came in one piece."""
        if self.status != 200:
            self.verdict = self._refusal()
            return
        raw = bytes(self._body)
        body = _json(raw)
        if not isinstance(body, dict):
            self._fail("malformed", f"not a JSON object: {_short(raw)}")
            return
        if body.get("error"):
            self.verdict = _error_verdict(body, raw)
            return
        now_ns = self.last_data_ns or self.headers_ns or 0
        self._chunk(now_ns, body, raw)
        if self.chunk_tokens and not self.ids and self.usage_output:
            # One piece: all of its tokens came with it.
            self.tokens = self.chunk_tokens[-1] = self.usage_output

    def _refusal(self) -> Verdict:
        """A status other than 200. 429 and 503 are the server's refusals, everything else is a failure. Where
        the body is an OpenAI error, its code and message are kept."""
        raw, reason = bytes(self._body), f"http_{self.status}"
        body = _json(raw)
        error = body.get("error") if isinstance(body, dict) else None
        code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, None)
        reason = (printable(code, LABEL_CHARS) if isinstance(code, str) else "") or reason
        text = (printable(message) if isinstance(message, str) else "") or _short(raw) or reason
        outcome = "rejected" if self.status in (429, 503) else "failed"
        return Verdict(outcome, reason, text, self.status)

    def _finished(self) -> Verdict:
        if self.finish_reason == "queue_timeout":
            return Verdict("rejected", "queue_timeout")
        if self.finish_reason in ("error", "abort"):
            return Verdict("failed", f"finish_{self.finish_reason}", f"finish_reason {self.finish_reason}")
        return Verdict("completed")

    def _fail(self, reason: str, error: str) -> None:
        if not self.ended:
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
        for part in _dicts(delta.get("content")):  # content as a list of typed parts
            output += [part.get("text"), part.get("refusal")]
            thinking = part.get("thinking")
            reasoning += [thinking, *(inner.get("text") for inner in _dicts(thinking))]
        calls = [delta.get("function_call")]
        for call in _dicts(delta.get("tool_calls")):
            calls += [call.get("function"), call.get("custom")]
        for call in _dicts(calls):
            output += [call.get("name"), call.get("arguments"), call.get("input")]
    return _texts(reasoning), _texts(output)


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _texts(values: list[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str) and value]


def _json(data: bytes) -> Any:
    """What orjson takes; and what servers in Python write that is not quite JSON: NaN and Infinity (of
    logprobs), lone surrogates. Invalid UTF-8 is replaced as a text/event-stream's is (WHATWG Encoding,
    "UTF-8 decode"). None: it is nothing of that."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _error_verdict(body: Any, data: bytes) -> Verdict:
    """An error that came with status 200: an object with `error`, or the data of an error event."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message, labels = error, (None, None)
    if isinstance(error, dict):
        message, labels = error.get("message"), (error.get("code"), error.get("type"))
    text = (printable(message) if isinstance(message, str) else "") or _short(data)
    if "queue_timeout" in labels:
        return Verdict("rejected", "queue_timeout", text)
    return Verdict("failed", "error_event", text)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


def _short(data: bytes) -> str:
    return printable(data[: 8 * ERROR_CHARS].decode("utf-8", "replace"))


def printable(text: str, chars: int = ERROR_CHARS) -> str:
    """One line of at most so many characters; U+FFFD for what a terminal or a file should not be given."""
    line = " ".join(text[: 8 * chars].split())[:chars]
    return "".join(char if char.isprintable() else "\ufffd" for char in line)


def _unicode(text: str) -> str:
    """With U+FFFD for lone surrogates, which no file can hold; the halves of a pair are put together."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
