"""The response to a WebSocket handshake: 101 and then frames, or a plain response that refuses it."""

from __future__ import annotations

from harness.loadgen import websocket
from harness.loadgen.lean.http1 import HTTPError, Response


class Upgrade(Response):
    """To the loop a Response like any other, which also has something to send: `replies`, the request once
    the server has switched, then pongs and the answer to its close. The connection serves nobody else."""

    __slots__ = ("_frames", "_key", "_request", "broken", "replies")

    def __init__(self, key: str, request: bytes) -> None:
        """key: of the handshake. request: the one message."""
        super().__init__()
        self._key = key
        self._request = request
        self._frames: websocket.Frames | None = None
        self.replies = b""
        self.broken: tuple[str, str] | None = None

    def feed(self, data: bytes) -> bytes:
        frames = self._frames
        if frames is None:
            return super().feed(data)
        body = frames.feed(data)
        if self.status is None:
            self.status, self.content_type = frames.status, frames.content_type
        if frames.replies:
            self.replies += frames.replies
            frames.replies = b""
        self.ended, self.broken = frames.ended, frames.broken
        return body

    def eof(self) -> bool:
        return self.ended if self._frames is not None else super().eof()

    def _switch(self, fields: dict[bytes, bytes]) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields.items()}
        fault = websocket.refused(self._key, headers)
        if fault is not None:
            raise HTTPError(fault)
        self._frames, self.keep_alive = websocket.Frames(), False
        self.replies = websocket.frame(self._request)  # only now: nothing is masked while a send is due
        self._request = b""
