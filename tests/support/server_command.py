"""Runs `python -m engines.server` with the tiny model, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0


class Process:
    """A server process; `line` is its first line on standard output."""

    def __init__(
        self,
        *args: str,
        stdin: int | None = subprocess.PIPE,
        env: dict[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.ended: tuple[int, str] | None = None
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "engines.server", *args],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=start_new_session,
        )

    def line(self) -> dict[str, Any]:
        found: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: found.put(self.popen.stdout.readline()), daemon=True).start()
        return json.loads(found.get(timeout=PATIENCE_S))

    def end(self) -> tuple[int, str]:
        """Close standard input; exit code and standard error."""
        if self.ended is None:
            stdin, stdout, stderr = self.popen.stdin, self.popen.stdout, self.popen.stderr
            if stdin is not None:
                stdin.close()
            code = self.popen.wait(PATIENCE_S)
            self.ended = code, stderr.read()
            stdout.close()
            stderr.close()
        return self.ended

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.end()


@contextlib.contextmanager
def process(*args: str, **more: Any) -> Iterator[Process]:
    started = Process(*args, **more)
    try:
        yield started
    finally:
        started.kill()


@contextlib.contextmanager
def streaming(started: Process) -> Iterator[tuple[dict[str, Any], socket.socket]]:
    """The ready line, and the connection of an answer that is on its way."""
    ready = started.line()
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", ready["port"]), PATIENCE_S) as client:
        client.sendall((head + body).encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        yield ready, client


def rest_of(client: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := client.recv(65536):
            found += more
    return found
