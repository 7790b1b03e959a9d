"""The HTTP/1.1 parser of the lean backend: cut anywhere, it says what http.client says of the whole."""

from __future__ import annotations

import http.client
import io
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.loadgen.lean.http1 import MAX_HEAD_BYTES, HTTPError, Response, request_head

EARLY = st.sampled_from(
    [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" * 2, b"\r\n"]
)
BODY = st.binary(max_size=60) | st.sampled_from([b"0\r\n\r\n", b"\r\n\r\n", b"data: {}\r\n\r\n", b"a" * 300])
STATUS = st.sampled_from([200, 201, 302, 400, 404, 429, 503, 599])


@dataclass(frozen=True)
class Wire:
    """What a server sends: its bytes, those after its early heads, and where the response ends in them (None:
    with the connection)."""

    data: bytes
    final: bytes
    end: int | None
    body: bytes
    keep_alive: bool


@st.composite
def chunked(draw: st.DrawFn) -> bytes:
    """A chunked body with extensions and trailers."""
    pieces = draw(st.lists(BODY.filter(bool), max_size=5))
    extension = st.sampled_from([b"", b";a", b';name="value"', b" ; x=y", b" "])
    out = b""
    for piece in pieces:
        size = b"%x" % len(piece) if draw(st.booleans()) else b"00%X" % len(piece)
        out += size + draw(extension) + b"\r\n" + piece + b"\r\n"
    out += draw(st.sampled_from([b"0", b"000"])) + draw(extension) + b"\r\n"
    return out + draw(st.sampled_from([b"", b"Checksum: abc\r\n", b"A: 1\r\nB: 2\r\n"])) + b"\r\n"


@st.composite
def wires(draw: st.DrawFn) -> Wire:
    version = draw(st.sampled_from([b"1.1", b"1.0"]))
    status = draw(STATUS)
    connection = draw(st.sampled_from([b"", b"Connection: close\r\n", b"connection: Keep-Alive, X\r\n"]))
    keep_alive = b"close" not in connection if version == b"1.1" else b"Keep-Alive" in connection
    early = draw(EARLY)
    head = b"HTTP/%b %d Some Words\r\nContent-Type: text/event-stream\r\n" % (version, status)
    head += connection
    framing = draw(st.sampled_from(["chunked", "length", "close", "204"]))
    if framing == "chunked":
        coded = draw(chunked())
        head += b"Transfer-Encoding: Chunked\r\n\r\n"
        body = http.client.HTTPResponse(
            _Socket(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded)
        )
        body.begin()
        return _wire(early, head + coded, True, body.read(), keep_alive)
    content = draw(BODY)
    if framing == "length":
        head += b"Content-Length: %d\r\n\r\n" % len(content)
        return _wire(early, head + content, True, content, keep_alive)
    if framing == "204":
        head = head.replace(b" %d " % status, b" 204 ") + b"\r\n"
        return _wire(early, head, True, b"", keep_alive)
    return _wire(early, head + b"\r\n" + content, False, content, False)


def _wire(early: bytes, final: bytes, ends: bool, body: bytes, keep_alive: bool) -> Wire:
    data = early + final
    return Wire(data, final, len(data) if ends else None, body, keep_alive)


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def makefile(self, mode: str) -> io.BytesIO:
        return self._file


def read(response: Response, pieces: list[bytes], wire: Wire) -> bytes:
    """Feed the pieces; nothing may be late or early on the way."""
    body, fed = b"", 0
    for piece in pieces:
        assert not response.ended
        body += response.feed(piece)
        fed += len(piece)
        assert wire.body.startswith(body)
        assert response.ended == (wire.end is not None and fed >= wire.end)
    return body


def check(wire: Wire, pieces: list[bytes]) -> None:
    response = Response()
    body = read(response, pieces, wire)
    whole = http.client.HTTPResponse(_Socket(wire.final))
    whole.begin()
    assert response.status == whole.status
    assert response.content_type == whole.getheader("Content-Type")
    if wire.end is None:
        assert not response.ended
    assert response.eof()
    assert response.ended
    assert body == wire.body
    assert response.keep_alive == wire.keep_alive


@given(wires(), st.data())
def test_a_response_cut_anywhere_is_the_same_response(wire: Wire, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(wire.data)), max_size=8).map(sorted))
    borders = [0, *cuts, len(wire.data)]
    check(wire, [wire.data[a:b] for a, b in pairwise(borders) if a < b])


@given(wires())
def test_a_response_byte_by_byte_is_the_same_response(wire: Wire) -> None:
    check(wire, [wire.data[i : i + 1] for i in range(len(wire.data))])


@given(wires(), st.binary(min_size=1, max_size=20))
def test_bytes_after_the_end_are_no_body_and_the_connection_is_not_used_again(
    wire: Wire, surplus: bytes
) -> None:
    if wire.end is None:
        return
    response = Response()
    assert response.feed(wire.data + surplus) == wire.body
    assert response.ended
    assert not response.keep_alive
    response = Response()
    response.feed(wire.data)
    assert response.feed(surplus) == b""
    assert not response.keep_alive


@given(wires(), st.integers(0, 400))
def test_a_connection_that_closes_early_leaves_no_whole_response(wire: Wire, cut: int) -> None:
    if wire.end is None or cut >= wire.end:
        return
    response = Response()
    response.feed(wire.data[:cut])
    assert not response.eof()


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]),
)
def test_whatever_comes_is_a_response_or_an_error(data: bytes, before: bytes) -> None:
    data = before + data
    assert outcome([data]) == outcome([data[i : i + 1] for i in range(len(data))])


def outcome(pieces: list[bytes]) -> tuple[int | None, bool, bytes] | str:
    """Where an error is, the body before it is nobody's: it may have come in the same piece or not."""
    response, body = Response(), b""
    for piece in pieces:
        try:
            body += response.feed(piece)
        except HTTPError:
            return "error"
        if response.ended:
            break
    return response.status, response.ended, body


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 What\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        HEAD + b": nameless\r\n\r\n",
        HEAD + b"Name : spaced\r\n\r\n",
        HEAD + b" folded: line\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: +1\r\n\r\n",
        HEAD + b"Content-Length: 1_0\r\n\r\n",
        HEAD + b"Content-Length: 1, 2\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Content-Length: 1234567890123456\r\n\r\n",
        HEAD + b"Content-Length:\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"+1\r\na\r\n",
        CHUNKED + b"0x1\r\na\r\n",
        CHUNKED + b"1_1\r\n",
        CHUNKED + b";ext\r\n",
        CHUNKED + b"f" * 16 + b"\r\n",
        CHUNKED + b"2\r\nabc\r\n",
        CHUNKED + b"2\r\nab\rc",
        CHUNKED + b"2\r\nabXY",
        CHUNKED + b"1" * 5000,
        CHUNKED + b"0\r\n" + b"t" * 5000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
)
def test_what_is_no_response_is_an_error_of_one_line(data: bytes) -> None:
    for size in (len(data), 7, 1):
        response = Response()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        with pytest.raises(HTTPError) as caught:
            b"".join(map(response.feed, pieces))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200
        assert not response.ended


def test_one_read_that_is_whole_chunks_brings_them_joined() -> None:
    response = Response()
    assert response.feed(CHUNKED) == b""
    assert response.feed(b"3\r\nabc\r\n") == b"abc"
    assert response.feed(b"3\r\nabc\r\n2\r\nde\r\n") == b"abcde"
    assert response.feed(b"1\r\nf\r\n0\r\n\r\n") == b"f"
    assert response.ended
    assert response.keep_alive


def test_both_framings_at_once_are_not_a_connection_to_go_on_with() -> None:
    response = Response()
    response.feed(HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\na\r\n0\r\n\r\n")
    assert response.ended
    assert not response.keep_alive


def test_the_same_length_twice_is_that_length() -> None:
    response = Response()
    assert response.feed(HEAD + b"Content-Length: 2\r\ncontent-length: 2\r\n\r\nab") == b"ab"
    assert response.ended


def test_a_request_is_head_length_and_body() -> None:
    head = request_head("POST", "/v1/x", "h:1", {"Authorization": "Bearer k"})
    assert head + b"2\r\n\r\nab" == (
        b"POST /v1/x HTTP/1.1\r\nHost: h:1\r\nAuthorization: Bearer k\r\nContent-Length: 2\r\n\r\nab"
    )


@pytest.mark.parametrize("key", ["a\r\nX: y", "a\nb", "a\x00b", "a\x7fb"])
def test_a_header_that_would_be_two_is_refused_without_its_value(key: str) -> None:
    with pytest.raises(ValueError, match="Authorization") as caught:
        request_head("POST", "/", "h", {"Authorization": key})
    assert key not in str(caught.value)
