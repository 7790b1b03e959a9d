"""What lies below a folder: runs, sweeps, comparisons and capacity searches, each as one line of a list.

A file is read once and again only when it has changed, so that thousands of runs stay quick. Nothing that is
found may break the list: what cannot be read is listed as broken, with the reason."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.dashboard.serve.progress import Progress, number, read_json
from harness.table import lookup

MAX_DEPTH = 5
SILENT_S = 20.0
"""A run that writes nothing for so long (telemetry comes 10 times a second) is no longer running."""
KINDS = (("sweep", "sweep.json"), ("compare", "compare.json"), ("capacity", "capacity.json"))
RUN_FILES = frozenset({"meta.json", "summary.json", "requests.jsonl", "config.yaml"})
SIGNS_OF_LIFE = ("telemetry.jsonl", "requests.jsonl", "server.log", "meta.json", "config.yaml")
FIGURES = {
    "ttft_p50": "latency_ms.ttft.from_intended.p50",
    "ttft_p99": "latency_ms.ttft.from_intended.p99",
    "tpot_p50": "latency_ms.tpot.p50",
    "tpot_p99": "latency_ms.tpot.p99",
    "tokens_per_s": "throughput.output_tokens_per_s",
    "goodput": "throughput.goodput_rps",
    "requests": "counts.scheduled",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One line. id: what addresses it in URLs; it says nothing of the path, so no path can be asked for.
    state: valid, invalid, running, broken, or done (of what is no run). note: why, or what came out."""

    id: str
    kind: str
    name: str
    state: str
    note: str = ""
    started: str = ""
    engine: str = ""
    workload: str = ""
    model: str = ""
    figures: Mapping[str, float | None] | None = None
    progress: Mapping[str, Any] | None = None
    runs: tuple[str, ...] = ()  # ids of the runs that a sweep or a comparison consists of


class Index:
    """Of one folder. `scan` may be called from any one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.items: dict[str, Item] = {}
        self._paths: dict[str, Path] = {}
        self._read: dict[Path, tuple[tuple[int, int], Any]] = {}
        self._progress: dict[str, Progress] = {}

    def path(self, id: str) -> Path | None:
        return self._paths.get(id)

    def progress(self, id: str) -> Progress:
        return Progress(self._paths[id])

    def scan(self) -> list[Item]:
        """Look again; newest first."""
        paths, items = {}, {}
        for path, kind, names in folders(self.root):
            id = self.id_of(path)
            paths[id] = path
            items[id] = self._run(id, path, names) if kind == "run" else self._other(id, path, kind)
        self._paths, self.items = paths, items
        self._progress = {id: p for id, p in self._progress.items() if id in items}
        self._read = {path: value for path, value in self._read.items() if self.id_of(path.parent) in paths}
        return sorted(items.values(), key=lambda item: (item.started, item.name), reverse=True)

    def look(self, id: str) -> Item | None:
        """One of them anew."""
        path = self._paths.get(id)
        if path is None or self.items[id].kind != "run":
            return self.items.get(id)
        try:
            self.items[id] = self._run(id, path, set(os.listdir(path)))
        except OSError as error:
            self.items[id] = replace(self.items[id], state="broken", note=str(error.strerror))
        return self.items[id]

    def id_of(self, path: Path) -> str:
        return hashlib.sha256(os.fsencode(os.path.relpath(path, self.root))).hexdigest()[:16]

    def name_of(self, path: Path) -> str:
        """Names on disk are bytes; what is no UTF-8 shows its replacement."""
        return os.fsencode(os.path.relpath(path, self.root)).decode("utf-8", "replace")

    def _run(self, id: str, path: Path, names: set[str]) -> Item:
        item = Item(id, "run", self.name_of(path), "broken", started=_stamp(path.name))
        try:
            if "summary.json" in names:
                return _of_summary(item, self._json(path / "summary.json"))
            meta = self._json(path / "meta.json") if "meta.json" in names else {}
            item = _of_meta(item, meta)
        except Exception as error:
            what = "summary.json" if "summary.json" in names else "meta.json"
            return replace(item, note=f"{what} cannot be read: {_reason(error)}")
        if _silent_s(path) > SILENT_S:
            cause = (
                "it ended before the load began" if "meta.json" not in names else "it was ended from outside"
            )
            return replace(item, note=f"no summary.json: {cause}")
        progress = self._progress.setdefault(id, Progress(path))
        return replace(item, state="running", progress=progress.poll())

    def _other(self, id: str, path: Path, kind: str) -> Item:
        item = Item(id, kind, self.name_of(path), "broken", started=_stamp(path.name))
        try:
            found = self._json(path / f"{kind}.json")
            runs = tuple(self.id_of(Path(os.path.normpath(path / run))) for run in _run_dirs(found))
            return replace(item, state="done", note=_outcome(kind, found), runs=runs)
        except Exception as error:
            return replace(item, note=f"{kind}.json cannot be read: {_reason(error)}")

    def _json(self, path: Path) -> Any:
        """A file's small part of interest would do; the whole is parsed once a change."""
        found = path.stat()
        stamp = (found.st_mtime_ns, found.st_size)
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            value = read_json(path)
            known = (stamp, _slim(value) if path.name == "summary.json" else value)
            self._read[path] = known
        return known[1]


def folders(root: Path) -> Iterator[tuple[Path, str, set[str]]]:
    """(folder, kind, names in it) of all that is found. Links are not followed: they may lead anywhere."""
    stack = [(root, 0)]
    while stack:
        folder, depth = stack.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        kind = next((kind for kind, file in KINDS if file in names), "run" if names & RUN_FILES else None)
        if kind == "run" and _stands(folder, names):
            continue
        if kind is not None:
            yield folder, kind, names
        if kind != "run" and depth < MAX_DEPTH:
            stack += [
                (Path(entry.path), depth + 1)
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]


def _stands(folder: Path, names: set[str]) -> bool:
    """Whether it is that of a standing server of a comparison or a capacity search, and no run: what it was
    measured with lies elsewhere (harness.standing)."""
    return "meta.json" not in names and (folder.parent.name == "arms" or folder.name.startswith("server-"))


def _slim(summary: dict[str, Any]) -> dict[str, Any]:
    """What the list shows of a summary: thousands of whole ones would fill the memory."""
    return {
        **{key: summary.get(key) for key in ("valid", "invalid_reasons", "engine", "workload", "model")},
        "started_at": str((summary["run"] or {}).get("started_at") or ""),
        "figures": {name: number(lookup(summary, path)) for name, path in FIGURES.items()},
    }


def _of_summary(item: Item, found: Mapping[str, Any]) -> Item:
    valid = bool(found["valid"])
    reasons = [str(reason) for reason in found["invalid_reasons"] or ()]
    return replace(
        item,
        state="valid" if valid else "invalid",
        note="; ".join(reasons),
        started=found["started_at"] or item.started,
        engine=str(found["engine"] or ""),
        workload=str(found["workload"] or ""),
        model=str(found["model"] or ""),
        figures=found["figures"],
    )


def _of_meta(item: Item, meta: Mapping[str, Any]) -> Item:
    return replace(
        item,
        started=str(meta.get("started_at") or item.started),
        engine=str(meta.get("engine") or ""),
        workload=str(meta.get("workload") or ""),
        model=str(meta.get("model") or ""),
    )


def _run_dirs(found: Mapping[str, Any]) -> list[str]:
    """Of a sweep, a comparison or a capacity search, as far as they name them."""
    named: list[Any] = [run.get("run") for run in found.get("runs") or ()]
    named += [run for part in found.get("rounds") or () for run in (part.get("runs") or {}).values()]
    return [run for run in named if isinstance(run, str)]


def _outcome(kind: str, found: Mapping[str, Any]) -> str:
    if kind == "sweep":
        runs = found["runs"]
        failed = sum(run.get("error") is not None for run in runs)
        left = found.get("points", len(runs)) - len(runs)
        parts = [
            f"{len(runs)} runs",
            f"{failed} failed" if failed else "",
            f"{left} to come" if left > 0 else "",
        ]
        return ", ".join(filter(None, parts))
    if kind == "compare":
        verdict = found.get("verdict") or {}
        return str(verdict.get("text") or verdict.get("state") or "")
    arms = found.get("arms") or {}
    capacities = [(str(arm.get("name", "")), lookup(arm, "capacity.rps")) for arm in _values(arms)]
    return ", ".join(f"{name} {rps:.3g} requests/s".strip() for name, rps in capacities if rps is not None)


def _values(arms: Any) -> list[Any]:
    """Arms as a list of objects with a name, whether the file has a list or an object by name."""
    if isinstance(arms, dict):
        return [{"name": name, **arm} for name, arm in arms.items()]
    return list(arms)


def _reason(error: Exception) -> str:
    """Why a file could not be read: whatever lies in a folder, the list goes on without it."""
    return " ".join(str(error).split())[:150] or type(error).__name__


def _silent_s(path: Path) -> float:
    """Seconds since a run last wrote something."""
    times = []
    for name in SIGNS_OF_LIFE:
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return time.time() - max(times, default=0.0)


def _stamp(name: str) -> str:
    """The start in a folder's name, 20260102-030405, as 2026-01-02T03:04:05; empty without one."""
    digits = name[:8] + name[9:15]
    if len(digits) != 14 or not digits.isdecimal() or not digits.isascii():
        return ""
    d = digits
    return f"{d[:4]}-{d[4:6]}-{d[6:8]}T{d[8:10]}:{d[10:12]}:{d[12:]}"
