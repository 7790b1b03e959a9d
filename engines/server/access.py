"""Who may talk to this server: the Host header, the origin of a web page, the API key."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from engines.server.errors import ApiError, shown


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_names(host: str) -> frozenset[str] | None:
    """The names that a server on `host` answers to; None: any, since it was told to listen for others."""
    return frozenset({"localhost", "127.0.0.1", "::1", host}) if is_loopback(host) else None


def check_host(request: web.Request, names: frozenset[str] | None) -> None:
    """A web page must not reach a local server through a name that its owner points to 127.0.0.1 (DNS
    rebinding), nor by a cross-site request, which carries an Origin. Raises ApiError(403)."""
    if names is None:
        return
    for header in ("Host", "Origin"):
        value = request.headers.get(header)
        if value is not None and _host_name(value, header) not in names:
            raise ApiError(
                f"{header}: {shown(value)} is not a local name: needs {', '.join(sorted(names))}; "
                "server.host=0.0.0.0 listens for others",
                403,
            )


def check_same_origin(request: web.Request) -> None:
    """Browsers let any page open a WebSocket to any server and read what it says, so a page may do it here
    only from the name that it was itself loaded from, wherever this server listens. Raises ApiError(403)."""
    origin = request.headers.get("Origin")
    host = request.headers.get("Host", "")
    if origin is not None and _host_name(origin, "Origin") != _host_name(host, "Host"):
        raise ApiError(f"Origin: {shown(origin)} is not the Host {shown(host)}: no page of another site", 403)


def check_key(request: web.Request, key: str | None) -> None:
    """Raises ApiError(401). Probes of /health need no key."""
    if key is None or request.path == "/health":
        return
    sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(sent, f"Bearer {key}".encode()):
        raise ApiError('Authorization: needs "Bearer " and this server\'s key', 401, code="invalid_api_key")


def _host_name(value: str, header: str) -> str | None:
    try:
        return urlsplit(f"//{value}" if header == "Host" else value).hostname
    except ValueError:
        return None
