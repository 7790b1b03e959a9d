"""The client's WebSocket: frames however they are cut, what is no frame, closes, both backends over them."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.loadgen.lean.http1 import HTTPError
from harness.loadgen.lean.upgrade import Upgrade
from harness.loadgen.websocket import PONG, Frames, frame, new_key, refused
from tests.support.load import drive, every, request
from tests.support.raw_server import Peer, RawServer
from tests.support.script_server import DONE, completion, usage
from tests.support.script_socket import accept, close, messages, unmasked
from tests.support.script_socket import frame as served

TOKEN = completion("x", [1])
ANSWER = [TOKEN, TOKEN, completion(finish="length"), usage(2), DONE]
WIRE = b"".join(served(event[6:-2]) for event in ANSWER) + close(1000)


def fed(wire: bytes, cuts: list[int], limit: int = 1 << 20) -> tuple[bytes, Frames]:
    frames = Frames(limit)
    borders = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    return b"".join(frames.feed(wire[a:b]) for a, b in pairwise(borders)), frames


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["[DONE]", "é", "x" * 125, "x" * 126, "y" * 70_000, '{"choices": []}', ""]),
            st.integers(1, 4),  # fragments
            st.booleans(),  # a ping between them
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 200_000), max_size=12),
)
def test_however_it_is_cut_the_events_are_the_messages(
    sent: list[tuple[str, int, bool]], cuts: list[int]
) -> None:
    wire, pings = b"", 0
    for text, fragments, ping in sent:
        data = text.encode()
        size = -(-len(data) // fragments) or 1
        parts = [data[i * size : (i + 1) * size] for i in range(fragments)]
        for i, part in enumerate(parts):
            wire += served(part, 1 if i == 0 else 0, fin=i == fragments - 1)
            if ping and i < fragments - 1:
                wire += served(b"p", 9) + served(b"", 10)
                pings += 1
    body, frames = fed(wire + close(1000), cuts)
    assert body == b"".join(b"data: %b\n\n" % text.encode() for text, _, _ in sent)
    assert (frames.ended, frames.broken, frames.status) == (True, None, 200)
    assert len(frames.replies) == 7 * pings + 8  # pongs of one byte, and the answer to the close


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (b"\x81\x81abcdx", "mask"),
        (b"\xc1\x01x", "reserved bits"),
        (served(b"{}", 2), "only text"),
        (served(b"x", 3), "kind 3"),
        (served(b"x", 11), "kind 11"),
        (served(b"x", 0), "out of order"),
        (served(b"x", 1, fin=False) + served(b"y"), "out of order"),
        (served(b"x", 9, fin=False), "control frame"),
        (served(b"x" * 126, 9), "control frame"),
        (served(b"\xff\xfe"), "UTF-8"),
        (served("é".encode()[:1], 1, fin=False) + served(b"x", 0), "UTF-8"),
        (served(b"x" * 1001), "larger than 1000"),
        (served(b"x" * 600, 1, fin=False) + served(b"x" * 401, 0), "larger than 1000"),
        (b"\x81\x7f" + b"\xff" * 8, "larger than 1000"),
        (served(b"x", 8), "close frame of one byte"),
        (close(1002), "closed with code 1002"),
    ],
)
def test_what_is_no_websocket_is_a_protocol_error(wire: bytes, what: str) -> None:
    for cuts in ([], list(range(1, 20))):
        body, frames = fed(served(b"first") + wire + served(b"after"), cuts, limit=1000)
        assert body == b"data: first\n\n"
        assert frames.broken is not None
        assert frames.broken[0] == "protocol"
        assert what in frames.broken[1]
        assert frames.replies[0] == 0x88


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(1000, None), (None, None), (1001, "reset"), (1011, "reset"), (4500, "reset"), (1009, "protocol")],
)
def test_a_close_says_whether_the_answer_broke(code: int | None, wanted: str | None) -> None:
    end = served(b"", 8) if code is None else close(code, b"why")
    _, frames = fed(served(b"{}") + end, [])
    assert frames.ended
    assert (frames.broken[0] if frames.broken else None) == wanted
    assert wanted is None or f"{code} why" in frames.broken[1]  # type: ignore[index]


def test_a_first_message_with_a_status_is_a_refusal() -> None:
    body = b'{"error": {"code": "queue_full"}, "status": 503}'
    data, frames = fed(served(body) + close(4503), [])
    assert (data, frames.status, frames.content_type) == (body, 503, "application/json")
    assert frames.broken is None
    for other in (b'{"error": {}}', b'{"error": {}, "status": "503"}', b'{"error": oops', b'["error"]'):
        assert fed(served(other), [])[1].status == 200
    assert fed(served(b"{}") + served(body), [])[1].status == 200


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 100_001])
def test_what_is_sent_is_masked_and_whole(size: int) -> None:
    data = random.Random(size).randbytes(size)
    wire = frame(data)
    head = 2 if size < 126 else 4 if size < 65536 else 10
    assert unmasked(wire[head : head + 4], wire[head + 4 :]) == data
    assert wire[0] == 0x81
    assert wire[1] & 0x80


def test_a_handshake_is_checked() -> None:
    key = "dGhlIHNhbXBsZSBub25jZQ=="  # RFC 6455, 1.3
    good = {
        "upgrade": "WebSocket",
        "connection": "keep-alive, Upgrade",
        "sec-websocket-accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=",
    }
    assert refused(key, good) is None
    assert refused(new_key(), good) is not None
    for name in good:
        assert refused(key, good | {name: "x"}) is not None
    assert refused(key, good | {"sec-websocket-extensions": "permessage-deflate"}) is not None


def test_an_upgrade_is_a_response_with_something_to_send() -> None:
    key = new_key()
    for cut in range(1, 150, 7):
        wire = accept(key) + WIRE
        upgrade = Upgrade(key, b"ask")
        body = upgrade.feed(wire[:cut]) + upgrade.feed(wire[cut:])
        assert body == b"".join(ANSWER)
        assert (upgrade.status, upgrade.ended, upgrade.keep_alive) == (200, True, False)
        assert unmasked(upgrade.replies[2:6], upgrade.replies[6:9]) == b"ask"
    with pytest.raises(HTTPError, match="does not answer our key"):
        Upgrade(key, b"ask").feed(accept(new_key()))
    plain = Upgrade(key, b"ask")
    assert plain.feed(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno") == b"no"
    assert (plain.status, plain.ended, plain.replies) == (403, True, b"")


def handshake(peer: Peer) -> bytes:
    """Answer it and read the request; the request."""
    head = peer.read_to(b"\r\n\r\n").decode()
    lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    assert head.startswith("GET /v1/completions/ws HTTP/1.1\r\n")
    peer.send(accept(lines["Sec-WebSocket-Key"]))
    return peer.frame()


def run(talk: Any, folder: Path, backend: str, plan: Any = None) -> Any:
    with RawServer(talk) as server:
        plan = plan or [request(transport="websocket")]
        done = asyncio.run(drive(server.base_url, plan, folder, backend=backend))
        return done, server


def test_pieces_of_any_size_with_a_ping_in_the_middle(backend: str, tmp_path: Path) -> None:
    pongs: list[bytes] = []
    cuts = random.Random(1)

    def talk(peer: Peer) -> None:
        handshake(peer)
        half = served(TOKEN[6:-2]) + served(b"are you there", 9)
        peer.send(half[:3])
        peer.send(half[3:], 0.002)
        pongs.append(peer.frame(PONG))
        rest = WIRE[len(served(TOKEN[6:-2])) :]
        borders = sorted({0, len(rest), *(cuts.randrange(len(rest)) for _ in range(8))})
        for begin, end in pairwise(borders):
            peer.send(rest[begin:end], 0.001)
        assert peer.frame(8) == (1000).to_bytes(2, "big")

    done, server = run(talk, tmp_path, backend, every(0.03, 4, transport="websocket"))
    assert {(r.outcome, r.output_tokens, sum(r.chunk_tokens)) for r in done.records.values()} == {
        ("completed", 2, 2)
    }
    assert {(r.transport, r.status, r.token_mismatch) for r in done.records.values()} == {
        ("websocket", 200, False)
    }
    assert pongs == [b"are you there"] * 4
    # Each has a connection of its own, on which all went well; the others were opened ahead and never used.
    assert server.ends.count(None) == 4
    assert all(isinstance(end, EOFError) for end in server.ends if end is not None)


@pytest.mark.parametrize(
    ("wire", "outcome", "reason", "status"),
    [
        (served(b"\xff"), "failed", "protocol", None),
        (served(TOKEN[6:-2]) + served(b"x", 2), "failed", "protocol", 200),
        (served(TOKEN[6:-2]) + close(1011, b"oops"), "failed", "reset", 200),
        (close(1013, b"come again"), "failed", "reset", None),
        (b"", "failed", "reset", None),
        (served(TOKEN[6:-2])[:-5], "failed", "reset", None),
        (served(b'{"error": {"message": "no", "code": "queue_full"}, "status": 429}') + close(4429),
         "rejected", "queue_full", 429),
        (served(TOKEN[6:-2]) + served(b'{"error": {"message": "no"}}') + close(4500),
         "failed", "error_event", 200),
        (b"".join(messages(b"".join(ANSWER), 200)), "completed", None, 200),  # no close frame at all
        (b"".join(messages(b"".join(ANSWER), 200)) + close(1001), "completed", None, 200),
    ],
)  # fmt: skip
def test_every_end_has_its_outcome(
    backend: str, tmp_path: Path, wire: bytes, outcome: str, reason: str | None, status: int | None
) -> None:
    def talk(peer: Peer) -> None:
        assert b'"stream":true' in handshake(peer)
        peer.send(wire)

    record = run(talk, tmp_path, backend)[0].only
    assert (record.outcome, record.reason, record.status) == (outcome, reason, status)


@pytest.mark.parametrize(
    ("answer", "outcome", "reason", "status"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno", "rejected", "http_503", 503),
        (b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno", "failed", "http_404", 404),
        (b"HTTP/1.1 200 Fine\r\nContent-Length: 2\r\n\r\nno", "failed", "ended_early", 200),
        (accept(new_key()), "failed", "protocol", None),
        (b"", "failed", "reset", None),
    ],
)
def test_a_handshake_that_fails(
    backend: str, tmp_path: Path, answer: bytes, outcome: str, reason: str, status: int | None
) -> None:
    def talk(peer: Peer) -> None:
        peer.read_to(b"\r\n\r\n")
        peer.send(answer)

    record = run(talk, tmp_path, backend)[0].only
    assert (record.outcome, record.reason, record.status) == (outcome, reason, status)
    assert record.send_ns is not None


def test_a_prompt_that_the_kernel_does_not_take_at_once_arrives_whole(backend: str, tmp_path: Path) -> None:
    sizes: list[int] = []

    def talk(peer: Peer) -> None:
        sizes.append(len(handshake(peer)))
        peer.send(WIRE)

    from workloads.schedule import Segment

    long = request(prompt_tokens=400_000, segments=(Segment("s", 400_000),), transport="websocket")
    with RawServer(talk, receive_buffer=4096) as server:
        done = asyncio.run(drive(server.base_url, [long], tmp_path, backend=backend))
    assert done.only.outcome == "completed"
    assert sizes[0] > 1_000_000
