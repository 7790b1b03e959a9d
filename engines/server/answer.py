"""One answer in OpenAI's format: what the engine produced becomes chunks, or one body."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from engines.request import Refused
from engines.server.detokenizer import Detokenizer
from engines.server.engine_client import Delta
from engines.server.errors import ApiError
from engines.server.protocol import Generation

GIVEN_UP = {
    "queue_timeout": "waited longer than engine.queue_timeout_ms in the queue",
    "deadline": "can no longer end before its deadline",
}
"""Ends of requests that never had a seat, which makes them refusals."""
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Visible:
    """What a delta adds to the answer that the client sees."""

    text: str
    token_ids: list[int]


class Answer:
    """Text, usage and finish reason of one answer. It is complete once finish_reason is set: stop |
    length."""

    def __init__(
        self, asked: Generation, model: str, answer_id: str, prompt_tokens: int, detokenizer: Detokenizer
    ) -> None:
        self.finish_reason: str | None = None
        self.output_tokens = 0
        self._cached_tokens: int | None = None
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._detokenizer = detokenizer
        self._chat = asked.messages is not None
        self._role_sent = False
        self.id = ("chatcmpl-" if self._chat else "cmpl-") + answer_id
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": self.id,
            "object": kind + ".chunk" if self._chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def take(self, delta: Delta) -> Visible:
        """Detokenise, look for stop strings, note the end. Raises Refused and ApiError when the engine gave
        up."""
        if delta.finish_reason in GIVEN_UP:
            raise Refused(delta.finish_reason, GIVEN_UP[delta.finish_reason], 503)
        if delta.finish_reason not in (None, "stop", "length"):
            going = delta.finish_reason == "going"  # the server is: its stream has begun
            message = delta.error or f"the engine ended this request: {delta.finish_reason}"
            raise ApiError(message, 503 if going else 500, code="going" if going else None)
        self._cached_tokens = delta.cached_tokens
        piece = self._detokenizer.push(delta.token_ids)
        self.output_tokens += piece.used
        text = piece.text
        if piece.stopped:
            self.finish_reason = "stop"
        elif delta.finish_reason is not None:
            rest, stopped = self._detokenizer.flush()
            text += rest
            self.finish_reason = "stop" if stopped else delta.finish_reason
        return Visible(text, delta.token_ids[: piece.used])

    def events(self, visible: Visible) -> bytes:
        """The server-sent events for what became visible, all in one write. b"" when there is nothing to show
        yet."""
        return b"".join([b"data: %b\n\n" % chunk for chunk in self.chunks(visible)])

    def chunks(self, visible: Visible) -> list[bytes]:
        """The messages for what became visible, whatever carries them: the role of a chat answer before its
        first token, the usage and [DONE] after its last."""
        if not (visible.text or self._asked.return_token_ids or self.finish_reason):
            return []
        if self._chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": visible.text} if visible.text else {}}
        else:
            choice = {"index": 0, "text": visible.text}
        if self._asked.return_token_ids:
            choice["token_ids"] = visible.token_ids
        choice["finish_reason"] = self.finish_reason
        parts = []
        if self._chat and not self._role_sent:
            self._role_sent = True
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            parts.append(self._chunk([role]))
        parts.append(self._chunk([choice]))
        if self.finish_reason is not None:
            if self._asked.include_usage:
                parts.append(self._chunk([], usage=self._usage()))
            parts.append(DONE)
        return parts

    def body(self, text: str, token_ids: list[int]) -> bytes:
        """The whole answer to a request without `stream`."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self._asked.return_token_ids:
            choice["token_ids"] = token_ids
        return orjson.dumps({**self._head, "choices": [choice], "usage": self._usage()})

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return orjson.dumps({**self._head, "choices": choices, **more})

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self._prompt_tokens + self.output_tokens,
        }
        if self._cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        return usage
