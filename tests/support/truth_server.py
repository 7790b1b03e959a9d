"""A fast server of known truth: C++, one thread, and it knows when every token left. Linux only.

    with TruthServer(ttft_ms=100, gap_ms=20, core=1) as server:
        ...  # a load against server.base_url; any model name will do
        truth = server.stop()
    truth.rows["received_ns"], truth.sent_of(0), truth.lateness_ns(), truth.index["r000000"]

By hand: `python -m tests.support.truth_server --port 8000 --ttft-ms 100 --gap-ms 20 --log truth.bin`
(`--help` lists the options; SIGTERM or Ctrl-C writes the log), then `read_log("truth.bin")`. It is compiled
on first use (a few seconds) into $BATCHMARK_CACHE/truth_server/<digest>/.

Both dialects are understood: `batchmark.id` and `stop_after` where a body has them, else rows are in the
order of receipt and `max_tokens` counts. All times are CLOCK_MONOTONIC ns on this host; 0: it did not happen;
`sent` is the moment right before a token's write. It holds 50,000 tokens/s on a core of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
SOURCE = HERE / "truth_server.cpp"
HEADERS = tuple(HERE / name for name in ("truth_http.h", "truth_log.h", "truth_options.h"))
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra")
START_S = 30.0
STOP_S = 30.0
MAGIC = b"TRUTHLG1"
ROW = np.dtype(
    [
        ("id", "S40"),
        *((name, "<i4") for name in ("attempt", "connection", "tokens", "sent", "status", "flags")),
    ]
    + [(f"{name}_ns", "<i8") for name in ("accepted", "first_byte", "arrived", "received", "started")]
    + [(f"{name}_ns", "<i8") for name in ("head", "done", "gone")]
)
"""struct Row of truth_log.h."""
CHAT, STREAM, ABORTED, CONGESTED = 1, 2, 4, 8
"""Bits of `flags`."""


class TruthServerError(RuntimeError):
    """It cannot be built or started here. The message is one line that says why."""


@dataclass(frozen=True)
class TruthLog:
    """rows: one per request in the order of receipt, fields of ROW. due, sent [tokens]: of all rows one after
    the other, `rows["sent"]` of each."""

    rows: NDArray[Any]
    due: NDArray[np.int64]
    sent: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each row's tokens begin in due and sent; one more than there are rows."""
        return np.concatenate([[0], np.cumsum(self.rows["sent"], dtype=np.int64)])

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of each request id; of the last attempt, where there were several."""
        return {row_id.decode(): k for k, row_id in enumerate(self.rows["id"])}

    def sent_of(self, row: int) -> NDArray[np.int64]:
        """When each token of a request left."""
        return self.sent[self.starts[row] : self.starts[row + 1]]

    def due_of(self, row: int) -> NDArray[np.int64]:
        return self.due[self.starts[row] : self.starts[row + 1]]

    def lateness_ns(self) -> NDArray[np.int64]:
        """By how much every token left after its deadline: the server's own quality."""
        return self.sent - self.due


def read_log(path: str | os.PathLike[str]) -> TruthLog:
    """Raises ValueError for another kind of file."""
    data = Path(path).read_bytes()
    if data[:8] != MAGIC:
        raise ValueError(f"{path}: not a log of the truth server")
    count = int.from_bytes(data[8:16], "little")
    rows = np.frombuffer(data, ROW, count, 16)
    tokens = int(rows["sent"].sum())
    at = 16 + rows.nbytes
    due = np.frombuffer(data, np.int64, tokens, at)
    return TruthLog(rows, due, np.frombuffer(data, np.int64, tokens, at + due.nbytes))


class TruthServer:
    """The server as a process. Options are those of the C++ program: `ttft_ms=100, pattern="stall"`,
    `instant=True`. Raises TruthServerError."""

    def __init__(self, *, realtime: bool = True, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="truth-server-")
        self._log = Path(self._folder.name) / "truth.bin"
        command = [str(build()), "--log", str(self._log), "--exit-with-stdin"]
        for name, value in {"realtime": realtime, **options}.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                command.append(flag)
            elif value is not None and value is not False:
                command += [flag, str(value)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._folder.cleanup()
            raise TruthServerError(
                f"the truth server ended with exit {self.process.wait()}: {' '.join(command)}"
            )
        self.port: int = json.loads(line)["port"]
        self._truth: TruthLog | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> TruthLog:
        """End it and read what it knows; once more gives the same log."""
        if self._truth is None:
            self.process.terminate()
            try:
                code = self.process.wait(STOP_S)
                if code:
                    raise TruthServerError(f"the truth server ended with exit {code}")
                self._truth = read_log(self._log)
            finally:
                self.close()
        return self._truth

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self._folder.cleanup()

    def __enter__(self) -> TruthServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def build() -> Path:
    """The compiled program: from the cache, or compiled now. Raises TruthServerError."""
    if not sys.platform.startswith("linux"):
        raise TruthServerError(f"the truth server needs epoll and timerfd: Linux, not {sys.platform}")
    kernels_build = _kernels_build()
    try:
        compiler = kernels_build.find_compiler()
    except kernels_build.BuildError as error:
        raise TruthServerError(f"{error}; install g++ or name one in CXX") from None
    texts = [path.read_text() for path in (SOURCE, *HEADERS)]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256("\0".join([*compiler, version, *FLAGS, *texts]).encode()).hexdigest()[:16]
    program: Path = kernels_build.cache_dir().with_name("truth_server") / digest / "truth_server"
    if program.exists():
        return program
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=program.parent)  # two may compile at once: the rename decides
    except OSError as error:
        raise TruthServerError(
            f"cannot write {program.parent}: {error.strerror}; set BATCHMARK_CACHE"
        ) from None
    os.close(handle)
    scratch = Path(name)
    try:
        command = [*compiler, *FLAGS, str(SOURCE), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise TruthServerError(f"{compiler[0]} failed with exit {done.returncode}: {lines[0]}")
        scratch.chmod(0o755)
        scratch.replace(program)
    finally:
        scratch.unlink(missing_ok=True)
    return program


def _kernels_build() -> ModuleType:
    """kernels/cpu/build.py by its path: its package imports torch, which nothing here needs."""
    path = HERE.parents[1] / "kernels" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("batchmark_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    try:
        PROGRAM = str(build())
    except TruthServerError as failure:
        raise SystemExit(f"error: {failure}") from None
    os.execv(PROGRAM, [PROGRAM, *sys.argv[1:]])
