"""Request bodies, built ahead of their time, so that nothing but a write stands between the clock and the
socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import orjson

from harness.loadgen.dispatch import Due
from harness.loadgen.settings import Target
from harness.tokenizer import exact_text
from workloads.schedule import ScheduledRequest

AHEAD = 64
"""Bodies kept ready. Enough for a burst; with 4,000-token prompts about 1.5 MB."""


class Prompts(Protocol):
    """workloads.prompts.PromptBook, or whatever else turns segments into token ids."""

    def tokens(self, segments: Iterable[tuple[str, int]]) -> list[int]: ...


def path_of(target: Target) -> str:
    return "v1/chat/completions" if target.api == "chat" else "v1/completions"


def build_body(request: ScheduledRequest, prompts: Prompts, target: Target, run: str, attempt: int) -> bytes:
    """The JSON of one request, in the server's dialect."""
    ids = prompts.tokens(request.segments)
    body: dict[str, Any] = {"model": target.model, "temperature": 0, "stream": request.stream}
    if target.sends_text:
        assert target.tokenizer is not None
        text = exact_text(target.tokenizer, ids)
        if target.api == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
    else:
        body["prompt"] = ids
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    # The length of an answer belongs to the workload: a model that ends early would change the work.
    body["ignore_eos"] = True
    if target.dialect == "openai":
        body["max_tokens"] = request.stop_after
        return orjson.dumps(body)
    body["max_tokens"] = request.max_tokens
    body["priority"] = request.priority
    body["return_token_ids"] = True
    body["batchmark"] = {
        "run": run,
        "id": request.id,
        "attempt": attempt,
        "tenant": request.tenant,
        "request_class": request.request_class,
        "deadline_ms": request.deadline_ms,
        "stop_after": request.stop_after,
    }
    return orjson.dumps(body)


class Bodies:
    """The bodies of a schedule's attempts. Built ahead in the order of the schedule, up to `ahead` of them;
    those of later turns and retries, which come when answers end, beside them once they are expected."""

    def __init__(
        self,
        requests: Sequence[ScheduledRequest],
        prompts: Prompts,
        target: Target,
        run: str,
        ahead: int = AHEAD,
    ) -> None:
        self._in_order = iter([request for request in requests if request.think_s is None])
        self._build = lambda request, attempt: build_body(request, prompts, target, run, attempt)
        self._ready: dict[tuple[str, int], bytes] = {}
        self._expected: deque[Due] = deque()
        self._overtaken: set[tuple[str, int]] = set()  # taken before their turn to be built ahead
        self._ahead = ahead

    def expect(self, due: Due) -> None:
        """This one will leave, and is not next in the order of the schedule."""
        self._expected.append(due)

    def prepare(self) -> bool:
        """Build the next one ahead; False if there is no room, or nothing left to build."""
        room = self._ahead - len(self._ready)
        if room <= -self._ahead:
            return False
        while self._expected:
            due = self._expected.popleft()
            if self._build_ahead(due.request, due.attempt):
                return True
        while room > 0 and (request := next(self._in_order, None)) is not None:
            if self._build_ahead(request, 1):
                return True
        return False

    def body(self, due: Due) -> bytes:
        """The body of this attempt, built now if it was not built ahead. It is then forgotten."""
        key = due.request.id, due.attempt
        body = self._ready.pop(key, None)
        if body is not None:
            return body
        self._overtaken.add(key)
        return self._build(due.request, due.attempt)

    def _build_ahead(self, request: ScheduledRequest, attempt: int) -> bool:
        """False: it has left already."""
        key = request.id, attempt
        if key in self._overtaken:
            self._overtaken.discard(key)
            return False
        self._ready[key] = self._build(request, attempt)
        return True
