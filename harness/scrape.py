"""The server's own /metrics during the load, twice a second, into server_metrics.jsonl.

The load is never disturbed: one small request at a time from a thread of this process, given up after 0.4 s,
never repeated at once; each failure doubles the pause (8 s at most), and after FAILURES in a row it stops and
says so. A row is `t_ns` (when it was asked), `took_ms`, `error` (null, or why there are no figures), and with
figures `dialect` and prometheus.FIGURES.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.conf import UsageError
from harness.prometheus import FIGURES, MetricsError, Reading, parse
from harness.sampler import Sampler

PERIOD_NS = 500_000_000
TIMEOUT_S = 0.4
MAX_BYTES = 4 << 20
"""A server with hundreds of models shows less than 1 MiB."""
FAILURES = 12
"""In a row, with growing pauses: more than a minute, so a server that is only overloaded is asked again."""
MAX_PAUSE = 4  # doublings


def metrics_endpoint(
    engine: Mapping[str, Any], root_url: str, api_key: str | None
) -> tuple[str | None, str | None]:
    """(address to scrape, key to send with it) of a configuration's `engine` part.

    engine.metrics_url: an address, null for none, or auto: root_url + /metrics. The key goes to the server
    that it is for; an address on another host gets none. Raises UsageError.
    """
    setting = engine.get("metrics_url", "auto")
    if setting is None:
        return None, None
    root = urlsplit(root_url)
    if setting == "auto":
        return f"{root_url.rstrip('/')}/metrics", api_key
    wanted = "an address such as http://127.0.0.1:8000/metrics, auto, or null"
    if "@" in str(setting):
        raise UsageError("engine.metrics_url: must hold no password; needs " + wanted)
    try:
        url = urlsplit(str(setting))
        odd = url.scheme not in ("http", "https") or not url.hostname or url.port == 0
        odd = odd or re.search(r"[^\x21-\x7e]", str(setting)) is not None
    except ValueError:
        odd = True
    if odd:
        raise UsageError(f"engine.metrics_url={setting}: needs {wanted}")
    same = (url.hostname, url.scheme) == (root.hostname, root.scheme)
    return str(setting), api_key if same else None


class Scraper(Sampler):
    """url None: there is nothing to scrape, and every figure is null for that reason."""

    name = "server_metrics"
    edges = True

    def __init__(self, path: Path, url: str | None, api_key: str | None = None, *, t0_ns: int) -> None:
        super().__init__(path, t0_ns=t0_ns)
        self.period_ns = PERIOD_NS
        self.dialect: str | None = None
        self.failures: Counter[str] = Counter()
        self._url = url
        self._api_key = api_key
        self._connection: socket.socket | None = None
        self._seen: set[str] = set()  # figures that had a value
        self._names: tuple[str, ...] = ()
        self._failed = 0  # in a row
        self._pause_ns = -(1 << 62)  # no request before this moment, counted from t0; the first is before t0
        self._tls: ssl.SSLContext | None = None

    def open(self) -> bool:
        if self._url is None:
            self.reasons.update(dict.fromkeys(FIGURES, "engine.metrics_url=null"))
            return False
        import prometheus_client.parser  # noqa: F401  (before the load)

        return True

    def sample(self, t_ns: int) -> dict[str, Any] | None:
        if self._failed >= FAILURES or (t_ns < self._pause_ns and not self.ending):
            return None
        begin = time.monotonic()
        try:
            reading = parse(self._fetch(begin + TIMEOUT_S))
        except MetricsError as error:
            return {"took_ms": _ms(begin), "error": self._fail(str(error), t_ns)}
        self._failed = 0
        self._note(reading)
        return {"took_ms": _ms(begin), "error": None, "dialect": reading.dialect, **reading.values}

    def _fail(self, reason: str, t_ns: int) -> str:
        self._failed += 1
        self._pause_ns = t_ns + (self.period_ns << min(self._failed, MAX_PAUSE)) - self.period_ns // 2
        self.failures[reason if len(self.failures) < 20 else "others"] += 1
        for figure in FIGURES:
            if figure not in self._seen:
                self.reasons[figure] = reason
        if self._failed >= FAILURES:
            self.reasons[self.name] = f"gave up at {t_ns / 1e9:.0f} s after {FAILURES} failures: {reason}"
        return reason

    def _note(self, reading: Reading) -> None:
        self.dialect, self._names = reading.dialect or self.dialect, reading.names
        for figure, value in reading.values.items():
            if value is not None:
                self._seen.add(figure)
                self.reasons.pop(figure, None)
            elif figure not in self._seen:
                self.reasons[figure] = reading.reasons[figure]

    def meta(self) -> dict[str, Any]:
        return {
            **super().meta(),
            "dialect": self.dialect,
            "failures": dict(self.failures),
            "unknown_names": list(self._names),
        }

    def interrupt(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _fetch(self, deadline: float) -> bytes:
        """The body of one GET, over a connection of its own. Raises MetricsError."""
        assert self._url is not None
        try:
            with self._connect(deadline) as self._connection:
                self._connection.sendall(_request(self._url, self._api_key))
                response = http.client.HTTPResponse(_Timed(self._connection, deadline))  # type: ignore[arg-type]
                response.begin()
                return _body(response)
        except TimeoutError:
            raise MetricsError(f"no answer within {TIMEOUT_S} s") from None
        except ConnectionRefusedError:
            raise MetricsError("connection refused") from None
        except socket.gaierror:
            raise MetricsError("the host's name cannot be resolved") from None
        except ssl.SSLError as error:
            raise MetricsError(f"TLS: {error.reason or 'failed'}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MetricsError):
                raise
            what = error.strerror if isinstance(error, OSError) else None
            raise MetricsError(
                f"the answer broke off or is not HTTP ({what or type(error).__name__})"
            ) from None
        finally:
            self._connection = None

    def _connect(self, deadline: float) -> socket.socket:
        url = urlsplit(self._url or "")
        port = url.port or (443 if url.scheme == "https" else 80)
        plain = socket.create_connection((url.hostname or "", port), timeout=TIMEOUT_S)
        if url.scheme != "https":
            return plain
        try:
            self._tls = self._tls or ssl.create_default_context()
            plain.settimeout(max(0.001, deadline - time.monotonic()))
            return self._tls.wrap_socket(plain, server_hostname=url.hostname)
        except BaseException:
            plain.close()
            raise


def _request(url: str, api_key: str | None) -> bytes:
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"GET {path} HTTP/1.1", f"Host: {parts.netloc}", "Accept: text/plain;version=0.0.4"]
    lines += ["Accept-Encoding: identity", "Connection: close"]
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise MetricsError("the API key has characters that no header can hold")
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode()


def _body(response: http.client.HTTPResponse) -> bytes:
    """At most MAX_BYTES, and whole. Raises MetricsError."""
    if response.status != 200:
        raise MetricsError(f"HTTP {response.status}")
    if (response.length or 0) > MAX_BYTES:
        raise MetricsError(f"more than {MAX_BYTES} bytes")
    framed = response.chunked or response.length is not None
    body = response.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise MetricsError(f"more than {MAX_BYTES} bytes")
    # The end of the connection alone does not tell a whole answer from one that was cut off.
    if response.length or not (framed or body.endswith(b"\n")):
        raise MetricsError("the answer was cut off")
    return body


class _Timed(io.RawIOBase):
    """A socket for HTTPResponse whose reads all end by one moment: also when a byte comes now and then."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _ms(begin: float) -> float:
    return round(1e3 * (time.monotonic() - begin), 1)
