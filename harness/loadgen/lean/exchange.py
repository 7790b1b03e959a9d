"""One request on its connection, and the taking in of what answers brought: read now, understood when there
is time.

Reading stamps bytes and finds the end of the body. Events and JSON cost more than that and can wait, since
every piece keeps its stamp. What has ended goes first: a closed loop waits for it, and so do the records."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.loadgen.call import Call
from harness.loadgen.lean.http1 import Response

if TYPE_CHECKING:
    from harness.loadgen.lean.pool import Connection

MAX_WAIT_NS = 500_000_000
MAX_WAITING_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more will come. reason None: the body is whole; else as in Call.broke()."""

    at_ns: int
    reason: str | None = None
    message: str = ""


class Exchange:
    """A call under way. connection: None once it is of no more use to this call."""

    __slots__ = (
        "call", "connection", "end", "last_ns", "number",
        "partial", "queued", "response", "urgent", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, call: Call) -> None:
        self.number = number
        self.call = call
        self.urgent = call.watches_tokens
        self.connection: Connection | None = None
        self.partial = False  # the kernel did not take the whole request at once
        self.response = Response()
        self.last_ns = 0  # the latest stamp: of the write, then of what was read
        self.waiting: deque[tuple[int, bytes]] = deque()  # stamped pieces of the body, not taken in yet
        self.queued = False
        self.end: End | None = None


class Digestion:
    """What has been read and not been taken in, of all exchanges. step() takes in one piece: some 5 us when
    it is one of many, several times as much when the processor has just done something else. So pieces of
    answers that go on are left until the next tick.

    ready: step() is worth while. overdue: it must go on, whatever else there is to do."""

    def __init__(self) -> None:
        self.ready = False
        self.overdue = False
        self.waiting_bytes = 0
        self._ended: deque[Exchange] = deque()
        self._open: deque[Exchange] = deque()

    def add(self, exchange: Exchange, stamp_ns: int, piece: bytes) -> None:
        exchange.waiting.append((stamp_ns, piece))
        self.waiting_bytes += len(piece)
        if not exchange.queued:
            exchange.queued = True
            self._open.append(exchange)

    def add_end(self, exchange: Exchange, end: End) -> None:
        exchange.end = end
        self._ended.append(exchange)
        self.ready = True

    def tick(self, now_ns: int) -> None:
        """Call it several times a second."""
        self.ready = bool(self._ended or self._open)
        since_ns = now_ns
        if self._ended and (end := self._ended[0].end) is not None:
            since_ns = end.at_ns
        if self._open and self._open[0].waiting:
            since_ns = min(since_ns, self._open[0].waiting[0][0])
        self.overdue = self.waiting_bytes > MAX_WAITING_BYTES or since_ns < now_ns - MAX_WAIT_NS

    def step(self) -> Exchange | None:
        """Take in one piece; the exchange, if its call has its verdict now. Only when ready."""
        queue = self._ended or self._open
        exchange = queue[0]
        if exchange.waiting:
            self._piece(exchange)
            if exchange.waiting:
                return None
        queue.popleft()
        if not self._ended and not self._open:
            self.ready = self.overdue = False
        if queue is self._open:
            exchange.queued = False
            if exchange.end is not None:  # stands among the ended ones, too
                return None
        return self._conclude(exchange)

    def flush(self, exchange: Exchange) -> Exchange | None:
        """Take in all that waits of one exchange; the exchange, if its call has its verdict now."""
        while exchange.waiting:
            self._piece(exchange)
        return self._conclude(exchange)

    def _piece(self, exchange: Exchange) -> None:
        stamp_ns, piece = exchange.waiting.popleft()
        self.waiting_bytes -= len(piece)
        if not exchange.call.on_data(stamp_ns, piece):
            self.waiting_bytes -= sum(len(piece) for _, piece in exchange.waiting)
            exchange.waiting.clear()

    def _conclude(self, exchange: Exchange) -> Exchange | None:
        call, end = exchange.call, exchange.end
        if end is not None:
            if end.reason is None:
                call.finish(end.at_ns)
            else:
                call.broke(end.at_ns, end.reason, end.message)
        return None if call.verdict is None else exchange
