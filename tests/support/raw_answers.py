"""Answers of two tokens as bytes on the wire, and the lean backend against a server that sends them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.load import Driven, drive
from tests.support.raw_server import Peer, RawServer
from tests.support.script_server import DONE, completion, usage

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TOKEN = completion("x", [1])
ENDING = completion(finish="length") + usage(2) + DONE


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def run_lean(server: RawServer | str, plan: list[Any], folder: Path, **settings: Any) -> Driven:
    base_url = server if isinstance(server, str) else server.base_url
    return asyncio.run(drive(base_url, plan, folder, backend="lean", **settings))


def whole(peer: Peer) -> None:
    """Answers two tokens to every request."""
    while True:
        peer.request()
        peer.send(CHUNKED + chunk(TOKEN))
        peer.send(chunk(TOKEN) + chunk(ENDING) + b"0\r\n\r\n")


FRAMINGS = {
    "chunks": CHUNKED + chunk(TOKEN) + chunk(TOKEN) + chunk(ENDING) + b"0\r\n\r\n",
    "extensions and trailers": CHUNKED
    + b"%x;a=b\r\n%b\r\n" % (len(TOKEN + TOKEN), TOKEN + TOKEN)
    + chunk(ENDING)
    + b"0;last\r\nDigest: x\r\n\r\n",
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(TOKEN + TOKEN + ENDING) + TOKEN + TOKEN + ENDING,
    "close": HEAD + b"\r\n" + TOKEN + TOKEN + ENDING,
    "1.0": HEAD.replace(b"/1.1", b"/1.0") + b"\r\n" + TOKEN + TOKEN + ENDING,
    "100 first": b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + chunk(TOKEN + TOKEN + ENDING) + b"0\r\n\r\n",
    "events over chunks": CHUNKED
    + b"".join(chunk(piece) for piece in (TOKEN[:9], TOKEN[9:] + TOKEN[:30], TOKEN[30:] + ENDING))
    + b"0\r\n\r\n",
}
