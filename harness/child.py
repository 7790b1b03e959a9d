"""A command of this project as a process of its own, which never outlives the program that started it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
ENDING_S = 30.0
"""One that is asked to end writes what it has measured."""


def start(command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """As subprocess.Popen. On Linux it gets a SIGTERM when we die, also by kill -9."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)  # loaded before the fork
        how["preexec_fn"] = functools.partial(_end_with, os.getpid(), libc.prctl)
    return subprocess.Popen(command, **how)


def _end_with(parent: int, prctl: Any) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has died in between
        os._exit(1)


@contextlib.contextmanager
def running(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """`with running(...) as process:` what is left of it at the end, whatever ends it, is ended."""
    process = start(command, **how)
    try:
        yield process
    finally:
        end(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Ask it to end (SIGTERM: a shell's background jobs ignore SIGINT), and kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
