"""One attempt of a request, from its dispatch to its record: patience, hang-ups, stamps and the outcome.

A state machine without a clock and without a network: whoever moves the bytes tells it what happened, and
when (CLOCK_MONOTONIC ns)."""

from __future__ import annotations

from harness.loadgen.answer import Answer, Verdict, printable
from harness.loadgen.dispatch import NS, Due
from harness.records import RequestRecord
from workloads.schedule import ScheduledRequest


class Call:
    """It ends exactly once, with a verdict: by the first of finish, broke, cut_off, on_data that returns
    False and on_deadline that returns True. Whatever is told later changes nothing. A user's patience, and
    the client's, run from the dispatch of this attempt."""

    def __init__(self, due: Due, *, timeout_s: float | None, keep_text: bool) -> None:
        request = due.request
        self.due = due
        self.request = request
        self.answer = Answer(stream=request.stream, keep_text=keep_text)
        self.verdict: Verdict | None = None
        self.broken_by: str | None = None  # the reason of broke(), if that was told
        self.dispatch_ns: int | None = None
        self.send_ns: int | None = None
        self.end_ns: int | None = None
        self.deadline_ns: int | None = None  # on_deadline must be called then
        self._timeout_s = timeout_s if request.timeout_s is None else request.timeout_s
        self._deadlines: list[tuple[int, Verdict]] = []  # the next one last
        self._hang_up_tokens = request.cancel_value if request.cancel_kind == "after_tokens" else None

    @property
    def watches_tokens(self) -> bool:
        """on_data must be called as bytes come. Otherwise bytes may be held and told later, in order and with
        their own stamps, as long as that is before on_deadline, finish and broke."""
        return self._hang_up_tokens is not None

    def dispatched(self, now_ns: int) -> None:
        """The attempt begins: it is about to be written."""
        self.dispatch_ns = now_ns
        if self._timeout_s is not None:
            timed_out = Verdict("timed_out", "client_timeout")
            self._deadlines.append((now_ns + round(self._timeout_s * NS), timed_out))
        kind, value = self.request.cancel_kind, self.request.cancel_value
        if value is not None and kind in ("after_s", "before_first_token"):
            self._deadlines.append((now_ns + round(value * NS), Verdict("cancelled", kind)))
        self._deadlines.sort(key=lambda deadline: -deadline[0])
        self._set_deadline()

    def on_send(self, now_ns: int) -> None:
        """The request is handed to the socket. After a redirect it is so again: the first time counts."""
        if self.verdict is None and self.send_ns is None:
            self.send_ns = now_ns

    def on_headers(self, now_ns: int, status: int, content_type: str) -> None:
        """The response's head has come."""
        if self.verdict is None:
            self.answer.begin(now_ns, status, content_type)

    def on_data(self, now_ns: int, piece: bytes) -> bool:
        """Bytes of the body have come. False: hang up now, the verdict is in."""
        if self.verdict is not None:
            return False
        answer = self.answer
        if not answer.feed(now_ns, piece):
            self._end(now_ns, answer.finish())
            return False
        wanted = self._hang_up_tokens
        if wanted is not None and answer.tokens >= wanted and not answer.ended:
            self._end(now_ns, Verdict("cancelled", "after_tokens"))
            return False
        return True

    def on_deadline(self, now_ns: int) -> bool:
        """A deadline may have passed. True: hang up now, the verdict is in. False: deadline_ns is new."""
        if self.verdict is not None:
            return False
        while self._deadlines and self._deadlines[-1][0] <= now_ns:
            _, verdict = self._deadlines.pop()
            if verdict.reason == "before_first_token" and self.answer.tokens:
                continue
            self._hang_up(now_ns, verdict)
            return True
        self._set_deadline()
        return False

    def finish(self, now_ns: int) -> None:
        """The body has ended."""
        if self.verdict is None:
            self._end(now_ns, self.answer.finish())

    def broke(self, now_ns: int, reason: str, message: str) -> None:
        """The exchange broke. reason: connect (nobody answered), reset (it broke off), protocol (not HTTP),
        client_error (a fault of this client: it must be seen in the record, not lose it)."""
        if self.verdict is not None:
            return
        self.broken_by = reason
        broken = Verdict("failed", reason, printable(message))
        self._end(now_ns, broken if reason == "client_error" else self.answer.finish(broken))

    def cut_off(self, now_ns: int) -> None:
        """The run ends before the call does."""
        if self.verdict is None:
            self._hang_up(now_ns, Verdict("cut_off", "not_sent" if self.send_ns is None else "in_flight"))

    def record(self, t0_ns: int, *, keep_text: bool, final: bool) -> RequestRecord:
        """The call as a line of requests.jsonl; times count from t0_ns. Only after it has ended. final: no
        other attempt follows."""
        assert self.verdict is not None
        request, answer = self.request, self.answer
        output: int | None = answer.usage_output
        source: str | None = "usage"
        if output is None:
            output, source = (answer.ids, "ids") if answer.counted_by_ids else (None, None)
        return RequestRecord(
            id=request.id,
            attempt=self.due.attempt,
            tenant=request.tenant,
            request_class=request.request_class,
            priority=request.priority,
            session=request.session,
            turn=request.turn,
            stream=request.stream,
            intended_ns=self.due.intended_ns - t0_ns,
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
            final=final,
            first_output_ns=_since(t0_ns, answer.first_output_ns),
            reasoning_tokens=answer.usage_reasoning,
            reads=answer.reads,
            coalesced=answer.coalesced,
            cached_tokens=answer.usage_cached,
            transport=request.transport,
        )

    def _set_deadline(self) -> None:
        self.deadline_ns = self._deadlines[-1][0] if self._deadlines else None

    def _hang_up(self, now_ns: int, verdict: Verdict) -> None:
        """End now, whatever the server does; unless the answer is whole and only its formalities were
        missing."""
        self._end(now_ns, self.answer.finish() if self.answer.ended else verdict)

    def _end(self, now_ns: int, verdict: Verdict) -> None:
        self.verdict = verdict
        self.deadline_ns = None
        if self.send_ns is not None or verdict.outcome != "cut_off":
            self.end_ns = now_ns


def never_sent(
    request: ScheduledRequest, attempt: int, intended_ns: int, reason: str, text: str | None = None
) -> RequestRecord:
    """The last record of a request that was not dispatched. intended_ns: from t0. reason: not_sent,
    session_ended, shed or not_recorded."""
    return RequestRecord(
        id=request.id,
        attempt=attempt,
        tenant=request.tenant,
        request_class=request.request_class,
        priority=request.priority,
        session=request.session,
        turn=request.turn,
        stream=request.stream,
        intended_ns=intended_ns,
        dispatch_ns=None,
        send_ns=None,
        headers_ns=None,
        first_event_ns=None,
        end_ns=None,
        chunk_ns=(),
        chunk_tokens=(),
        prompt_tokens=None,
        planned_prompt_tokens=request.prompt_tokens,
        output_tokens=None,
        token_source=None,
        token_mismatch=False,
        max_tokens=request.max_tokens,
        stop_after=request.stop_after,
        outcome="cut_off",
        reason=reason,
        status=None,
        finish_reason=None,
        error=None,
        transport=request.transport,
        text=text,
    )


def _since(t0_ns: int, stamp_ns: int | None) -> int | None:
    return None if stamp_ns is None else stamp_ns - t0_ns
