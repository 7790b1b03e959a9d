"""One end of the socket between the server and its engine process: messages in, messages out, and nobody
waits for the other.

What the other end does not take yet is kept here, in order. It is never more than the work that is open: at
most max_tokens for each request on the one side, its prompt on the other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque

from engines.server.wire import HEAD, MAX_FRAME_BYTES, Message, WireError, decode, encode

BUFFER_BYTES = 1 << 20
"""What the kernel is asked to hold in each direction, and what one receive() takes at most."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. They close on exec, but for the one that is passed on by number."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Channel:
    """Not thread-safe. `ended`: the other end sends no more."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.ended = False
        self._ending = False
        self._socket = end
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Something waits for flush()."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Never waits. To an end that is gone, messages are dropped: reading tells. Raises WireError."""
        self._unsent.append(memoryview(encode(message)))
        self.flush()

    def flush(self) -> None:
        """Send of what waits as much as the other end takes now."""
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self._socket.send(first)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                break
            if sent == len(first):
                self._unsent.popleft()
            else:
                self._unsent[0] = first[sent:]
        if self._ending:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def drain(self, patience_s: float) -> None:
        """Wait until the other end has taken everything, or has gone, or until patience ends."""
        deadline = time.monotonic() + patience_s
        while self._unsent and (left_s := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left_s)
            self.flush()

    def wait(self, timeout_s: float | None) -> None:
        """Until there is something to read, or room for what waits; at most timeout_s. select() and not
        poll(), whose milliseconds would be late for a batch that waits two of them."""
        select.select([self._socket], [self._socket] if self._unsent else [], [], timeout_s)

    def receive(self) -> list[Message]:
        """What has come, up to BUFFER_BYTES of it; never waits. A message that was cut off by the end of the
        other side is dropped. Raises WireError."""
        try:
            data = self._socket.recv(BUFFER_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        self._received += data
        return self._messages()

    def end(self) -> None:
        """Say that no more will be sent, after what waits. What the other end still sends can be received."""
        self._ending = True
        self.flush()

    def close(self) -> None:
        self._socket.close()

    def _messages(self) -> list[Message]:
        found: list[Message] = []
        at, size = 0, len(self._received)
        with memoryview(self._received) as view:
            while size - at >= HEAD.size:
                length, kind = HEAD.unpack_from(view, at)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes: needs at most {MAX_FRAME_BYTES}")
                end = at + HEAD.size + length
                if end > size:
                    break
                with view[at + HEAD.size : end] as payload:
                    found.append(decode(kind, payload))
                at = end
        del self._received[:at]
        return found
