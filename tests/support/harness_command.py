"""Runs `python -m harness` as a user does, in a process of its own, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
"""For things that take a second or two on an idle machine; this one may be busy with anything."""

SHORT = ("+experiment=smoke", "load.requests=6", "workload.rate=20", "engine.kv_memory_gb=0.1")
LONG = ("+experiment=smoke", "load.requests=400", "workload.rate=8", "engine.kv_memory_gb=0.1")
"""LONG loads for 50 s: long enough to be ended in the middle."""


class HarnessCommand:
    """A run in the background. folder: its output and its host lock, apart from everybody else's."""

    def __init__(self, folder: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.output = folder / "runs"
        self._stderr = folder / f"stderr-{time.monotonic_ns()}"
        (folder / "tmp").mkdir(exist_ok=True)
        base = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), "CI": "true"}
        with open(self._stderr, "w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness", *args, f"output.dir={self.output}"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**base, **(env or {})},
                cwd=folder,
                start_new_session=True,
            )

    def finish(self, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) once it has ended."""
        try:
            out, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, out, self.stderr

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def run_dir(self) -> Path:
        """The folder of the only run, once it is there."""
        return wait_for(lambda: next(iter(sorted(self.output.glob("*"))), None), "a run directory")

    def wait_for_records(self, count: int = 1) -> Path:
        """Wait until that many requests have ended."""
        path = self.run_dir() / "requests.jsonl"

        def look() -> bool:
            there = path.exists() and path.read_bytes().count(b"\n") > count
            assert there or self.process.poll() is None, (
                f"ended with {self.process.returncode}: {self.stderr}"
            )
            return there

        wait_for(look, f"{count} records")
        return self.run_dir()

    def server_pid(self) -> int:
        """The server that this harness has started."""

        def find() -> int | None:
            children = psutil.Process(self.process.pid).children()
            return next((c.pid for c in children if "engines.server" in c.cmdline()), None)

        return wait_for(find, "a server process")

    def worker_pids(self, count: int = 1) -> list[int]:
        """Its load processes, once there are that many."""

        def find() -> list[int]:
            children = psutil.Process(self.process.pid).children()
            return [c.pid for c in children if "harness.loadgen.worker" in c.cmdline()]

        return wait_for(lambda: len(pids := find()) == count and pids, f"{count} load processes")


def harness(folder: Path, *args: str) -> tuple[int, str, str]:
    return HarnessCommand(folder, *args).finish()


def wait_for(look: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {what} after {timeout_s:.0f} s")


def gone(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    """Whether a process ends in that time; one that only waits to be reaped has ended."""

    def ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return bool(wait_for(ended, f"end of process {pid}", timeout_s))


def meta(run_dir: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run_dir / "meta.json").read_text())
    return value


def summary(run_dir: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return value


def results(out: str) -> Path:
    """The folder that the last line of the output names."""
    last = out.splitlines()[-1]
    assert last.startswith("results: "), out
    return Path(last.removeprefix("results: "))
