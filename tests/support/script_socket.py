"""The script server's side of a WebSocket: the events of a script, each as a frame of its own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct

CLOSE = b"\x88"


def accept(key: str) -> bytes:
    """The answer to a handshake."""
    digest = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return head + b"Sec-WebSocket-Accept: " + digest + b"\r\n\r\n"


def frame(payload: bytes, opcode: int = 1, fin: bool = True) -> bytes:
    first = bytes([(0x80 if fin else 0) | opcode])
    size = len(payload)
    if size < 126:
        return first + bytes([size]) + payload
    return (
        first + (struct.pack("!BH", 126, size) if size < 65536 else struct.pack("!BQ", 127, size)) + payload
    )


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(code.to_bytes(2, "big") + reason, 8)


def messages(data: bytes, status: int) -> list[bytes]:
    """Frames of the data lines of some events; of a refusal its body, with the status in it."""
    if status != 200:
        try:
            return [frame(json.dumps(json.loads(data) | {"status": status}).encode())]
        except ValueError:
            return [frame(data)]
    events = data.replace(b"\r\n", b"\n").split(b"\n\n")
    lines = [[line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")] for event in events]
    return [frame(b"\n".join(found)) for found in lines if found]


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """(opcode, payload) of a client's frame, which must be whole and masked."""
    first, second = await reader.readexactly(2)
    assert first & 0x80, "in one piece"
    assert second & 0x80, "masked"
    size = second & 0x7F
    if size > 125:
        size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
    mask = await reader.readexactly(4)
    return first & 0x0F, unmasked(mask, await reader.readexactly(size))


def unmasked(mask: bytes, data: bytes) -> bytes:
    pad = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(len(data), "big")
