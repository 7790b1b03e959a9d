"""One request from its dispatch to its record: patience, hang-ups, stamps and the outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from harness.loadgen.answer import Answer, Verdict
from harness.loadgen.transport import Transport, TransportError
from harness.records import RequestRecord
from workloads.schedule import ScheduledRequest


class Call:
    """One request under way. It ends exactly once, and `on_end` then gets it; nothing that happens to a
    request is raised. A user's patience, and the client's, run from the dispatch."""

    def __init__(
        self,
        request: ScheduledRequest,
        body: bytes,
        *,
        path: str,
        intended_ns: int,
        timeout_s: float | None,
        keep_text: bool,
        on_end: Callable[[Call], None],
        attempt: int = 1,
    ) -> None:
        self.request = request
        self.attempt = attempt
        self.intended_ns = intended_ns
        self.dispatch_ns: int | None = None
        self.send_ns: int | None = None
        self.end_ns: int | None = None
        self.verdict: Verdict | None = None
        self.broken_by: str | None = None  # the TransportError's reason, if there was one
        self.answer = Answer(stream=request.stream, keep_text=keep_text)
        self._path = path
        self._body = body
        self._timeout_s = timeout_s if request.timeout_s is None else request.timeout_s
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._hang_up_tokens: float | None = None
        if request.cancel_kind == "after_tokens":
            self._hang_up_tokens = request.cancel_value

    async def run(self, transport: Transport, gate: asyncio.Semaphore | None = None) -> None:
        """Wait for a place (gate), send, read the answer."""
        self._task = asyncio.current_task()
        try:
            if gate is None:
                await self._exchange(transport)
            else:
                async with gate:
                    await self._exchange(transport)
        except asyncio.CancelledError:
            if self.verdict is None:
                self._end(Verdict("cut_off", self._cut_off_reason()))
        except TransportError as exc:
            self.broken_by = exc.reason
            self._end(self.answer.finish(Verdict("failed", exc.reason, str(exc))))
        except Exception as exc:  # a fault of this client must be seen in the record, not lose it
            self._end(Verdict("failed", "client_error", f"{type(exc).__name__}: {exc}"[:300]))
        else:
            self._end(self.answer.finish())

    def hang_up(self, outcome: str, reason: str | None) -> None:
        """End now, whatever the server does. A call that has ended stays as it is."""
        if self.verdict is not None:
            return
        if self.answer.ended:  # the answer is whole, only its formalities were missing
            self._end(self.answer.finish())
        else:
            self._end(Verdict(outcome, reason))
        if self._task is not None:
            self._task.cancel()

    def cut_off(self) -> None:
        """The run ends before the call does."""
        self.hang_up("cut_off", self._cut_off_reason())

    def record(self, t0_ns: int, *, keep_text: bool) -> RequestRecord:
        """The call as a line of requests.jsonl; times count from t0_ns. Only after it has ended."""
        assert self.verdict is not None
        request, answer = self.request, self.answer
        output: int | None = answer.usage_output
        source: str | None = "usage"
        if output is None:
            output, source = (answer.ids, "ids") if answer.counted_by_ids else (None, None)
        return RequestRecord(
            id=request.id,
            attempt=self.attempt,
            tenant=request.tenant,
            request_class=request.request_class,
            priority=request.priority,
            session=request.session,
            turn=request.turn,
            stream=request.stream,
            intended_ns=self.intended_ns - t0_ns,
            dispatch_ns=_since(t0_ns, self.dispatch_ns),
            send_ns=_since(t0_ns, self.send_ns),
            headers_ns=_since(t0_ns, answer.headers_ns),
            first_event_ns=_since(t0_ns, answer.first_event_ns),
            end_ns=_since(t0_ns, self.end_ns),
            chunk_ns=tuple(ns - t0_ns for ns in answer.chunk_ns),
            chunk_tokens=tuple(answer.chunk_tokens),
            prompt_tokens=answer.usage_prompt,
            planned_prompt_tokens=request.prompt_tokens,
            output_tokens=output,
            token_source=source,
            token_mismatch=answer.counted_by_ids and output != answer.ids,
            max_tokens=request.max_tokens,
            stop_after=request.stop_after,
            outcome=self.verdict.outcome,
            reason=self.verdict.reason,
            status=answer.status,
            finish_reason=answer.finish_reason,
            error=self.verdict.error,
            text=answer.text if keep_text else None,
        )

    # What the transport reports (transport.Sink).

    def on_send(self, now_ns: int) -> None:
        self.send_ns = now_ns

    def on_headers(self, now_ns: int, status: int, content_type: str) -> None:
        self.answer.begin(now_ns, status, content_type)

    def on_data(self, now_ns: int, piece: bytes) -> bool:
        if self.verdict is not None:
            return False
        go_on = self.answer.feed(now_ns, piece)
        wanted = self._hang_up_tokens
        if wanted is not None and self.answer.tokens >= wanted and not self.answer.ended and go_on:
            self._end(Verdict("cancelled", "after_tokens"))
            return False
        return go_on

    async def _exchange(self, transport: Transport) -> None:
        if self.verdict is not None:
            return
        self.dispatch_ns = time.monotonic_ns()
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._timeout_s is not None:
            self._timers.append(
                loop.call_at(now + self._timeout_s, self.hang_up, "timed_out", "client_timeout")
            )
        value = self.request.cancel_value
        if value is not None and self.request.cancel_kind == "after_s":
            self._timers.append(loop.call_at(now + value, self.hang_up, "cancelled", "after_s"))
        if value is not None and self.request.cancel_kind == "before_first_token":
            self._timers.append(loop.call_at(now + value, self._give_up_waiting))
        await transport.post(self._path, self._body, self)

    def _give_up_waiting(self) -> None:
        if not self.answer.tokens:
            self.hang_up("cancelled", "before_first_token")

    def _cut_off_reason(self) -> str:
        return "not_sent" if self.send_ns is None else "in_flight"

    def _end(self, verdict: Verdict) -> None:
        if self.verdict is not None:
            return
        self.verdict = verdict
        if self.send_ns is not None or verdict.outcome != "cut_off":
            self.end_ns = time.monotonic_ns()
        for timer in self._timers:
            timer.cancel()
        self._body = b""
        self._on_end(self)


def _since(t0_ns: int, stamp_ns: int | None) -> int | None:
    return None if stamp_ns is None else stamp_ns - t0_ns
