"""TCP sockets whose reads say when the kernel had the bytes.

SO_TIMESTAMPNS (man 7 socket) makes recvmsg bring the time, CLOCK_REALTIME ns, at which the last segment that
it read from had arrived. It is taken when the packet is, so it is as good on a busy client as on an idle one.
Where several segments are read at once the times of the others are lost (the kernel merges them in its queue,
so reading in small pieces does not bring them back): whoever counts chunks per read can see that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

READ_BYTES = 64 * 1024
"""A read allocates this much for a moment. More would come from fresh pages every time (9 us instead of
1.5)."""
ANCILLARY_BYTES = 64
STAMPS_AFTER_S = 10.0
SURE_AFTER = 5
"""Times in a row."""
_SO_TIMESTAMPNS = 35  # Linux, asm-generic/socket.h; the socket module does not name it
timespec = struct.Struct("qq").unpack
"""Seconds and nanoseconds of a stamp; there is no other ancillary data on these sockets."""
_RESET = struct.pack("ii", 1, 0)

Ancillary = list[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class Address:
    """One of the addresses of a name, as getaddrinfo gives it."""

    family: int
    sockaddr: Any

    def __str__(self) -> str:
        host, port = self.sockaddr[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int) -> list[Address]:
    """All addresses, in the order of the system's preference. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except UnicodeError as exc:
        raise OSError(errno.EINVAL, f"{host}: not a host name") from exc
    return list(dict.fromkeys(Address(int(family), sockaddr) for family, _, _, _, sockaddr in found))


def stamps_unavailable() -> str | None:
    """Why reads bring no stamps here; None: they do. Asks the kernel, over sockets of its own.

    The kernel begins to stamp packets some time after the first socket asks for it (Linux, net/core/dev.c:
    net_enable_timestamp leaves it to a work queue), on a busy machine some time later. So a TCP read without
    a stamp says nothing, unless the kernel stamps what comes: a datagram shows that. It always has a stamp,
    of its arrival if that was taken, else of its reading (net/socket.c, __sock_recv_timestamp)."""
    if not sys.platform.startswith("linux") or struct.calcsize("l") != 8:
        return "kernel receive stamps are only known here for 64-bit Linux"
    try:
        with (
            keep_stamping() as datagrams,
            socket.create_server(("127.0.0.1", 0)) as server,
            start(Address(socket.AF_INET, server.getsockname())) as reader,
        ):
            for sock in (datagrams, server, reader):
                sock.settimeout(STAMPS_AFTER_S)
            datagrams.bind(("127.0.0.1", 0))
            datagrams.connect(datagrams.getsockname())
            writer, _ = server.accept()
            with writer:
                return _probe(datagrams, writer, reader)
    except OSError as exc:
        return f"no kernel receive stamps: {exc}"


def _probe(datagrams: socket.socket, writer: socket.socket, reader: socket.socket) -> str | None:
    until = time.monotonic() + STAMPS_AFTER_S
    missing = 0
    while time.monotonic() < until:
        datagrams.send(b"x")
        time.sleep(0.0005)
        before_ns = time.time_ns()
        of_datagram = _stamp_ns(datagrams)
        writer.sendall(b"x")
        if _stamp_ns(reader) is not None:
            return None
        missing = missing + 1 if of_datagram is None or of_datagram < before_ns else 0
        if missing == SURE_AFTER:
            return "the kernel does not stamp what TCP sockets receive"
    return f"the kernel did not begin to stamp within {STAMPS_AFTER_S:g} s"


def _stamp_ns(sock: socket.socket) -> int | None:
    """Read a byte; the stamp that it came with."""
    _, ancillary, _, _ = sock.recvmsg(1, ANCILLARY_BYTES)
    if not ancillary or ancillary[0][1] != _SO_TIMESTAMPNS or len(ancillary[0][2]) != 16:
        return None
    seconds, ns = timespec(ancillary[0][2])
    return int(seconds * 1_000_000_000 + ns)


def keep_stamping() -> socket.socket:
    """A socket that does nothing but keep the kernel stamping while no other one asks for it."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return sock


def start(address: Address) -> socket.socket:
    """A non-blocking socket that is connecting, or connected already. Raises OSError."""
    sock = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        code = sock.connect_ex(address.sockaddr)
        if code not in (0, errno.EINPROGRESS):
            raise error(code, address)
    except BaseException:
        sock.close()
        raise
    return sock


def is_connected(sock: socket.socket, address: Address) -> bool:
    """False: it is still trying. Raises OSError when it has failed."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise error(code, address)
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def error(code: int, address: Address) -> OSError:
    return OSError(code, f"{address}: {os.strerror(code)}")


def reset(sock: socket.socket) -> None:
    """Close with RST: the server's next look at the connection, be it a read or a write, fails, and our port
    is free at once. With FIN a server that only writes would notice with its second write."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
