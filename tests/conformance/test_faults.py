"""Servers that die, lie or babble, at every stage of an answer: the load ends by itself within ten seconds,
and what was measured is kept and marked for what it is."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.records import read_request_file
from tests.support.golden import Golden, measure
from tests.support.load import every
from tests.support.script_process import ScriptProcess
from tests.support.script_server import (
    COMMENT,
    ById,
    InTurn,
    Script,
    Step,
    completion,
    crlf,
    ending,
    plain,
    sse,
    timeline,
    tokens,
)
from workloads.schedule import request_id

LIMIT_S = 10.0
GOOD = timeline([(0.02, 1), (0.04, 1)])
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def raw(*pieces: bytes, head: bytes = HEAD, then: str = "close") -> Script:
    """Bytes outside of any framing, then the end of the connection."""
    return Script([*(plain(piece, 0.01) for piece in pieces), Step(then, 0.01)], head=head, framing="raw")


EVENT = completion("a", [1])
FRAME = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)

# What a server may send, and which outcome, reasons (any of them) and tokens that has.
MALFORMED: dict[str, tuple[Script, str, tuple[str, ...], int]] = {
    # Before and in the head.
    "no answer": (raw(head=b""), "failed", ("reset",), 0),
    "reset at once": (raw(head=b"", then="reset"), "failed", ("reset",), 0),
    "not HTTP": (raw(head=b"\x00\xff\xfe garbage\r\n\r\n"), "failed", ("protocol",), 0),
    "another protocol": (raw(head=b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "failed", ("protocol",), 0),
    "half a head": (raw(head=HEAD[:40]), "failed", ("reset", "protocol"), 0),
    "status that is no number": (raw(head=b"HTTP/1.1 OK fine\r\n\r\n"), "failed", ("protocol",), 0),
    # In the framing.
    "chunk size that is no number": (raw(b"zz\r\n" + EVENT), "failed", ("protocol",), 0),
    "negative chunk size": (raw(b"-5\r\n" + EVENT), "failed", ("protocol",), 0),
    "death in a chunk": (raw(FRAME, FRAME[:20]), "failed", ("reset", "protocol"), 1),
    "death between chunks": (raw(FRAME), "failed", ("reset", "protocol"), 1),
    "reset after a token": (raw(FRAME, then="reset"), "failed", ("reset",), 1),
    "chunk longer than its size": (raw(b"3\r\n" + EVENT + b"\r\n"), "failed", ("protocol",), 0),
    # In the events.
    "not JSON": (Script([tokens(1), plain(b"data: {oops\n\n")]), "failed", ("malformed",), 1),
    "no object": (Script([tokens(1), plain(sse([1, 2]))]), "failed", ("malformed",), 1),
    "choices of another kind": (Script([plain(sse({"choices": 5}))]), "failed", ("malformed",), 0),
    "no UTF-8": (Script([plain(b"data: \xff\xfe\n\n")]), "failed", ("malformed",), 0),
    "half an event": (Script([tokens(1), plain(b'data: {"choices"')]), "failed", ("ended_early",), 1),
    "no end": (Script([tokens(2)]), "failed", ("ended_early",), 1),
    "an error event": (
        Script([tokens(1), plain(sse({"error": {"message": "boom"}}, event="error"))]),
        "failed",
        ("error_event",),
        1,
    ),
    "a page": (
        Script([plain(b"<html>hello</html>")], content_type="text/html", framing="length"),
        "failed",
        ("ended_early", "malformed"),
        0,
    ),
}


@pytest.fixture(scope="module")
def malformed(server: ScriptProcess, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """One of each kind between good ones, in one run."""
    names = list(MALFORMED)
    rule = ById({request_id(2 * k): MALFORMED[name][0] for k, name in enumerate(names)}, GOOD)
    folder = tmp_path_factory.mktemp("malformed")
    began = time.monotonic()
    run = measure(server, rule, every(0.02, 2 * len(names)), folder, backend=backend, timeout_s=5.0)
    assert time.monotonic() - began < LIMIT_S
    assert len(run.truth.seen) == 2 * len(names)
    return run


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_is_one_failure(malformed: Golden, name: str) -> None:
    _, outcome, reasons, chunks = MALFORMED[name]
    record = malformed.records[request_id(2 * list(MALFORMED).index(name))]
    assert record.outcome == outcome
    assert record.reason in reasons
    assert len(record.chunk_ns) == chunks
    assert record.error
    assert record.end_ns is not None


def test_malformed_answers_harm_nobody_else(malformed: Golden) -> None:
    good = [malformed.records[request_id(2 * k + 1)] for k in range(len(MALFORMED))]
    assert {(r.outcome, len(r.chunk_ns)) for r in good} == {("completed", 2)}
    assert malformed.summary["counts"]["completed"] == len(MALFORMED)
    assert not malformed.summary["valid"]


STAGES: dict[str, Script] = {
    "before the head": Script([], head_after_s=60.0),
    "in the middle": timeline([(0.1 * k, 1) for k in range(600)]),
    "between requests": GOOD,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_is_killed_ends_the_load(
    backend: str, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the server while the load is on: each request has its record, and the run is incomplete.
    (The load believes in the death after 3 s without a connection; here after a sixth of that.)"""
    monkeypatch.setattr("harness.loadgen.watch.DEAD_AFTER_S", 0.5)
    with ScriptProcess() as mine:
        killer = threading.Timer(0.7, mine.process.kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(AssertionError, match="the script server has ended"):  # it has no truth to tell
            measure(mine, STAGES[stage], every(0.05, 200), tmp_path, backend=backend, timeout_s=30.0)
        took_s = time.monotonic() - began
        killer.join()
    assert mine.process.returncode == -signal.SIGKILL
    assert took_s < LIMIT_S
    file = read_request_file(tmp_path / "requests.jsonl")
    assert file.closed
    assert len(file.records) == len({r.id for r in file.records}) == 200
    ends: dict[str, int] = {}
    for record in file.records:
        ends[record.outcome] = ends.get(record.outcome, 0) + 1
    assert ends.pop("failed") >= 1
    assert ends.pop("cut_off") >= 1
    assert set(ends) <= {"completed"}
    if stage != "between requests":  # no answer was whole by then
        assert not ends


def test_a_server_that_goes_silent_is_a_time_out(server: ScriptProcess, backend: str, tmp_path: Path) -> None:
    rule = InTurn([Script([tokens(1), Step("hang")]), GOOD])
    run = measure(server, rule, every(0.05, 5), tmp_path, backend=backend, timeout_s=0.5)
    counts = run.summary["counts"]
    assert (counts["timed_out"], counts["completed"]) == (1, 4)


# Borders of the network mean nothing.

WIRE = (tokens(2, text="grüße"), plain(COMMENT), tokens(1, text="🙂"))


@pytest.mark.parametrize(
    ("framing", "ends"), [("chunked", "lf"), ("chunked", "crlf"), ("length", "lf"), ("close", "lf")]
)
def test_an_answer_cut_at_any_byte_is_the_same_answer(
    server: ScriptProcess, backend: str, tmp_path: Path, framing: str, ends: str
) -> None:
    """Each event leaves in two writes, the border at every byte of the longest one in turn."""
    steps = [*WIRE, *ending(3)]
    if ends == "crlf":
        steps = [Step(s.kind, s.after_s, crlf(s.data), s.tokens) for s in steps]
    longest = max(len(s.data) for s in steps) + 8
    cuts = range(1, longest, 1 if framing == "chunked" else 5)
    rule = ById(
        {request_id(i): Script(steps, cut=cut, cut_s=0.003, framing=framing) for i, cut in enumerate(cuts)}
    )
    run = measure(
        server,
        rule,
        every(0.0, len(cuts)),
        tmp_path,
        backend=backend,
        kind="closed",
        concurrency=6,
        keep_text=True,
    )
    assert len(run.truth.seen) == run.summary["counts"]["completed"] == len(cuts) > 25
    got: set[tuple[Any, ...]] = {
        (r.chunk_tokens, r.text, r.output_tokens, r.token_mismatch) for r in run.records.values()
    }
    assert got == {((2, 1), "grüße🙂", 3, False)}
    for record, seen in run.pairs():
        for ours, (ns, _) in zip(record.chunk_ns, seen.sends, strict=True):
            assert run.t0_ns + ours >= ns - 1e6
    # The cuts were real: without them all steps leave at once, and come in one or two reads.
    reads = [r.reads for r in run.records.values()]
    assert sum(reads) / len(reads) > 3
