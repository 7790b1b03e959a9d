"""The server: a list of what lies below a folder, reports on request, live progress as server-sent events.

It reads and never writes. It listens on loopback unless told otherwise and answers only to its own names (a
web page must not reach it through a name that points to 127.0.0.1). Things are addressed by ids that the
index made, never by paths."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from harness.dashboard.page import DashboardError, render
from harness.dashboard.serve.index import Index, Item
from workloads.page import frame

FRESH_S = 1.0
"""A scan is as good for everybody who asks within that time."""
LIVE_S = 1.0
KEPT_PAGES = 8
MAX_COMPARED = 12
LOG_LINES = 40
NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "SAMEORIGIN",
    "Cache-Control": "no-cache",
}


class ServeError(Exception):
    """The server cannot start. The message is one line."""


def serve(root: Path, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Until Ctrl-C. on_ready is told the address. Raises ServeError."""
    logging.getLogger("aiohttp.server").addFilter(is_ours)
    app = make_app(root, None if not _is_loopback(host) else NAMES | {host})
    listener = _listen(host, port)
    bound = listener.getsockname()
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{bound[1]}/")
    web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=1.0)


def is_ours(record: logging.LogRecord) -> bool:
    """Whether a fault is worth a traceback: what is not HTTP is answered with a 400, and is none of ours."""
    fault = record.exc_info[1] if record.exc_info else None
    return not isinstance(fault, HttpProcessingError | web.RequestPayloadError)


def make_app(root: Path, names: frozenset[str] | None = NAMES) -> web.Application:
    """names: what the Host header may say; None: anything. Raises ServeError."""
    if not root.is_dir():
        raise ServeError(f"--serve {root}: is not a folder")
    site = Site(root)

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        for header in ("Host", "Origin"):
            value = request.headers.get(header)
            if names is not None and value is not None and _host_name(value, header) not in names:
                return web.Response(
                    status=403, text=f"{header}: not a name of this server\n", headers=HEADERS
                )
        response = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", site.home)
    app.router.add_get("/items", site.items)
    app.router.add_get("/run/{id:[0-9a-f]{16}}", site.show)
    app.router.add_get("/report/{id:[0-9a-f]{16}}", site.report)
    app.router.add_get("/live/{id:[0-9a-f]{16}}", site.live)
    app.router.add_get("/compare", site.compare)
    return app


class Site:
    """The handlers, over one index."""

    def __init__(self, root: Path) -> None:
        self._index = Index(root)
        self._given = root
        self._lock = asyncio.Lock()
        self._scanned: tuple[float, list[Item]] | None = None
        self._pages: OrderedDict[tuple[Any, ...], str] = OrderedDict()

    async def home(self, request: web.Request) -> web.Response:
        return _html(_page("list.html.j2", title="Runs", root=str(self._given), script=_text("list.js")))

    async def items(self, request: web.Request) -> web.StreamResponse:
        """All items as JSON; 304 when nothing has changed since the caller's ETag."""
        items = await self._scan()
        body = await asyncio.to_thread(lambda: json.dumps([_short(item) for item in items]).encode())
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        response = web.Response(body=body, content_type="application/json", headers={"ETag": tag})
        response.enable_compression()
        return response

    async def show(self, request: web.Request) -> web.StreamResponse:
        """The report of a run that has ended, progress of one that runs, the reason of a broken one."""
        item = await self._item(request)
        if item.state == "running":
            page = _page("live.html.j2", title=item.name, item=item, script=_text("live.js"))
            return _html(page)
        if item.state == "broken":
            return _html(self._broken(item, item.note), status=200)
        return await self.report(request)

    async def report(self, request: web.Request) -> web.StreamResponse:
        """report.html as it lies there, or made now."""
        item = await self._item(request)
        path = self._index.path(item.id)
        assert path is not None
        report = path / "report.html"
        if report.is_file() and not report.is_symlink():
            return web.FileResponse(report)
        runs = [item.id] if item.kind == "run" else list(item.runs)
        return await self._rendered(runs, item)

    async def compare(self, request: web.Request) -> web.StreamResponse:
        """?run=ID&run=ID: one page for several runs, the first as the reference."""
        await self._scan()
        ids = list(dict.fromkeys(request.query.getall("run", [])))
        if not 1 <= len(ids) <= MAX_COMPARED or any(self._index.path(id) is None for id in ids):
            raise web.HTTPBadRequest(text=f"compare: needs 1 to {MAX_COMPARED} runs of the list\n")
        return await self._rendered(ids, self._index.items[ids[0]])

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: progress once a second, and `done` once the run has a summary or is broken."""
        item = await self._item(request)
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        progress = self._index.progress(item.id)
        try:
            while True:
                figures = await asyncio.to_thread(progress.poll)
                await response.write(f"data: {json.dumps(figures)}\n\n".encode())
                found = await asyncio.to_thread(self._index.look, item.id)
                if found is None or found.state != "running":
                    state = {"state": found.state, "note": found.note} if found else {"state": "broken"}
                    await response.write(f"event: done\ndata: {json.dumps(state)}\n\n".encode())
                    return response
                await asyncio.sleep(LIVE_S)
        except (ConnectionResetError, asyncio.CancelledError):
            return response

    async def _scan(self) -> list[Item]:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._scanned is None or now - self._scanned[0] > FRESH_S:
                items = await asyncio.to_thread(self._index.scan)
                self._scanned = (asyncio.get_running_loop().time(), items)
            return self._scanned[1]

    async def _item(self, request: web.Request) -> Item:
        """What the address names, as it is now."""
        id = request.match_info["id"]
        if self._index.path(id) is None:
            await self._scan()
        item = await asyncio.to_thread(self._index.look, id)
        if item is None:
            raise web.HTTPNotFound(text="no such run (it may have been removed); the list is at /\n")
        return item

    async def _rendered(self, ids: list[str], item: Item) -> web.Response:
        """A page made now; the last few are kept for as long as their summaries do not change."""
        paths = [path for path in map(self._index.path, ids) if path is not None]
        try:
            key = tuple((str(path), _changed(path)) for path in paths)
            if key not in self._pages:
                self._pages[key] = await asyncio.to_thread(render, paths)
                while len(self._pages) > KEPT_PAGES:
                    self._pages.popitem(last=False)
            return _html(self._pages[key])
        except DashboardError as error:
            return _html(self._broken(item, str(error)), status=422)
        except Exception as error:  # another version's records, or damaged ones: a reason, never a traceback
            reason = f"cannot be shown: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return _html(self._broken(item, reason), status=422)

    def _broken(self, item: Item, reason: str) -> str:
        path = self._index.path(item.id)
        files = sorted(p.name for p in path.iterdir()) if path is not None and path.is_dir() else []
        log = ""
        if path is not None and (path / "server.log").is_file():
            with open(path / "server.log", "rb") as stream:
                stream.seek(max(0, (path / "server.log").stat().st_size - 20_000))
                log = "\n".join(stream.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:])
        shown = [name.encode("utf-8", "replace").decode() for name in files]
        return _page("broken.html.j2", title=item.name, item=item, reason=reason, files=shown, log=log)


def _page(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    env = Environment(loader=PackageLoader("harness.dashboard.serve", "."), autoescape=True)
    values["css"] = Markup(frame.style() + _text("serve.css"))
    values["theme"] = Markup(_text("theme.js"))
    values["script"] = Markup(values.get("script", ""))
    return env.get_template(template).render(**values)


def _text(name: str) -> str:
    return (resources.files("harness.dashboard.serve") / name).read_text(encoding="utf-8")


def _html(text: str, status: int = 200) -> web.Response:
    body = text.encode("utf-8", "replace")  # half a surrogate pair in a record is no reason to show nothing
    return web.Response(body=body, content_type="text/html", charset="utf-8", status=status)


def _short(item: Item) -> dict[str, Any]:
    """Without what is empty: thousands of them go over the wire."""
    return {key: value for key, value in asdict(item).items() if value not in ("", None, ())}


def _changed(path: Path) -> int:
    file = path / "summary.json"
    return file.stat().st_mtime_ns if file.is_file() else 0


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # the resolver takes others modulo 65536, or for a service's name
        raise ServeError(f"--port {port}: needs 0 (a free one) to 65535")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        why = getattr(error, "strerror", None) or error
        raise ServeError(
            f"--host {host} --port {port}: cannot listen ({why}); --port 0 picks a free one"
        ) from None
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(value: str, header: str) -> str | None:
    try:
        return urlsplit(f"//{value}" if header == "Host" else value).hostname
    except ValueError:
        return None
