"""The script server in a process of its own, for tests that compare times: what it does costs the client's
interpreter nothing, and it can be stopped or killed like any server.

Parent and child speak pickle over the child's standard input and output: both are this test suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.script_server import Rule, Script, ScriptServer, Seen

ROOT = Path(__file__).resolve().parents[2]
SETTLE_S = 5.0
"""How long the log waits for connections to close: hang-ups are seen a moment after they happened."""


@dataclass(frozen=True)
class Truth:
    """The server's log: what was asked, in order of arrival, and what it did. peak: most requests under way
    at once."""

    seen: list[Seen]
    gets: list[str]
    peak: int
    connections: int

    def by_id(self, request_id: str) -> Seen:
        (found,) = (s for s in self.seen if s.body["batchmark"]["id"] == request_id)
        return found


class ScriptProcess:
    """Use as a context manager. play() gives it a script and empties its log; truth() is the log."""

    def __enter__(self) -> ScriptProcess:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.support.script_process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout
        self.port: int = _read(self._from)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._from.close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def play(self, script: Rule | Script) -> None:
        """script: a Script, or a rule of script_server (a function of a test cannot be sent)."""
        assert self._ask("play", script) == "playing"

    def truth(self) -> Truth:
        """The log, once every connection has closed."""
        truth = self._ask("truth", None)
        assert isinstance(truth, Truth)
        return truth

    def _ask(self, what: str, value: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # the reading says so too
            _write(self._to, (what, value))
        return _read(self._from)


def serve() -> None:
    """The child: until standard input closes."""
    gc.disable()
    asyncio.run(_serve())


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin.buffer)
    async with ScriptServer(Script([])) as server:
        _write(sys.stdout.buffer, server.port)
        while True:
            try:
                (size,) = struct.unpack("!I", await commands.readexactly(4))
                what, value = pickle.loads(await commands.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            if what == "play":
                server.play(value)
                _write(sys.stdout.buffer, "playing")
            else:
                deadline = time.monotonic() + SETTLE_S
                while server.open_connections and time.monotonic() < deadline:
                    await asyncio.sleep(0.005)
                truth = Truth(server.seen, server.gets, server.peak, server.connections)
                _write(sys.stdout.buffer, truth)


def _write(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("!I", len(data)) + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    head = pipe.read(4)
    assert len(head) == 4, "the script server has ended"
    (size,) = struct.unpack("!I", head)
    return pickle.loads(pipe.read(size))
