"""A server that is a script of raw bytes, in a thread: for what no HTTP library would send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from tests.support.script_socket import unmasked

Talk = Callable[["Peer"], None]


class Peer:
    """One accepted connection, from the server's side. Everything it does may raise OSError."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number  # from 0, in order of acceptance
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request(self) -> bytes:
        """Read one whole request; its body. EOFError: the client has closed."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._some()
        head, _, body = data.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        while len(body) < size:
            body += self._some()
        return body

    def read_to(self, mark: bytes) -> bytes:
        """Up to and with the mark, which nothing may follow yet."""
        data = b""
        while not data.endswith(mark):
            data += self._some()
        return data

    def frame(self, opcode: int = 1) -> bytes:
        """The payload of one masked frame of a WebSocket, of this kind."""
        data = b""

        def upto(size: int) -> bytes:
            nonlocal data
            while len(data) < size:
                data += self._some()
            return data

        first, second = upto(2)[:2]
        assert first == 0x80 | opcode
        at, size = 2, second & 0x7F
        if size > 125:
            at = 4 if size == 126 else 10
            size = int.from_bytes(upto(at)[2:at], "big")
        wire = upto(at + 4 + size)
        assert len(wire) == at + 4 + size
        return unmasked(wire[at : at + 4], wire[at + 4 :])

    def send(self, data: bytes, pause_s: float = 0.0) -> int:
        """Returns the CLOCK_MONOTONIC ns right before the write."""
        time.sleep(pause_s)
        now_ns = time.monotonic_ns()
        self.sock.sendall(data)
        return now_ns

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def _some(self) -> bytes:
        piece = self.sock.recv(1 << 16)
        if not piece:
            raise EOFError
        return piece


class RawServer:
    """Use as a context manager. talk(peer) runs in a thread per connection, which is closed after it; `ends`
    says how each ended, first come first: None, or the error that ended it. Leaving it waits for them."""

    def __init__(self, talk: Talk, host: str = "127.0.0.1", receive_buffer: int | None = None) -> None:
        self._talk = talk
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._listener.bind((host, 0))
        self._listener.listen(128)
        self.port: int = self._listener.getsockname()[1]
        self.base_url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self.ends: list[Exception | None] = []
        self.accepted = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    @property
    def open(self) -> int:
        """Connections that the server has not closed."""
        return len(self._open)

    def __enter__(self) -> RawServer:
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)  # so that nobody comes any more
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(sock)
            self.accepted += 1
            peer = Peer(sock, self.accepted - 1)
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, peer: Peer) -> None:
        try:
            self._talk(peer)
        except (OSError, EOFError) as exc:
            self.ends.append(exc)
        else:
            self.ends.append(None)
        peer.sock.close()
        self._open.discard(peer.sock)
