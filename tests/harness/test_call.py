"""One attempt on a clock of the test's own: how it ends, when to look at it, what its record says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.loadgen.call import Call, never_sent
from harness.loadgen.dispatch import NS, Due
from harness.records import RequestRecord
from tests.support.load import check, request
from tests.support.script_server import DONE, completion, sse, usage

T0 = 5 * NS
MS = 1_000_000
TOKEN = completion("a", [1])
WHOLE = completion("a", [1], finish="length")


def begun(*, timeout_s: float | None = None, attempt: int = 1, **changes: Any) -> Call:
    """A call that was dispatched at T0 + 2 ms and sent at T0 + 3 ms."""
    due = Due(request(**changes), T0 + MS, T0 + MS, attempt)
    call = Call(due, timeout_s=timeout_s, keep_text=True)
    call.dispatched(T0 + 2 * MS)
    call.on_send(T0 + 3 * MS)
    return call


def headed(**changes: Any) -> Call:
    call = begun(**changes)
    call.on_headers(T0 + 4 * MS, 200, "text/event-stream")
    return call


def record(call: Call, final: bool = True) -> RequestRecord:
    record = call.record(T0, keep_text=True, final=final)
    check(record)
    return record


def outcome(call: Call) -> tuple[str, str | None]:
    assert call.verdict is not None
    return call.verdict.outcome, call.verdict.reason


def test_a_whole_life() -> None:
    call = headed(attempt=2)
    assert call.on_data(T0 + 5 * MS, TOKEN)
    assert call.on_data(T0 + 6 * MS, TOKEN + completion(finish="length"))
    assert call.on_data(T0 + 7 * MS, usage(2) + DONE)
    call.finish(T0 + 8 * MS)
    got = record(call, final=False)
    assert (got.intended_ns, got.dispatch_ns, got.send_ns, got.headers_ns) == (MS, 2 * MS, 3 * MS, 4 * MS)
    assert (got.chunk_ns, got.end_ns, got.first_output_ns) == ((5 * MS, 6 * MS), 8 * MS, 5 * MS)
    assert (got.attempt, got.final, got.reads, got.coalesced) == (2, False, 3, 0)
    assert (got.outcome, got.output_tokens, got.token_source, got.text) == ("completed", 2, "usage", "aa")


def test_nothing_that_comes_after_the_end_changes_it() -> None:
    call = headed()
    call.on_data(T0 + 5 * MS, TOKEN)
    call.broke(T0 + 6 * MS, "reset", "gone")
    before = record(call)
    call.on_send(T0 + 7 * MS)
    call.on_headers(T0 + 7 * MS, 500, "text/html")
    assert not call.on_data(T0 + 7 * MS, WHOLE)
    assert not call.on_deadline(T0 + 900 * NS)
    call.finish(T0 + 8 * MS)
    call.broke(T0 + 9 * MS, "connect", "no")
    call.cut_off(T0 + 9 * MS)
    assert record(call) == before
    assert (before.outcome, before.reason, before.error) == ("failed", "reset", "gone")
    assert (call.broken_by, call.deadline_ns) == ("reset", None)


def test_patience_and_timeout_run_from_the_dispatch() -> None:
    call = headed(timeout_s=1.0, cancel_kind="after_s", cancel_value=0.25)
    assert call.deadline_ns == T0 + 2 * MS + NS // 4
    assert not call.on_deadline(call.deadline_ns - 1)
    assert call.on_deadline(call.deadline_ns)
    assert outcome(call) == ("cancelled", "after_s")
    assert call.end_ns == T0 + 2 * MS + NS // 4
    late = headed(timeout_s=0.2, cancel_kind="after_s", cancel_value=0.25)
    assert late.deadline_ns == T0 + 2 * MS + NS // 5
    # Looked at after both have passed: the one that came first counts.
    assert late.on_deadline(T0 + NS)
    assert outcome(late) == ("timed_out", "client_timeout")


def test_a_request_has_its_own_patience() -> None:
    assert begun(timeout_s=9.0).deadline_ns == T0 + 2 * MS + 9 * NS
    assert begun(timeout_s=None).deadline_ns is None
    due = Due(request(timeout_s=0.5), T0, T0)
    call = Call(due, timeout_s=9.0, keep_text=False)
    assert call.deadline_ns is None  # it has not begun
    call.dispatched(T0)
    assert call.deadline_ns == T0 + NS // 2


def test_a_first_token_in_time_ends_the_impatience_but_not_the_timeout() -> None:
    call = headed(timeout_s=1.0, cancel_kind="before_first_token", cancel_value=0.1)
    assert call.deadline_ns == T0 + 2 * MS + NS // 10
    call.on_data(T0 + 50 * MS, TOKEN)
    assert not call.on_deadline(T0 + 200 * MS)
    assert call.deadline_ns == T0 + 2 * MS + NS
    assert call.on_deadline(T0 + 2 * NS)
    assert outcome(call) == ("timed_out", "client_timeout")
    waits = headed(timeout_s=1.0, cancel_kind="before_first_token", cancel_value=0.1)
    waits.on_data(T0 + 50 * MS, sse({"choices": [{"delta": {"role": "assistant"}}]}))
    assert waits.on_deadline(T0 + 200 * MS)
    assert outcome(waits) == ("cancelled", "before_first_token")


def test_patience_in_tokens() -> None:
    call = headed(cancel_kind="after_tokens", cancel_value=3)
    assert call.watches_tokens
    assert call.on_data(T0 + 5 * MS, TOKEN)
    assert not call.on_data(T0 + 6 * MS, completion("bc", [2, 3]))
    assert outcome(call) == ("cancelled", "after_tokens")
    assert call.end_ns == T0 + 6 * MS
    assert not headed(cancel_kind="after_s", cancel_value=3).watches_tokens
    whole = headed(cancel_kind="after_tokens", cancel_value=1)
    assert whole.on_data(T0 + 5 * MS, WHOLE)  # there is nobody left to hang up on
    whole.finish(T0 + 6 * MS)
    assert outcome(whole) == ("completed", None)


@pytest.mark.parametrize("how", ["deadline", "cut_off", "reset"])
def test_an_answer_that_is_whole_is_completed_however_its_end_comes(how: str) -> None:
    call = headed(timeout_s=1.0)
    call.on_data(T0 + 5 * MS, WHOLE)
    if how == "deadline":
        assert call.on_deadline(T0 + 9 * NS)
    elif how == "cut_off":
        call.cut_off(T0 + 9 * NS)
    else:
        call.broke(T0 + 9 * NS, "reset", "gone")
    assert outcome(call) == ("completed", None)


def test_a_fault_of_the_client_is_never_a_completed_answer() -> None:
    call = headed()
    call.on_data(T0 + 5 * MS, WHOLE)
    call.broke(T0 + 6 * MS, "client_error", "ZeroDivisionError: a bug")
    assert outcome(call) == ("failed", "client_error")


def test_cut_off_before_and_after_the_send() -> None:
    call = Call(Due(request(), T0, T0), timeout_s=1.0, keep_text=False)
    call.dispatched(T0)
    call.cut_off(T0 + MS)
    assert (outcome(call), record(call).end_ns) == (("cut_off", "not_sent"), None)
    sent = begun()
    sent.cut_off(T0 + 9 * MS)
    assert (outcome(sent), record(sent).end_ns) == (("cut_off", "in_flight"), 9 * MS)
    got = never_sent(request(), 2, -5, "shed")
    assert (got.id, got.attempt, got.intended_ns) == (request().id, 2, -5)
    assert (got.outcome, got.reason, got.dispatch_ns, got.end_ns) == ("cut_off", "shed", None, None)


def test_a_server_error_keeps_its_status_whatever_it_calls_itself() -> None:
    call = begun()
    call.on_headers(T0 + 4 * MS, 500, "application/json")
    call.on_data(T0 + 5 * MS, b'{"error": {"code": "oom", "message": "no memory"}}')
    call.finish(T0 + 6 * MS)
    assert call.verdict is not None
    assert (call.verdict.reason, call.verdict.status, call.verdict.error) == ("oom", 500, "no memory")


def test_a_redirect_sends_again_and_the_first_send_counts() -> None:
    call = begun()
    call.on_send(T0 + 50 * MS)
    assert call.send_ns == T0 + 3 * MS


DEFERRED = [
    {"cancel_kind": "before_first_token", "cancel_value": 0.02},
    {"cancel_kind": "after_s", "cancel_value": 0.03},
    {"timeout_s": 0.025},
    {},
]
pieces = st.lists(
    st.sampled_from(
        [
            TOKEN,
            TOKEN[:9],
            TOKEN[9:],
            WHOLE,
            usage(3),
            DONE,
            b": ping\n\n",
            sse({"error": "x"}),
            b"data: {\n\n",
        ]
    ),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(
    pieces,
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.sampled_from(DEFERRED),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.sampled_from(["finish", "reset", "cut_off"]),
)
def test_bytes_may_be_told_later(
    pieces: list[bytes], gaps: list[int], patience: dict[str, Any], held: list[bool], end: str
) -> None:
    """A backend may hold bytes back as long as it tells them, with their own stamps, before a deadline, the
    end and a break: the record is the same as when each is told at once, but for the moment at which an
    error is noticed."""
    stamps, at = [], T0 + 4 * MS
    for gap in gaps[: len(pieces)]:
        at += gap * MS
        stamps.append(at)
    ended_ns = at + MS

    def go(hold: list[bool]) -> RequestRecord:
        call = headed(**patience)
        told: list[tuple[int, bytes]] = []

        def tell() -> None:
            while told:
                call.on_data(*told.pop(0))

        for stamp, piece, keep in zip(stamps, pieces, hold, strict=False):
            while call.deadline_ns is not None and call.deadline_ns <= stamp:
                at_ns = call.deadline_ns
                tell()
                call.on_deadline(at_ns)
            told.append((stamp, piece))
            if not keep:
                tell()
        while call.deadline_ns is not None and call.deadline_ns <= ended_ns:
            at_ns = call.deadline_ns
            tell()
            call.on_deadline(at_ns)
        tell()
        if end == "finish":
            call.finish(ended_ns)
        elif end == "reset":
            call.broke(ended_ns, "reset", "gone")
        else:
            call.cut_off(ended_ns)
        return record(call)

    assert go(held) == go([False] * 8)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["send", "head", "data", "deadline", "finish", "broke", "cut_off"])))
def test_whatever_is_told_in_whatever_order_there_is_one_end(steps: list[str]) -> None:
    call = begun(timeout_s=0.02, cancel_kind="after_tokens", cancel_value=2)
    at, verdicts = T0 + 3 * MS, [call.verdict]
    for step in steps:
        at += 3 * MS
        match step:
            case "send":
                call.on_send(at)
            case "head":
                call.on_headers(at, 200, "text/event-stream")
            case "data":
                call.on_data(at, TOKEN)
            case "deadline":
                call.on_deadline(at)
            case "finish":
                call.finish(at)
            case "broke":
                call.broke(at, "reset", "gone")
            case "cut_off":
                call.cut_off(at)
        verdicts.append(call.verdict)
    changes = [(a, b) for a, b in pairwise(verdicts) if a is not b]
    assert len(changes) <= 1
    assert all(a is None for a, _ in changes)
