"""Connections to one server: opened ahead, kept alive, watched, given back.

Last in, first out, so that as few as possible are in use and the others age. One that was idle for 4 s is
closed: common servers close theirs after 5 s, and a request that meets a closing connection is lost, for it
is never sent twice."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.loadgen.lean import sockets
from harness.loadgen.lean.sockets import Address
from harness.loadgen.lean.timer import NS

if TYPE_CHECKING:
    from harness.loadgen.lean.exchange import Exchange

IDLE_NS = 4 * NS
CONNECT_NS = 10 * NS
"""For all addresses of the name together."""
SPARE_AGAIN_NS = NS
"""After a connection could not be opened, none is opened ahead for this long."""
LOOK_AFTER_NS = NS // 20
"""A connection that was idle for longer is looked at before it is used: the server may have closed it while
the loop was held up."""


class Connection:
    """A socket, registered with epoll from its begin to its end. exchange: whom it serves; None: it is idle,
    or was opened ahead and is still connecting. unsent: what the kernel has not taken yet of that request."""

    __slots__ = (
        "addresses", "connected", "deadline_ns", "exchange", "fd",
        "idle_ns", "recvmsg", "sock", "tried", "unsent",
    )  # fmt: skip

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.exchange: Exchange | None = None
        self.unsent: memoryview | None = None
        self.connected = False
        self.addresses = addresses  # in the order in which they are tried
        self.tried = 0  # how many of them have failed
        self.deadline_ns = 0  # of this attempt to connect
        self.idle_ns = 0  # since when
        self.fd = -1

    def use(self, sock: socket.socket) -> None:
        self.sock, self.fd, self.recvmsg = sock, sock.fileno(), sock.recvmsg


class Pool:
    """Owns the connections and their places in `epoll`. No addresses: every attempt to connect fails."""

    def __init__(self, epoll: select.epoll, addresses: Sequence[Address]) -> None:
        self.by_fd: dict[int, Connection] = {}
        self.opened = 0
        self._epoll = epoll
        self._addresses = list(addresses)  # the one that worked last first
        self._idle: list[Connection] = []  # the longest idle first
        self._connecting: dict[int, Connection] = {}
        self._no_spare_before_ns = 0

    @property
    def spares(self) -> int:
        """Connections that are idle, or will be as soon as they are connected."""
        return len(self._idle) + sum(connection.exchange is None for connection in self._connecting.values())

    def take(self, now_ns: int) -> Connection:
        """An idle connection, or a new one, which may still be connecting. Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if now_ns - connection.idle_ns <= LOOK_AFTER_NS or _is_silent(connection.sock):
                return connection
            self._close(connection)
        connection = Connection(self._addresses)
        self._try(connection, now_ns)
        return connection

    def open_spare(self, now_ns: int) -> bool:
        """Open one ahead of its use. False: not now, since the last attempt has failed."""
        if now_ns < self._no_spare_before_ns:
            return False
        connection = Connection(self._addresses)
        try:
            self._try(connection, now_ns)
        except OSError:
            return False
        if connection.connected:
            self.give_back(connection, now_ns)
        return True

    def give_back(self, connection: Connection, now_ns: int) -> None:
        """It may serve the next one."""
        connection.exchange = None
        connection.idle_ns = now_ns
        self._idle.append(connection)

    def drop(self, connection: Connection, *, abort: bool = False) -> None:
        """Close it. abort: with RST, so that the server notices at its next look, be it a read or a write."""
        if connection.exchange is None and connection in self._idle:
            self._idle.remove(connection)
        connection.exchange = connection.unsent = None
        self._close(connection, abort=abort)

    def connected(self, connection: Connection, now_ns: int) -> bool:
        """Something has happened to one that was connecting. False: it is still trying, perhaps another
        address. Raises OSError when no address is left; it is closed then."""
        try:
            done = sockets.is_connected(connection.sock, connection.addresses[connection.tried])
        except OSError as exc:
            self._next_address(connection, exc, now_ns)
            return False
        if done:
            del self._connecting[connection.fd]
            self._works(connection)
            self._epoll.modify(connection.fd, select.EPOLLIN)
            if connection.exchange is None:
                self.give_back(connection, now_ns)
        return done

    def watch_writes(self, connection: Connection, on: bool) -> None:
        """Whether epoll shall tell when the kernel takes more of `unsent`."""
        self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT if on else select.EPOLLIN)

    def upkeep(self, now_ns: int) -> list[tuple[Connection, OSError]]:
        """To be called several times a second: closes what was idle for too long. The connections that were
        not made in time come back, closed."""
        while self._idle and self._idle[0].idle_ns < now_ns - IDLE_NS:
            self._close(self._idle.pop(0))
        failed: list[tuple[Connection, OSError]] = []
        for connection in list(self._connecting.values()):
            if connection.deadline_ns <= now_ns:
                address, patience_s = connection.addresses[connection.tried], _patience_ns(connection) / NS
                message = f"{address}: no connection within {patience_s:g} s"
                try:
                    self._next_address(connection, OSError(errno.ETIMEDOUT, message), now_ns)
                except OSError as exc:
                    failed.append((connection, exc))
        return failed

    def close(self) -> None:
        for connection in list(self.by_fd.values()):
            self._close(connection)
        self._idle.clear()

    def _try(self, connection: Connection, now_ns: int) -> None:
        """Connect to the next address that does not fail at once. Raises the last one's OSError."""
        failure = OSError(errno.EADDRNOTAVAIL, "the server's name has no address")
        again = connection.tried > 0  # somebody waits for epoll to say that it is connected
        while connection.tried < len(connection.addresses):
            address = connection.addresses[connection.tried]
            sock = None
            try:
                sock = sockets.start(address)
                connection.connected = sockets.is_connected(sock, address) and not again
            except OSError as exc:
                failure = exc
                connection.tried += 1
                if sock is not None:
                    sock.close()
                continue
            connection.use(sock)
            self.by_fd[connection.fd] = connection
            if connection.connected:
                self._works(connection)
            else:
                connection.deadline_ns = now_ns + _patience_ns(connection)
                self._connecting[connection.fd] = connection
            self._epoll.register(connection.fd, select.EPOLLIN if connection.connected else select.EPOLLOUT)
            return
        self._no_spare_before_ns = now_ns + SPARE_AGAIN_NS
        raise failure

    def _next_address(self, connection: Connection, exc: OSError, now_ns: int) -> None:
        """Go on with the addresses that are left. Raises OSError: exc, or that of the last one."""
        self._close(connection)
        connection.tried += 1
        if connection.tried == len(connection.addresses):
            self._no_spare_before_ns = now_ns + SPARE_AGAIN_NS
            raise exc
        self._try(connection, now_ns)

    def _works(self, connection: Connection) -> None:
        connection.connected = True
        self.opened += 1
        if connection.tried:
            self._addresses = [
                *connection.addresses[connection.tried :],
                *connection.addresses[: connection.tried],
            ]

    def _close(self, connection: Connection, *, abort: bool = False) -> None:
        if self.by_fd.pop(connection.fd, None) is None:
            return
        self._connecting.pop(connection.fd, None)
        if abort:
            sockets.reset(connection.sock)
        else:
            connection.sock.close()


def _patience_ns(connection: Connection) -> int:
    return CONNECT_NS // len(connection.addresses)


def _is_silent(sock: socket.socket) -> bool:
    """Nothing has come on an idle connection: neither its end nor bytes that nobody asked for."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
