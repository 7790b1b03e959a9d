"""The points of a sweep, and when one is finished: its run directory holds the complete and valid summary of
the same configuration and the same traffic, measured with the same sources."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import PASS, SEVERITY
from harness.host import NOT_MEASURED, digest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engines", "harness", "kernels", "workloads")
SOURCES = {".py", ".yaml", ".cpp", ".h"}


@dataclass(frozen=True, slots=True)
class Point:
    """One run that is wanted. overrides: what is not the same in all; combination: all of them."""

    number: int
    overrides: list[str]
    combination: list[str]
    cfg: DictConfig
    schedule: str  # sha256
    eta_s: float

    @property
    def name(self) -> str:
        return " ".join(self.overrides) or "as configured"

    @property
    def config(self) -> str:
        """As `fingerprint.config` of its run will be."""
        from omegaconf import OmegaConf

        config: Any = OmegaConf.to_container(self.cfg, resolve=True)
        return digest({key: value for key, value in config.items() if key not in NOT_MEASURED})

    @property
    def id(self) -> str:
        return digest([self.config, self.schedule])


@dataclass(frozen=True, slots=True)
class Entry:
    """How one point ended: an entry of sweep.json's `runs`. run: its directory, seen from the sweep's folder;
    None where there is none. error: one line, None for a run that holds."""

    overrides: list[str]
    exit_code: int
    run: str | None
    point: str
    sources: str
    seconds: float
    host: str | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def draw_points(combinations: Sequence[list[str]], configs: Sequence[DictConfig]) -> list[Point]:
    """Each with its traffic drawn, once for all that share it. Raises WorkloadError."""
    from harness.eta import eta
    from harness.plan import draw_schedule

    drawn: list[tuple[Any, Schedule, str]] = []  # engines of a sweep mostly share their traffic
    points = []
    names = changed(list(combinations))
    for number, (cfg, combination, differs) in enumerate(zip(configs, combinations, names, strict=True), 1):
        key = (cfg.workload, cfg.seed, cfg.load.kind, cfg.load.requests, cfg.load.duration_s)
        found = next(((s, sha) for k, s, sha in drawn if k == key), None)
        if found is None:
            schedule = draw_schedule(cfg)
            found = schedule, schedule.sha256()
            drawn.append((key, *found))
        points.append(Point(number, differs, combination, cfg, found[1], eta(cfg, found[0]).total_s))
    return points


def changed(combinations: list[list[str]]) -> list[list[str]]:
    """Of each combination, the overrides that are not the same in all."""
    return [
        [text for place, text in enumerate(combination) if len({c[place] for c in combinations}) > 1]
        for combination in combinations
    ]


def finished(entry: Entry, point: Point, folder: Path) -> bool:
    """Whether what the entry says is on disk, whole, and of this point."""
    if entry.run is None or entry.point != point.id or entry.sources != sources():
        return False
    try:
        summary = json.loads((folder / entry.run / "summary.json").read_text(encoding="utf-8"))
        run = summary["run"]
        prints = run["fingerprint"]
        same = (prints["config"], prints["schedule"]) == (point.config, point.schedule)
        return bool(same and summary["valid"] and run["complete"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def holds(entry: Entry) -> bool:
    """Whether the run may be believed, whatever it says of the SLO."""
    return entry.run is not None and entry.error is None


def summary_error(summary: dict[str, Any] | None) -> str | None:
    """Why a run counts as failed, in one line; None for one that holds."""
    if summary is None:
        return "nothing was measured"
    if summary["valid"]:
        return None
    reasons = [" ".join(str(reason).split()) for reason in summary["invalid_reasons"]] or ["no reason given"]
    return "not valid: " + reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


@functools.cache
def sources() -> str:
    """A fingerprint of the program: another version of it is measured anew."""
    found = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def worst(codes: Sequence[int]) -> int:
    """The worst exit code of all."""
    return max(codes, key=SEVERITY.index, default=PASS)
