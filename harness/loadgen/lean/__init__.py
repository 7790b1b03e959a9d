"""The lean backend: one epoll loop, an HTTP/1.1 of its own, the kernel's receive stamps, a timerfd.

Why it is built so is in docs/architecture.md ("The lean loop"). It needs Linux and speaks plain HTTP to the
server itself: TLS, proxies and redirects are aiohttp's."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from harness.loadgen import websocket
from harness.loadgen.lean import sockets
from harness.loadgen.lean.http1 import request_head
from harness.loadgen.lean.timer import timerfd_unavailable
from harness.loadgen.settings import BackendReport, LoadError, Target

if TYPE_CHECKING:
    from harness.loadgen.run import Load


def run_lean(load: Load) -> BackendReport:
    """Drive the load until it is through or stopped. LoadError: the target cannot be put into an HTTP
    head."""
    from harness.loadgen.lean.loop import Loop

    url = urlsplit(load.target.root_url)
    head, handshake = _heads(load, url)
    try:
        addresses = sockets.resolve(url.hostname or "", url.port or 80)
    except OSError:
        addresses = []  # every request will say so
    loop = Loop(load, addresses, head, handshake)
    try:
        return loop.run()
    finally:
        loop.close()


def lean_unavailable(target: Target) -> str | None:
    """Why this backend cannot be used here for this target, as part of a sentence; None: it can."""
    url = urlsplit(target.root_url)
    if url.scheme != "http":
        return f"{url.scheme} needs TLS"
    if url.username is not None:
        return "the URL has a user name in it"
    if not hasattr(select, "epoll"):
        return "this system has no epoll"
    return timerfd_unavailable() or sockets.stamps_unavailable()


def _heads(load: Load, url: SplitResult) -> tuple[bytes, bytes]:
    """Of a POST up to the number after Content-Length, of a WebSocket's handshake up to its key."""
    headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
    if load.target.api_key:
        headers["Authorization"] = f"Bearer {load.target.api_key}"
    name = url.hostname or ""
    host = f"[{name}]" if ":" in name else name.encode("idna").decode("ascii")
    if url.port not in (None, 80):
        host = f"{host}:{url.port}"
    path = f"{url.path.rstrip('/')}{load.path}"
    try:
        return (
            request_head("POST", path, host, {"Content-Type": "application/json", **headers}),
            request_head("GET", path + websocket.SUFFIX, host, headers | websocket.HEADERS, websocket.KEY),
        )
    except ValueError as exc:
        raise LoadError(f"engine.base_url, engine.api_key_env: {exc}") from exc
