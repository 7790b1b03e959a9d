"""Request bodies, built ahead of their time, so that nothing but a write stands between the clock and the
socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import orjson

from harness.loadgen.settings import Target
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
        text = target.tokenizer.decode(ids)
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
    """The bodies of a sequence of requests, in order, a few of them ahead."""

    def __init__(
        self,
        requests: Sequence[ScheduledRequest],
        prompts: Prompts,
        target: Target,
        run: str,
        attempt: int = 1,
        ahead: int = AHEAD,
    ) -> None:
        self._requests = iter(requests)
        self._build = lambda request: build_body(request, prompts, target, run, attempt)
        self._ready: deque[bytes] = deque()
        self._ahead = ahead

    def prepare(self) -> bool:
        """Build one more, if there is room for it and a request left; False if not."""
        if len(self._ready) >= self._ahead:
            return False
        request = next(self._requests, None)
        if request is None:
            return False
        self._ready.append(self._build(request))
        return True

    def take(self) -> bytes:
        """The body of the next request."""
        if not self._ready:
            self.prepare()
        return self._ready.popleft()
