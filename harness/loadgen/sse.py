"""Server-sent events, parsed piece by piece: whatever the network's borders, the events come out the same.

Source: WHATWG HTML Living Standard, 9.2.6 "Interpreting an event stream": lines end with CR, LF or CRLF; a
first byte order mark is skipped; a line that begins with a colon is a comment; data lines of one event are
joined by LF; an event that has no blank line after it is not an event.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_EVENT_BYTES = 16 * 1024 * 1024
BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    event: str  # "message" when the stream names none
    data: bytes  # the data lines joined by LF; UTF-8, not decoded


class SSEError(ValueError):
    """The stream holds an event that is larger than the parser is allowed to keep."""

    def __init__(self, message: str, before: list[Event]) -> None:
        super().__init__(message)
        self.before = before  # the events that the same piece completed before it


class SSEParser:
    """Feed it bytes as they come; it keeps at most one unfinished event of max_event_bytes."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest: list[bytes] = []  # the pieces of an unfinished line
        self._held = 0  # their size
        self._between = True  # the last event has ended, no byte of another one has come
        self._start = True  # nothing consumed yet: a byte order mark may come
        self._skip_lf = False  # the last piece ended with CR: an LF that follows belongs to it
        self._event = ""
        self._data: list[bytes] = []
        self._size = 0

    def whole(self, piece: bytes) -> list[bytes] | None:
        """A shortcut for the usual piece: whole events of one data line each, with LF, nothing pending from
        before. Their data, as feed() would give it; None: the piece is of another kind, feed() it."""
        if not self._between or piece[-2:] != b"\n\n" or b"\r" in piece or len(piece) > self._max:
            return None
        if piece.find(b"\n") == len(piece) - 2:  # one event
            if piece[:6] != b"data: ":
                return None
            self._start = False
            return [piece[6:-2]]
        events = piece[:-2].split(b"\n\n")
        for event in events:
            if event[:6] != b"data: " or b"\n" in event:
                return None
        self._start = False
        return [event[6:] for event in events]

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes. Raises SSEError; the parser is of no use after that."""
        self._between = False
        if self._skip_lf and piece:
            self._skip_lf = False
            if piece[0] == 0x0A:
                piece = piece[1:]
        self._held += len(piece)
        self._rest.append(piece)
        events: list[Event] = []
        if not self._start and b"\n" not in piece and b"\r" not in piece:
            self._check(self._held, events)
            return events
        text = b"".join(self._rest)
        if self._start:
            if len(text) < len(BOM) and BOM.startswith(text):
                return []
            self._start = False
            text = text.removeprefix(BOM)
        if b"\r" in text:
            self._skip_lf = text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest, self._held = [rest], len(rest)
        for line in lines:
            self._check(len(line), events)
            self._line(line, events)
        self._check(self._held, events)
        self._between = not (rest or self._skip_lf or self._data or self._event)
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                name = self._event or "message"
                events.append(Event(name, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)))
            self._event, self._data, self._size = "", [], 0
            return
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            self._size += len(value) + 1
            self._data.append(value)
        elif field == b"event":
            self._event = value.decode("utf-8", "replace")
        # An empty field is a comment; id and retry are for clients that reconnect, a measured request never
        # does.

    def _check(self, line_bytes: int, events: list[Event]) -> None:
        """Of a line, or of what has come of it: together with the event's data it must not be too large."""
        if self._size + line_bytes > self._max:
            raise SSEError(f"an event of the stream is larger than {self._max} bytes", events)
