"""RFC 6455 (WebSocket) as a client of one request needs it: the handshake, one message out, messages in.

No socket, no clock: bytes go in, bytes come out. A message of the server becomes the server-sent event that
would have carried it, so that whoever reads an answer need not know how it came. What our server says before
the first token, {"error", "status"}, becomes the status and the body of an HTTP response.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping

import orjson

from harness.loadgen.sse import MAX_EVENT_BYTES

SUFFIX = "/ws"
"""Of the path, beside the one that takes a POST."""
HEADERS = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
KEY = "Sec-WebSocket-Key"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_FIN, _RESERVED, _MASKED, _CONTROL = 0x80, 0x70, 0x80, 0x08
_WHOLE, _NO_CODE = 1000, 1005
_BROKEN, _NOT_TEXT, _NOT_UTF8, _TOO_LARGE = 1002, 1003, 1007, 1009


def new_key() -> str:
    """Of a handshake (4.1): 16 random bytes."""
    return base64.b64encode(os.urandom(16)).decode()


def refused(key: str, headers: Mapping[str, str]) -> str | None:
    """What is wrong with a 101 (4.1; headers by their names in lower case); None: nothing. No extension and
    no subprotocol was asked for."""
    if headers.get("upgrade", "").lower() != "websocket":
        return "the 101 is no upgrade to websocket"
    if "upgrade" not in [option.strip() for option in headers.get("connection", "").lower().split(",")]:
        return "the 101 has no Connection: Upgrade"
    accept = base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()
    if headers.get("sec-websocket-accept") != accept:
        return "Sec-WebSocket-Accept does not answer our key"
    for name in ("sec-websocket-extensions", "sec-websocket-protocol"):
        if name in headers:
            return f"{name} was not asked for"
    return None


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A whole message of a client, masked (5.2, 5.3)."""
    size = len(payload)
    head = bytes([_FIN | opcode])
    if size < 126:
        head += bytes([_MASKED | size])
    elif size < 1 << 16:
        head += bytes([_MASKED | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([_MASKED | 127]) + size.to_bytes(8, "big")
    mask = os.urandom(4)
    # As whole numbers: a prompt of 100 kB takes some 50 us, a byte at a time it would be 5 ms.
    pad = (mask * (size // 4 + 1))[:size]
    masked = int.from_bytes(payload, "little") ^ int.from_bytes(pad, "little")
    return head + mask + masked.to_bytes(size, "little")


class Frames:
    """What a server sends after its 101. feed() takes what was read and gives what it brought of the answer.

    status and content_type are those that HTTP would have had, None until the first message. ended: nothing
    more will come. broken: why, if not by a close that is in order: (reason, message) as in Call.broke().
    replies: what has to be sent back (pongs, the answer to a close); take it and set it to b"".
    """

    __slots__ = (
        "_buffer",
        "_max",
        "_need",
        "_parts",
        "_size",
        "broken",
        "content_type",
        "ended",
        "replies",
        "status",
    )

    def __init__(self, max_message_bytes: int = MAX_EVENT_BYTES) -> None:
        self.status: int | None = None
        self.content_type = ""
        self.ended = False
        self.broken: tuple[str, str] | None = None
        self.replies = b""
        self._max = max_message_bytes
        self._buffer = bytearray()  # an unfinished frame
        self._need = 2  # how much of it there has to be before it is looked at again
        self._parts: list[bytes] = []  # of an unfinished message
        self._size = 0  # theirs

    def feed(self, data: bytes) -> bytes:
        """The body's bytes. What comes after the end is dropped."""
        if self.ended:
            return b""
        if not self._buffer and not self._parts and data[0] == _FIN | TEXT:
            # The usual read: one whole message.
            size, at = data[1] if len(data) > 1 else 127, 2
            if size == 126 and len(data) > 4:
                size, at = int.from_bytes(data[2:4], "big"), 4
            if size != 127 and len(data) == at + size and (at == 4 or size < 126):
                return self._message(data[at:])
        self._buffer += data
        out: list[bytes] = []
        while not self.ended and len(self._buffer) >= self._need:
            self._next(out)
        return b"".join(out)

    def _next(self, out: list[bytes]) -> None:
        """Take the next frame from the buffer, if it is there."""
        buffer = self._buffer
        first, second = buffer[0], buffer[1]
        opcode, size, at = first & 0x0F, second & 0x7F, 2
        if first & _RESERVED or second & _MASKED:
            self._fail(_BROKEN, "a frame has reserved bits or a mask")
            return
        if opcode & _CONTROL and (size > 125 or not first & _FIN):
            self._fail(_BROKEN, "a control frame is fragmented or larger than 125 bytes")
            return
        if size > 125:
            at = 4 if size == 126 else 10
            if len(buffer) < at:
                self._need = at
                return
            size = int.from_bytes(buffer[2:at], "big")
        if self._size + size > self._max:
            self._fail(_TOO_LARGE, f"a message is larger than {self._max} bytes")
            return
        self._need = at + size
        if len(buffer) < self._need:
            return
        payload = bytes(buffer[at : at + size])
        del buffer[: at + size]
        self._need = 2
        if opcode & _CONTROL:
            self._on_control(opcode, payload)
        elif opcode == BINARY or opcode > BINARY:
            self._fail(
                _NOT_TEXT if opcode == BINARY else _BROKEN,
                f"a frame of kind {opcode}: only text is understood",
            )
        elif (opcode == _CONTINUED) != bool(self._parts):
            self._fail(_BROKEN, "the fragments of a message are out of order")
        elif not first & _FIN:
            self._parts.append(payload)
            self._size += size
        else:
            message = b"".join([*self._parts, payload])
            self._parts, self._size = [], 0
            out.append(self._message(message))

    def _on_control(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            self.replies += frame(payload, PONG)
        elif opcode == CLOSE:
            self._on_close(payload)
        elif opcode != PONG:
            self._fail(_BROKEN, f"a control frame of kind {opcode}")

    def _on_close(self, payload: bytes) -> None:
        if len(payload) == 1:
            self._fail(_BROKEN, "a close frame of one byte")
            return
        code = int.from_bytes(payload[:2], "big") if payload else _NO_CODE
        self.ended = True
        self.replies += frame(payload[:2], CLOSE)
        # A refusal has said all before it was closed.
        if code not in (_WHOLE, _NO_CODE) and self.status in (None, 200):
            reason = payload[2:].decode("utf-8", "replace")
            ours = code in (_BROKEN, _NOT_TEXT, _NOT_UTF8, _TOO_LARGE)
            self.broken = "protocol" if ours else "reset", f"closed with code {code} {reason}".rstrip()

    def _message(self, data: bytes) -> bytes:
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                self._fail(_NOT_UTF8, "a message is not UTF-8")
                return b""
        if self.status is None:
            self.status, self.content_type = 200, "text/event-stream"
            if (status := _status(data)) is not None:
                self.status, self.content_type = status, "application/json"
        if self.status != 200:
            return data
        return b"data: %b\n\n" % data.replace(b"\r", b"").replace(b"\n", b"\ndata: ")

    def _fail(self, code: int, what: str) -> None:
        """What the server sends is no WebSocket, or more than is taken: the connection ends (7.1.7)."""
        self.ended, self.broken = True, ("protocol", what)
        self.replies += frame(code.to_bytes(2, "big"), CLOSE)


def _status(data: bytes) -> int | None:
    """The HTTP status of a first message that is a refusal."""
    if b'"error"' not in data:
        return None
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict) or "error" not in told:
        return None
    status = told.get("status")
    return status if type(status) is int and 400 <= status <= 599 else None
