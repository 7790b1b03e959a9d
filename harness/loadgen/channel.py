"""One end of the socket between the parent of a load and one of its workers: a length, then a JSON object.
Nothing is unpickled. The end of the socket is the end of the other side, however it came."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

HEAD = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 20
PATIENCE_S = 30.0
"""For the other side to take a message that it must get. It reads on a thread or in a loop of its own."""


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class ChannelError(ValueError):
    """The other side sent something that is no message."""


class Channel:
    """Messages may be sent from several threads and are received by one. ended: no more will come."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.ended = False
        self._socket = end
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], patience_s: float = PATIENCE_S) -> bool:
        """Hand it over, waiting for the other side to take it. False: it is gone, or did not within
        patience_s."""
        deadline = time.monotonic() + patience_s
        with self._lock:
            self._unsent = memoryview(bytes(self._unsent) + _frame(message))
            while self._flush():
                if not self._unsent:
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                _poll([(self._socket, select.POLLOUT)], left_s)
            return False

    def offer(self, message: Mapping[str, Any]) -> None:
        """Hand it over if that needs no waiting, else drop it: the next one will say the same."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._flush() and not self._unsent:
                self._unsent = memoryview(_frame(message))
                self._flush()
        finally:
            self._lock.release()

    def receive(self) -> list[dict[str, Any]]:
        """What has come; never waits. What the end of the other side cut off is dropped. Raises
        ChannelError."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        self._received += data
        return self._messages()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _messages(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._received) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._received)
            if length > MAX_FRAME_BYTES:
                raise ChannelError(f"a message of {length} bytes")
            end = HEAD.size + length
            if len(self._received) < end:
                break
            try:
                message = orjson.loads(memoryview(self._received)[HEAD.size : end])
            except orjson.JSONDecodeError:
                raise ChannelError("a message that is no JSON") from None
            if not isinstance(message, dict) or not isinstance(message.get("type"), str):
                raise ChannelError("a message without a type")
            del self._received[:end]
            messages.append(message)
        return messages

    def _flush(self) -> bool:
        """Send of what waits as much as goes now. False: the other side is gone."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")
            return False
        return True


def readable(ends: Sequence[HasFileno], timeout_s: float) -> list[HasFileno]:
    """Those that have something to read, or whose other side is gone; waits for the first."""
    ready = _poll([(end, select.POLLIN) for end in ends], timeout_s)
    return [end for end in ends if end.fileno() in ready]


def _poll(wanted: Sequence[tuple[HasFileno, int]], timeout_s: float) -> set[int]:
    """poll() and not select(), which takes no descriptor above 1023."""
    poll = select.poll()
    for end, events in wanted:
        poll.register(end.fileno(), events)
    return {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}


def _frame(message: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(message)
    return HEAD.pack(len(body)) + body
