"""The loop: one thread, one epoll, and a question before every step: is a request due?

A send never waits for more than the step before it, which is one read (some 5 us), one piece of an answer to
take in (some 10 us) or one more send. Whatever is not a send may be late without harm: bytes are stamped by
the kernel when they arrive, and patience is counted in tens of milliseconds. So there is one order: what is
due, what can be read, what has been read, what can be prepared, sleep.
"""

from __future__ import annotations

import contextlib
import heapq
import select
import time
from typing import TYPE_CHECKING

from harness.loadgen.lean import sockets
from harness.loadgen.lean.clock import WallClock
from harness.loadgen.lean.exchange import Digestion, End, Exchange
from harness.loadgen.lean.http1 import HTTPError
from harness.loadgen.lean.pool import Connection, Pool
from harness.loadgen.lean.samples import Samples
from harness.loadgen.lean.timer import NS, Timer
from harness.loadgen.lean.upgrade import Upgrade
from harness.loadgen.settings import BackendReport
from harness.loadgen.websocket import new_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.loadgen.lean.sockets import Address
    from harness.loadgen.run import Load

TICK_NS = 50_000_000
"""Between two samples of the loop's lag, and between two rounds of upkeep."""
TICKS_PER_CLOCK_SAMPLE = 5
SPIN_NS = 100_000
"""The alarm for a send rings this much early and the rest is spun: a wake-up takes about this long."""
STEP_NS = 30_000
"""Nothing that can wait is begun when a send is due sooner than this."""
CONNECT_NS = 200_000
"""The same for opening a connection."""
PREPARE_NS = 1_500_000
"""The same for building a body: up to 1 ms for a long prompt."""
CATCH_UP = 3
"""Pieces taken in per read, while that is overdue."""
SPARES = 8
FIRST_SPARES = 512
"""At most this many are opened before the start, for a closed loop's first burst."""
SAMPLES = 20_000
BURST = 32
"""Sends in a row before the sockets are looked at again."""
MOSTLY = 0.01
NEVER = 1 << 62

_IN = 1  # select.EPOLLIN, where there is one
_READ = sockets.READ_BYTES
_ANCILLARY = sockets.ANCILLARY_BYTES


class Loop:
    """Drives one load over one server's connections. run() once, then close()."""

    def __init__(self, load: Load, addresses: Sequence[Address], head: bytes, handshake: bytes) -> None:
        """head: of a request up to the number after Content-Length. handshake: of a WebSocket up to its key.
        Raises OSError."""
        self._load = load
        self._dispatcher = load.dispatcher
        self._head = head
        self._handshake = handshake
        self._clock = time.monotonic_ns
        self._wall = WallClock()
        self._stamping = sockets.keep_stamping()
        self._epoll = select.epoll()
        self._timer = Timer()
        self._stop_fd = load.stop.fileno()
        self._epoll.register(self._timer.fileno(), select.EPOLLIN | select.EPOLLET)
        self._epoll.register(self._stop_fd, select.EPOLLIN | select.EPOLLET)
        self._pool = Pool(self._epoll, addresses)
        self._digestion = Digestion()
        self._live: dict[int, Exchange] = {}
        self._number = 0
        self._deadlines: list[tuple[int, int]] = []  # heap of (ns, number); of ended exchanges, too
        self._wake_ns = 0  # when something is due next
        self._send_ns = NEVER  # when a request is due next
        self._tick_ns = self._clock() + TICK_NS
        self._ticks = 0
        self._loop_lag = Samples(SAMPLES)
        self._read_lag = Samples(SAMPLES)
        self._stamped = self._unstamped = 0  # reads
        self._stopping = load.stop.is_set
        self._prepared = False  # nothing is left to prepare, until the next send, end or tick
        self._spares = SPARES
        if load.settings.kind == "closed":
            self._spares = max(SPARES, min(load.settings.concurrency or 0, FIRST_SPARES))

    def run(self) -> BackendReport:
        """Until the dispatcher is through and all has ended, or the load is to stop."""
        clock, poll, by_fd, digestion = self._clock, self._epoll.poll, self._pool.by_fd, self._digestion
        while True:
            now_ns = clock()
            if now_ns >= self._wake_ns:
                self._on_time(now_ns)
            if digestion.ready or not self._prepared:
                events = poll(0)
            elif self._live or not self._dispatcher.exhausted:
                events = self._sleep(now_ns)
            else:
                break
            for fd, mask in events:
                connection = by_fd.get(fd)
                if connection is not None:
                    self._event(connection, mask)
                elif fd == self._stop_fd:
                    self._stopping = True
                now_ns = clock()
                if now_ns >= self._wake_ns:
                    self._on_time(now_ns)
            if self._stopping:
                break
            if not events:
                self._work()
            elif digestion.overdue:
                self._digest(CATCH_UP * len(events))
        self._cut_off()
        # The kernel may still be getting ready when the first bytes come; those have the time of their read.
        by_kernel = self._unstamped <= MOSTLY * self._stamped
        return BackendReport(
            backend="lean",
            stamps="kernel" if by_kernel else "reader",
            loop_lag_ms=self._loop_lag.as_ms(),
            read_lag_ms=self._read_lag.as_ms() if by_kernel else (),
            connections=self._pool.opened,
            clock_offset_step_ns=self._wall.step_ns,
        )

    def close(self) -> None:
        self._pool.close()
        self._timer.close()
        self._epoll.close()
        self._stamping.close()

    # Time.

    def _on_time(self, now_ns: int) -> None:
        """All that is due, and when the next thing is."""
        dispatcher = self._dispatcher
        next_ns = dispatcher.next_ns()
        for _ in range(BURST):
            if next_ns is None or next_ns > now_ns:
                break
            self._launch(now_ns)
            now_ns = self._clock()
            next_ns = dispatcher.next_ns()
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, number = heapq.heappop(self._deadlines)
            exchange = self._live.get(number)
            if exchange is not None:
                self._on_deadline(exchange)
                next_ns = dispatcher.next_ns()
        if self._tick_ns <= now_ns:
            self._tick(now_ns)
            next_ns = dispatcher.next_ns()
        self._send_ns = NEVER if next_ns is None else next_ns
        deadline_ns = self._deadlines[0][0] if self._deadlines else NEVER
        self._wake_ns = min(self._send_ns, deadline_ns, self._tick_ns)

    def _tick(self, now_ns: int) -> None:
        self._loop_lag.add(now_ns - self._tick_ns)
        # After a long hold-up the next sample is a whole interval away: one hold-up, one sample.
        self._tick_ns = max(self._tick_ns, now_ns) + TICK_NS
        self._ticks += 1
        self._prepared = False
        self._digestion.tick(now_ns)
        if self._ticks % TICKS_PER_CLOCK_SAMPLE == 0:
            self._wall.sample()
        for connection, exc in self._pool.upkeep(now_ns):
            self._broke(connection.exchange, "connect", _message(exc))

    def _sleep(self, now_ns: int) -> list[tuple[int, int]]:
        """Until something can be read or is due; the last moments before a send are spun by the caller."""
        wake_ns = self._wake_ns
        if wake_ns == self._send_ns:
            wake_ns -= SPIN_NS
        if wake_ns <= now_ns:
            return []
        self._timer.arm(wake_ns)
        return self._epoll.poll()

    def _work(self) -> None:
        """Nothing can be read: some of what has waited for that, if there is time for it."""
        now_ns = self._clock()
        left_ns = self._send_ns - now_ns
        if self._digestion.ready:
            if left_ns > STEP_NS:
                self._digest()
        elif not self._prepared and left_ns > CONNECT_NS:
            self._prepared = not self._prepare(now_ns, left_ns)

    def _prepare(self, now_ns: int, left_ns: int) -> bool:
        """One thing that makes later sends quicker. False: there is none, or no time for it now."""
        if left_ns > PREPARE_NS and self._load.idle(self._send_ns):
            return True
        # With nothing left to send there is nothing to open for; a session's next turn finds its own.
        return self._send_ns < NEVER and self._pool.spares < self._spares and self._pool.open_spare(now_ns)

    def _digest(self, at_least: int = 0) -> None:
        """Take in what has been read, until the sockets should be looked at again; sends go between."""
        digestion, clock = self._digestion, self._clock
        until_ns = clock() + 2 * STEP_NS
        while digestion.ready:
            exchange = digestion.step()
            if exchange is not None:
                self._over(exchange)
            at_least -= 1
            now_ns = clock()
            if now_ns >= self._wake_ns:
                self._on_time(now_ns)
            if now_ns >= until_ns and at_least <= 0:
                return

    # Sending.

    def _launch(self, now_ns: int) -> None:
        due = self._dispatcher.take(now_ns)
        if due is None:
            return
        call = self._load.call(due, now_ns)
        self._number += 1
        self._prepared = False
        exchange = self._live[self._number] = Exchange(self._number, call)
        try:
            call.dispatched(now_ns)
            if call.deadline_ns is not None:
                heapq.heappush(self._deadlines, (call.deadline_ns, exchange.number))
            body = self._load.bodies.body(due)
            if due.request.transport == "websocket":
                key = new_key()
                exchange.response = Upgrade(key, body)
                request = b"%b%b\r\n\r\n" % (self._handshake, key.encode())
            else:
                request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
            connection = self._pool.take(now_ns)
        except OSError as exc:
            self._broke(exchange, "connect", _message(exc))
            return
        except Exception as exc:
            self._broke(exchange, "client_error", f"{type(exc).__name__}: {exc}")
            return
        exchange.connection, connection.exchange = connection, exchange
        connection.unsent = memoryview(request)
        if connection.connected:
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        """Hand over what is left of the request, as far as the kernel takes it."""
        exchange, unsent = connection.exchange, connection.unsent
        assert exchange is not None
        assert unsent is not None
        now_ns = self._clock()
        try:
            sent = connection.sock.send(unsent)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            sent = -1
            failure = exc
        if exchange.last_ns == 0 and sent:
            exchange.call.on_send(now_ns)
            exchange.last_ns = now_ns
        if sent == len(unsent):
            connection.unsent = None
            if exchange.partial:
                self._pool.watch_writes(connection, False)
        elif sent >= 0:
            connection.unsent = unsent[sent:]
            if not exchange.partial:
                exchange.partial = True
                self._pool.watch_writes(connection, True)
        else:
            # The server takes no more. It may have said why before it closed: then that is read first.
            self._event(connection, _IN)
            if connection.exchange is exchange and not exchange.response.status:
                self._reset(connection, failure)

    # Reading.

    def _event(self, connection: Connection, mask: int) -> None:
        """epoll named this connection. An event may be stale, of a socket that had the number before: what
        counts is what the socket says."""
        if mask & ~_IN and not self._write_event(connection):
            return
        try:
            data, ancillary, _, _ = connection.recvmsg(_READ, _ANCILLARY)
        except BlockingIOError:
            return
        except OSError as exc:
            self._reset(connection, exc)
            return
        now_ns = self._clock()
        exchange = connection.exchange
        if exchange is None:
            self._pool.drop(connection)  # closed by the server, or bytes that nobody asked for
        elif data:
            self._read(exchange, self._stamp(exchange, ancillary, now_ns), data)
        elif exchange.response.eof():
            self._end(exchange, End(now_ns))
        else:
            what = "in the middle of its answer" if exchange.response.status else "without an answer"
            self._end(exchange, End(now_ns, "reset", f"the server closed the connection {what}"))

    def _stamp(self, exchange: Exchange, ancillary: sockets.Ancillary, now_ns: int) -> int:
        """When the bytes of a read had arrived: never later than the read, nor earlier than what came
        before."""
        if not ancillary:
            self._unstamped += 1
            return now_ns
        self._stamped += 1
        seconds, ns = sockets.timespec(ancillary[0][2])
        real_ns = seconds * NS + ns
        stamp_ns = real_ns - self._wall.offset_ns
        if not exchange.last_ns <= stamp_ns <= now_ns:
            # By more than the error of the mapping only when somebody has set the clock.
            self._wall.sample()
            stamp_ns = max(exchange.last_ns, min(now_ns, real_ns - self._wall.offset_ns))
        self._read_lag.add(now_ns - stamp_ns)
        exchange.last_ns = stamp_ns
        return stamp_ns

    def _read(self, exchange: Exchange, stamp_ns: int, data: bytes) -> None:
        response, call = exchange.response, exchange.call
        begun = response.status is not None
        try:
            piece = response.feed(data)
        except HTTPError as exc:
            self._end(exchange, End(stamp_ns, "protocol", str(exc)))
            return
        if not begun and response.status is not None:
            call.on_headers(stamp_ns, response.status, response.content_type)
        if piece:
            self._digestion.add(exchange, stamp_ns, piece)
        if response.replies and not self._reply(exchange):
            return
        if response.ended:
            self._end(exchange, End(stamp_ns, *(response.broken or ())))
        elif piece and exchange.urgent:
            self._take_in(exchange)

    def _reply(self, exchange: Exchange) -> bool:
        """Send what a WebSocket has to answer. False: that was the end of the exchange."""
        connection, response = exchange.connection, exchange.response
        assert connection is not None
        assert isinstance(response, Upgrade)
        replies, response.replies = response.replies, b""
        if response.ended:  # a close is answered if it can be: the server knows already
            with contextlib.suppress(OSError):
                connection.sock.send(replies)
            return True
        connection.unsent = memoryview(bytes(connection.unsent or b"") + replies)
        self._write(connection)
        return exchange.end is None

    def _write_event(self, connection: Connection) -> bool:
        """A connection is made or broken, or the kernel takes more of a request. False: nothing to read
        yet."""
        exchange = connection.exchange
        if not connection.connected:
            try:
                if not self._pool.connected(connection, self._clock()):
                    return False
            except OSError as exc:
                self._broke(exchange, "connect", _message(exc))
                return False
        if connection.unsent is not None:
            self._write(connection)
        return connection.fd in self._pool.by_fd

    # Ends.

    def _end(self, exchange: Exchange, end: End) -> None:
        """Nothing more will come. The connection goes back at once, the call when its bytes are taken in."""
        connection, response = exchange.connection, exchange.response
        assert connection is not None
        exchange.connection = None
        if end.reason is None and response.keep_alive and connection.unsent is None:
            self._pool.give_back(connection, self._clock())
        else:
            self._pool.drop(connection, abort=end.reason is not None)
        self._digestion.add_end(exchange, end)

    def _reset(self, connection: Connection, exc: OSError) -> None:
        """The kernel says that the connection is broken."""
        exchange = connection.exchange
        if exchange is None:
            self._pool.drop(connection)
        else:
            self._end(exchange, End(self._clock(), "reset", _message(exc)))

    def _broke(self, exchange: Exchange | None, reason: str, message: str) -> None:
        """It broke before it had a connection to give back."""
        if exchange is not None:
            exchange.connection = None
            self._digestion.add_end(exchange, End(self._clock(), reason, message))

    def _on_deadline(self, exchange: Exchange) -> None:
        """What had arrived by then counts: it is read and taken in first."""
        connection = exchange.connection
        if connection is not None and connection.connected:
            self._event(connection, _IN)
        if self._take_in(exchange):
            return
        call = exchange.call
        if call.on_deadline(self._clock()):
            self._over(exchange)
        elif call.deadline_ns is not None:
            heapq.heappush(self._deadlines, (call.deadline_ns, exchange.number))

    def _take_in(self, exchange: Exchange) -> bool:
        """All that waits of this exchange, now. True: its call has its verdict, and it is over."""
        over = self._digestion.flush(exchange)
        if over is None:
            return False
        self._over(over)
        return True

    def _over(self, exchange: Exchange) -> None:
        """The call has its verdict. If the server does not know yet, the connection tells it."""
        if self._live.pop(exchange.number, None) is None:
            return
        connection, exchange.connection = exchange.connection, None
        if connection is not None:
            self._pool.drop(connection, abort=True)
        self._load.ended(exchange.call, self._clock())
        self._wake_ns = 0  # that may have made something due
        self._prepared = False

    def _cut_off(self) -> None:
        """The load ends: at once, whatever is under way."""
        for exchange in list(self._live.values()):
            if not self._take_in(exchange):
                exchange.call.cut_off(self._clock())
                self._over(exchange)


def _message(exc: OSError) -> str:
    return " ".join(str(exc.strerror or exc).split()) or type(exc).__name__
