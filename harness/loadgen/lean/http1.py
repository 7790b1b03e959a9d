"""HTTP/1.1 as a client of one request needs it: the request's head, and a response parsed piece by piece.

Sources: RFC 9112 (message framing, sections 4-7), RFC 9110 section 15.2 (1xx). The parser keeps no body: a
piece goes in, the body's bytes that it brought come out, so whoever stamps a read can stamp what it brought.
The case that counts, one read that is whole chunks, costs a search, a number and a slice per chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 4 * 1024
"""Of a chunk's size with its extensions, and of a trailer."""
_HEX = frozenset(b"0123456789abcdefABCDEF")
_BLANK = b" \t"


class HTTPError(ValueError):
    """What came is not an HTTP/1.x response. The message is one line."""


def request_head(
    method: str, path: str, host: str, headers: Mapping[str, str], last: str = "Content-Length"
) -> bytes:
    """The head of a request up to the value of its last header. Of Content-Length append
    `b"%d\\r\\n\\r\\n" % len(body)` and the body. Raises ValueError for a
    header that would break the framing."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{k}: {v}" for k, v in headers.items())]
    for line in lines:
        if any(ord(char) < 32 or ord(char) == 127 for char in line):
            raise ValueError(f"control characters in a header: {line.partition(':')[0]!r}")
    return ("\r\n".join(lines) + f"\r\n{last}: ").encode("latin-1")


class Response:
    """One response. feed() takes what was read and returns what it brought of the body.

    status is None until the final head is complete (1xx heads are skipped), ended is true once the body is
    whole. keep_alive: the connection may serve another request after the end; a server that sends more than
    its body may not.
    """

    __slots__ = ("_buffer", "_left", "_state", "content_type", "ended", "keep_alive", "status")
    replies = b""  # what is to be sent back, and
    broken: tuple[str, str] | None = None  # why it ended, if not well: of a WebSocket alone

    def __init__(self) -> None:
        self.status: int | None = None
        self.content_type = ""
        self.keep_alive = True
        self.ended = False
        self._state = _HEAD
        self._left = 0  # bytes of the body, or of the chunk with its CRLF, that are still to come
        self._buffer = b""  # an unfinished head, or line between chunks

    def feed(self, data: bytes) -> bytes:
        """Raises HTTPError; the parser is of no use after that. Bytes after the end are dropped."""
        if self._state is _CHUNKED and not self._buffer:
            # Whole chunks that begin and end with this read, the last one excepted.
            if self._left == 0:
                end = data.find(b"\r\n", 0, 16)
                if end > 0:
                    size = _chunk_size(data[:end])
                    if size and len(data) == end + size + 4:
                        if data[-2:] != b"\r\n":
                            raise HTTPError("a chunk does not end where it says")
                        return data[end + 2 : -2]
            return self._chunks(data)
        if self._state is _HEAD:
            rest = self._head(data)
            return self.feed(rest) if rest else b""
        if self._state is _CHUNKED:
            return self._chunks(data)
        if self._state is _LENGTH:
            piece = data[: self._left]
            self._left -= len(piece)
            if self._left == 0:
                self._end(data[len(piece) :])
            return piece
        if self._state is _CLOSE:
            return data
        return self._surplus(data)

    def eof(self) -> bool:
        """The server has closed. True: the response is whole (its body was delimited by the close)."""
        if self.ended:
            return True
        self.keep_alive = False
        self.ended = self._state is _CLOSE
        return self.ended

    def _head(self, data: bytes) -> bytes:
        """Read heads until the final one is complete; what follows it."""
        data = self._buffer + data if self._buffer else data
        while True:
            # An empty line before a status line is forgiven (RFC 9112, 2.2).
            while data.startswith(b"\r\n"):
                data = data[2:]
            end = data.find(b"\r\n\r\n")
            if (end if end >= 0 else len(data)) > MAX_HEAD_BYTES:
                raise HTTPError(f"the response's head is larger than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                if len(data) >= 5 and not data.startswith(b"HTTP/"):
                    raise HTTPError(f"not an HTTP response: {_short(data)}")
                self._buffer = data
                return b""
            head, data = data[:end], data[end + 4 :]
            status, minor, fields = _parse_head(head)
            if status == 101:
                self._switch(fields)
                return data
            if status >= 200:
                break
        self._buffer = b""
        self._final(status, minor, fields)
        return data

    def _switch(self, fields: dict[bytes, bytes]) -> None:
        """The server goes on in another protocol."""
        raise HTTPError("the server switches protocols (101), which was not asked for")

    def _final(self, status: int, minor: int, fields: dict[bytes, bytes]) -> None:
        self.content_type = fields.get(b"content-type", b"").decode("latin-1")
        options = {option.strip().lower() for option in fields.get(b"connection", b"").split(b",")}
        self.keep_alive = b"keep-alive" in options if minor == 0 else b"close" not in options
        coding = fields.get(b"transfer-encoding")
        length = fields.get(b"content-length")
        if status in (204, 304):
            self.ended = True
        elif coding is not None:
            if coding.lower() != b"chunked":
                raise HTTPError(f"Transfer-Encoding {_short(coding)}: only chunked is understood")
            if length is not None:  # two answers to one question: not a connection to go on with
                self.keep_alive = False
            self._state = _CHUNKED
        elif length is not None:
            self._state, self._left = _LENGTH, _content_length(length)
            self.ended = self._left == 0
        else:
            self._state, self.keep_alive = _CLOSE, False
        self.status = status
        if self.ended:
            self._state = _ENDED

    def _chunks(self, data: bytes) -> bytes:
        """The general case of a chunked body: anything may be split anywhere."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        pieces = []
        at, size = 0, len(data)
        while at < size:
            if self._left > 2:  # in a chunk's data
                piece = data[at : at + self._left - 2]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
            elif self._left > 0:  # in the CRLF after it
                if data[at] != (13 if self._left == 2 else 10):
                    raise HTTPError("a chunk does not end where it says")
                at += 1
                self._left -= 1
            else:
                end = data.find(b"\r\n", at)
                if (end if end >= 0 else size) - at > MAX_LINE_BYTES:
                    raise HTTPError(f"a line between chunks is longer than {MAX_LINE_BYTES} bytes")
                if end < 0:
                    self._buffer = data[at:]
                    break
                line, at = data[at:end], end + 2
                if self._left == 0:
                    chunk = _chunk_size(line)
                    self._left = chunk + 2 if chunk else _TRAILERS
                elif not line:  # the empty line after the trailers
                    self._end(data[at:])
                    break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _end(self, rest: bytes) -> None:
        self.ended, self._state = True, _ENDED
        self._surplus(rest)

    def _surplus(self, data: bytes) -> bytes:
        if data:
            self.keep_alive = False
        return b""


_HEAD, _LENGTH, _CHUNKED, _CLOSE, _ENDED = "head", "length", "chunked", "close", "ended"
_TRAILERS = -1


def _parse_head(head: bytes) -> tuple[int, int, dict[bytes, bytes]]:
    """Status, minor version, header fields (names in lower case, values of one name joined by commas)."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or rest[3:4] not in (b"", b" "):
        raise HTTPError(f"not an HTTP/1.x status line: {_short(first)}")
    status = int(code)
    if not 100 <= status <= 599:
        raise HTTPError(f"status {status} does not exist")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip(_BLANK):
            raise HTTPError(f"not a header line: {_short(line)}")
        name, value = name.lower(), value.strip(_BLANK)
        fields[name] = fields[name] + b"," + value if name in fields else value
    return status, 0 if version == b"HTTP/1.0" else 1, fields


def _content_length(value: bytes) -> int:
    """A list of one same number is that number (RFC 9112, 6.3)."""
    numbers = {part.strip(_BLANK) for part in value.split(b",")}
    number = numbers.pop()
    if numbers or not number.isdigit() or len(number) > 15:
        raise HTTPError(f"Content-Length {_short(value)}: not a number")
    return int(number)


def _chunk_size(line: bytes) -> int:
    """The size in a chunk's first line; extensions are skipped."""
    text = line if line.isalnum() else line.partition(b";")[0].strip(_BLANK)
    if not text or len(text) > 15 or not _HEX.issuperset(text):
        raise HTTPError(f"not the size of a chunk: {_short(line)}")
    return int(text, 16)


def _short(data: bytes) -> str:
    return ascii(data[:80].decode("latin-1"))
