"""A server that somebody else runs: is it there, and what does it call its model?"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from harness.conf import UsageError
from harness.loadgen import websocket

PROBE_TIMEOUT_S = 5.0
MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """What /v1/models said. root: the address without /v1. max_model_len: null where the list lacks it."""

    root: str
    model: str
    max_model_len: int | None


def api_key(engine: Mapping[str, Any]) -> str | None:
    """The key in the environment variable that engine.api_key_env names. Raises UsageError if unset."""
    name = engine.get("api_key_env")
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UsageError(f"engine.api_key_env={name}: this environment variable is not set")
    return key


def probe(engine: Mapping[str, Any]) -> ForeignServer:
    """Ask for the list of models. Raises UsageError in one line: what is wrong with the address."""
    url = str(engine["base_url"]).rstrip("/")
    root = url.removesuffix("/v1")
    where = f"engine.base_url={engine['base_url']}"
    wanted = engine.get("model")
    request = urllib.request.Request(f"{root}/v1/models", headers={"Accept": "application/json"})
    key = api_key(engine)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy, whatever the environment says: the load goes straight to the server, so the probe does too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PROBE_TIMEOUT_S) as response:
            listed = json.loads(_read(response))["data"]
        models = {str(entry["id"]): entry for entry in listed}
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            hint = "name the variable that holds the key with engine.api_key_env"
            raise UsageError(f"{where}: the server wants a key (HTTP {error.code}); {hint}") from None
        if error.code == 404 and wanted:
            return ForeignServer(root, str(wanted), None)
        hint = "is it OpenAI-compatible? if it only lacks the list, set engine.model"
        raise UsageError(f"{where}: /v1/models answers HTTP {error.code}; {hint}") from None
    except TimeoutError:
        raise UsageError(f"{where}: no answer within {PROBE_TIMEOUT_S:.0f} s; is the server up?") from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: {_reason(error)}") from None
    if wanted is None and not models:
        raise UsageError(f"{where}: the server lists no model; set engine.model")
    model = str(wanted) if wanted is not None else next(iter(models))
    limit = models.get(model, {}).get("max_model_len")
    return ForeignServer(root, model, limit if isinstance(limit, int) and limit > 0 else None)


def takes_websockets(root: str, path: str, key: str | None) -> bool:
    """Whether a handshake (RFC 6455) at root/path/ws is answered with an upgrade. The connection is closed
    right after it, before anything is asked."""
    url = urlsplit(f"{root}/{path}{websocket.SUFFIX}")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    ours = websocket.new_key()
    headers = {**websocket.HEADERS, websocket.KEY: ours}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        with contextlib.closing(kind(url.hostname or "", url.port, timeout=PROBE_TIMEOUT_S)) as connection:
            connection.request("GET", url.path, headers=headers)
            response = connection.getresponse()
            answered = {name.lower(): value for name, value in response.getheaders()}
            return response.status == 101 and websocket.refused(ours, answered) is None
    except (OSError, http.client.HTTPException, ValueError):
        return False  # whatever it is, no upgrade


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, of 1 MiB at most. The timeout of a socket is one of each read: a body that drips needs its
    own. Raises TimeoutError."""
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    body = b""
    while len(body) < MAX_LIST_BYTES and (piece := response.read1(MAX_LIST_BYTES - len(body))):
        body += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    return body


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {PROBE_TIMEOUT_S:.0f} s; is the server up?"
    if isinstance(cause, ConnectionRefusedError):
        return "nobody answers there (connection refused); start the server or mend the address"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}); "
            "SSL_CERT_FILE names a file with the one to trust"
        )
    if isinstance(cause, ssl.SSLError):
        return f"no TLS is spoken there ({cause.reason or cause}); is it http://?"
    if isinstance(cause, OSError):
        return f"nobody answers there ({cause.strerror or cause}); start the server or mend the address"
    return "the answer of /v1/models is not a list of models; is the server OpenAI-compatible?"
