"""The folder of a sweep: sweep.json, rewritten after every point in one step, and the lock that keeps two
commands from filling it at once."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.conf import UsageError
from harness.host import digest
from harness.sweep.points import Entry, Point, finished, holds, sources
from harness.sweep.settings import SweepSettings

SCHEMA_VERSION = 2
LOCK = ".lock"
PARTS = "points"
"""Entries that workers on other hosts have left, one file each, until the sweep takes them over."""


class SweepFolder:
    """Holds the lock for the length of a `with`. entries: how each point ended, by its id."""

    def __init__(self, path: Path, plan: str, *, fresh: bool = False) -> None:
        self.path = path
        self.plan = plan
        self.entries: dict[str, Entry] = {}
        self._fresh = fresh
        self._made = False
        self._fd: int | None = None

    def __enter__(self) -> SweepFolder:
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"sweep.dir={self.path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 100, 0).decode("utf-8", "replace").strip() or "another process"
            os.close(self._fd)
            raise UsageError(
                f"sweep.dir={self.path}: {holder} runs this sweep; wait for it or give another sweep.dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()}".encode(), 0)
        if not self._fresh:
            self.entries = {entry.point: entry for entry in read_entries(self.path)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._fd is not None
        if self._made and not any(entry.run for entry in self.entries.values()):
            shutil.rmtree(self.path, ignore_errors=True)  # nothing was measured
        os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def finished(self, point: Point) -> Entry | None:
        entry = self.entries.get(point.id)
        return entry if entry is not None and finished(entry, point, self.path) else None

    def add(self, entry: Entry, points: Sequence[Point]) -> None:
        """Keep it, and write sweep.json."""
        self.entries[entry.point] = entry
        self.write(points)

    def write(self, points: Sequence[Point]) -> None:
        """Entries in the order of the plan, then those of earlier plans in the same folder."""
        from harness.records import write_json

        wanted = [point.id for point in points]
        order = [*wanted, *(key for key in self.entries if key not in set(wanted))]
        sweep: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "plan": self.plan,
            "sources": sources(),
            "points": len(points),
            "finished": all(self._holds(point) for point in points),
            "runs": [self.entries[key].as_json() for key in order if key in self.entries],
        }
        write_json(self.path / "sweep.json", sweep)

    def _holds(self, point: Point) -> bool:
        entry = self.entries.get(point.id)
        return entry is not None and entry.sources == sources() and holds(entry)

    def take_parts(self, points: Sequence[Point]) -> None:
        """Entries that workers have left, also those of a sweep whose driver was killed."""
        parts = sorted((self.path / PARTS).glob("*.json"))
        for part in parts:
            entry = _entry(_read(part))
            if entry is not None:
                self.entries[entry.point] = entry
        if parts:
            self.write(points)
        for part in parts:
            part.unlink(missing_ok=True)


def choose(settings: SweepSettings, points: Sequence[Point], output: Path) -> SweepFolder:
    """The folder that is asked for, that of an interrupted sweep over the same points, or a new one."""
    plan = digest(sorted(point.id for point in points))
    folder = settings.folder
    if folder is not None:
        if settings.must_exist and not (folder / "sweep.json").is_file():
            raise UsageError(
                f"sweep.resume={folder}: holds no sweep.json; give the folder of a sweep, or auto"
            )
        if folder.exists() and not _is_free(folder):
            raise UsageError(
                f"sweep.dir={folder}: holds something else than a sweep; give a folder of its own"
            )
        return SweepFolder(folder, plan, fresh=not settings.resume)
    for path in sorted(output.glob("*-sweep-*/sweep.json"), reverse=True) if settings.resume else ():
        found = _read(path) or {}
        if (found.get("plan"), found.get("sources"), found.get("finished")) == (plan, sources(), False):
            return SweepFolder(path.parent, plan)
    return SweepFolder(output / f"{datetime.now():%Y%m%d-%H%M%S}-sweep-{secrets.token_hex(2)}", plan)


def read_entries(folder: Path) -> list[Entry]:
    """Those of sweep.json; of another version, none."""
    found = _read(folder / "sweep.json") or {}
    runs = found.get("runs") if found.get("schema_version") == SCHEMA_VERSION else None
    return [entry for entry in map(_entry, runs or []) if entry is not None]


def _entry(value: Any) -> Entry | None:
    try:
        return Entry(**{field.name: value[field.name] for field in fields(Entry)})
    except (LookupError, TypeError):
        return None


def _is_free(folder: Path) -> bool:
    """Whether a sweep may live there: there is one, or nothing at all."""
    if not folder.is_dir():
        return False
    return (folder / "sweep.json").is_file() or not any(p.name != LOCK for p in folder.iterdir())


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
