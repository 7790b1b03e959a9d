"""Server-sent events: the borders of the network never show."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.loadgen.sse import Event, SSEError, SSEParser

CASES = [
    (b"data: a\n\n", [("message", b"a")]),
    (b"data:a\n\ndata: b\n\n", [("message", b"a"), ("message", b"b")]),
    (b"data:  two\n\n", [("message", b" two")]),
    (b"data: a\r\n\r\ndata: b\r\n\r\n", [("message", b"a"), ("message", b"b")]),
    (b"data: a\r\rdata: b\r\r", [("message", b"a"), ("message", b"b")]),
    (b"data: a\rdata: b\n\r\n", [("message", b"a\nb")]),
    (b"\xef\xbb\xbfdata: bom\n\n", [("message", b"bom")]),
    (b"\xef\xbbdata: half a mark\n\ndata: x\n\n", [("message", b"x")]),
    (b": ping\n\n: ping\ndata: a\n\n", [("message", b"a")]),
    (b"event: error\ndata: {}\n\ndata: b\n\n", [("error", b"{}"), ("message", b"b")]),
    (b"event: lost\n\ndata: b\n\n", [("message", b"b")]),
    (b"id: 7\nretry: 10\nunknown\ndata: a\n\n", [("message", b"a")]),
    (b"data\n\n", [("message", b"")]),
    (b"data: one\ndata:\ndata: three\n\n", [("message", b"one\n\nthree")]),
    ("data: grüße 你好 🙂\n\n".encode(), [("message", "grüße 你好 🙂".encode())]),
    (b"data: never ended\n", []),
    (b"data: never ended", []),
    (b"", []),
]


def parse(pieces: list[bytes]) -> list[Event]:
    """By feed() alone, and by whole() where that knows the piece: both must say the same."""
    parser, short = SSEParser(), SSEParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    shortened: list[Event] = []
    for piece in pieces:
        whole = short.whole(piece)
        shortened += short.feed(piece) if whole is None else [Event("message", data) for data in whole]
    assert shortened == events
    return events


def test_whole_events_take_the_short_way() -> None:
    parser = SSEParser()
    assert parser.whole(b"data: a\n\n") == [b"a"]
    assert parser.whole(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]
    assert parser.feed(b"data: c\n") == []
    assert parser.whole(b"data: d\n\n") is None  # something is pending
    assert parser.feed(b"data: d\n\n") == [Event("message", b"c\nd")]
    assert parser.whole(b"data: e\n\n") == [b"e"]


@pytest.mark.parametrize(("stream", "events"), CASES)
def test_whole_and_split_at_every_byte(stream: bytes, events: list[tuple[str, bytes]]) -> None:
    wanted = [Event(*event) for event in events]
    assert parse([stream]) == wanted
    assert parse([bytes([b]) for b in stream]) == wanted
    for cut in range(len(stream) + 1):
        assert parse([stream[:cut], b"", stream[cut:]]) == wanted


lines = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b'data: {"a": 1}',
        b":c",
        b"event: error",
        b"",
        b"",
        b"id: 1",
        "data: ü🙂".encode(),
    ]
)
ends = st.sampled_from([b"\n", b"\r", b"\r\n"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(lines, ends), max_size=12), st.lists(st.integers(0, 120), max_size=6))
@example([(b"data: x", b"\r"), (b"", b"\n"), (b"data: y", b"\r\n"), (b"", b"\r")], [8, 9])
def test_any_split_gives_the_same_events(stream_lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in stream_lines)
    borders = sorted({0, len(stream), *(min(c, len(stream)) for c in cuts)})
    pieces = [stream[a:b] for a, b in pairwise(borders)]
    assert parse(pieces) == parse([stream])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_make_it_fail(pieces: list[bytes]) -> None:
    assert parse(pieces) == parse([b"".join(pieces)])


@pytest.mark.parametrize("line", [b"data: " + b"x" * 40, b"data: xxxxxxxx\n" * 5])
def test_memory_is_bounded(line: bytes) -> None:
    parser = SSEParser(max_event_bytes=32)
    with pytest.raises(SSEError, match="32 bytes"):
        list(map(parser.feed, (bytes([byte]) for byte in line)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b"data: a", b"data: 12345", b"data", b": comment", b"event: ping", b"", b"", b"data: 123456"]
        ),
        max_size=10,
    ),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 100), max_size=4),
)
def test_the_bound_is_on_an_event_wherever_the_borders_are(
    lines: list[bytes], end: bytes, cuts: list[int]
) -> None:
    """The same events come before the one that is too large, and the same one is."""
    stream = b"".join(line + end for line in lines)

    def until_too_large(pieces: list[bytes]) -> tuple[list[Event], bool]:
        parser, events = SSEParser(max_event_bytes=12), []
        for piece in pieces:
            try:
                whole = parser.whole(piece)
                events += parser.feed(piece) if whole is None else [Event("message", data) for data in whole]
            except SSEError as exc:
                return events + exc.before, True
        return events, False

    borders = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    at_once = until_too_large([stream])
    assert until_too_large([stream[a:b] for a, b in pairwise(borders)]) == at_once
    assert until_too_large([bytes([byte]) for byte in stream]) == at_once


def test_what_one_piece_completed_before_an_event_that_is_too_large_is_not_lost() -> None:
    with pytest.raises(SSEError, match="12 bytes") as caught:
        SSEParser(max_event_bytes=12).feed(b"data: a\n\ndata: 123456789\n\ndata: b\n\n")
    assert caught.value.before == [Event("message", b"a")]


def test_many_small_events_pass_a_small_bound() -> None:
    parser = SSEParser(max_event_bytes=12)
    assert len(parser.feed(b"data: x\n\n" * 300)) == 300
    assert sum(len(parser.feed(b"data: x\n\n")) for _ in range(100)) == 100
