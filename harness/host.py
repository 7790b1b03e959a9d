"""The machine that a run was measured on: its facts, fingerprints of what was run, its clocks, and the lock
that keeps two measured runs from disturbing each other."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

PACKAGES = ("aiohttp", "hydra-core", "numpy", "pandas", "plotly", "pyarrow", "torch", "transformers")
NOT_MEASURED = ("output", "server", "dry_run")
"""Settings that say where a run goes, not what it is: left out of the configuration's fingerprint."""


def facts() -> dict[str, Any]:
    """`host` of meta.json: cpu, cores (those this process may use), memory_gb, os, python, packages."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def digest(value: Any) -> str:
    """16 hex digits over the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(
    *, schedule_sha256: str, config: Mapping[str, Any], host: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, str]:
    """What has to be equal for two runs to be comparable: traffic, settings, machine, device."""
    measured = {key: value for key, value in config.items() if key not in NOT_MEASURED}
    machine = {key: host.get(key) for key in ("cpu", "cores", "memory_gb")}
    device = {key: server.get(key) for key in ("device", "dtype", "threads", "attention", "determinism")}
    return {
        "schedule": schedule_sha256,
        "config": digest(measured),
        "host": digest(machine),
        "device": digest(device),
    }


def clock_pair() -> tuple[int, int]:
    """(CLOCK_MONOTONIC, CLOCK_REALTIME) in ns at one moment: the tightest of five readings."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, wall)
    assert best is not None
    return best[1], best[2]


NAME_S = 0.5
"""How long after it has the lock a run may take to write its name: two that start at once meet in between."""


def _holder(fd: int) -> str:
    """The name in a lock file that another run holds; empty if it writes none."""
    deadline = time.monotonic() + NAME_S
    while True:
        name = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
        if name or time.monotonic() > deadline:
            return name
        time.sleep(0.01)


class HostLock:
    """One measured run at a time on a host. The kernel frees the lock when its holder dies."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(tempfile.gettempdir()) / f"batchmark-{os.getuid()}.lock"
        self._fd: int | None = None

    def acquire(self, on_wait: Callable[[str], None]) -> None:
        """Wait for the lock; on_wait is told once who holds it. Raises OSError if there can be no file."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(fd) or "another run"
                on_wait(f"waiting for {holder}: two runs at once would disturb each other")
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"the run of process {os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __enter__(self) -> HostLock:
        return self
