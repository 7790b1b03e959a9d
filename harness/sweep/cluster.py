"""A sweep over many hosts, through Hydra's own launcher plugins.

`hydra/launcher=ray` (a Ray cluster) and `hydra/launcher=submitit_slurm` (Slurm) are other packages' plugins:
we hand them a task function and one override a job, which is the point's number, as `@hydra.main` would. A
job composes its own configuration and measures it under the lock of its host, so two jobs on one host wait
for each other. It leaves its entry in the sweep's folder, where a driver that was killed finds it again; a
job that cannot see that folder sends its run directory back.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import INVALID, say
from harness.conf import UsageError
from harness.sweep.folder import PARTS, SweepFolder
from harness.sweep.points import Entry, Point, sources

if TYPE_CHECKING:
    from omegaconf import DictConfig

INSTALL = {"ray": "ray", "ray_aws": "ray", "submitit_slurm": "slurm", "submitit_local": "slurm"}
"""Launchers and the extra of this project that brings each."""
QUIET = ("hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "hydra.output_subdir=null")


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker needs to know of its point; it travels pickled, between processes of one user."""

    overrides: list[str]
    combination: list[str]
    point: str
    folder: Path
    output: Path
    plan: str
    sources: str


@dataclass(frozen=True, slots=True)
class Done:
    """What a worker sends back. archive: its run directory, where it cannot see the sweep's folder."""

    entry: Entry
    archive: bytes | None = None


class Launcher:
    """One of Hydra's, ready to start jobs. Raises UsageError where it is not installed or set wrongly."""

    def __init__(self, overrides: Sequence[str]) -> None:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException

        self._overrides = [text.lstrip("+") if "/" in text.partition("=")[0] else text for text in overrides]
        self._name = next(
            text.partition("=")[2] for text in self._overrides if text.startswith("hydra/launcher=")
        )
        with tempfile.TemporaryDirectory() as nowhere, initialize_config_dir(nowhere, version_base="1.3"):
            try:
                compose(overrides=[*self._overrides, *QUIET], return_hydra_config=True)
            except HydraException as error:
                raise UsageError(self._why_not(str(error))) from None
        if self._name in INSTALL:
            module = "ray" if INSTALL[self._name] == "ray" else "submitit"
            import importlib.util

            if importlib.util.find_spec(module) is None:
                raise UsageError(self._why_not(f"{module} is not installed"))

    def run(self, left: Sequence[Point], folder: SweepFolder, points: Sequence[Point]) -> bool:
        """Start a job a point and wait for all. Returns whether the user ended it."""
        from hydra import compose, initialize_config_dir
        from hydra._internal.callbacks import Callbacks
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.plugins import Plugins
        from hydra.types import HydraContext

        (folder.path / PARTS).mkdir(exist_ok=True)
        folder.write(points)
        jobs = {point.number: _job(point, folder) for point in left}
        where = [f"hydra.sweep.dir='{folder.path.resolve() / 'jobs'}'", "hydra.mode=MULTIRUN"]
        overrides = [*self._overrides, *QUIET, *where, "hydra.job.name=batchmark"]
        with tempfile.TemporaryDirectory() as nowhere, initialize_config_dir(nowhere, version_base="1.3"):
            config = compose(overrides=overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(config))
            launcher = Plugins.instance().instantiate_launcher(context, Task(jobs), config)
            lost = "its job did not come back"
            returned: Sequence[Any] = ()
            try:
                returned = launcher.launch([[f"+number={number}"] for number in jobs], initial_job_idx=0)
            except KeyboardInterrupt:
                folder.take_parts(points)
                return True
            except Exception as error:  # whatever the cluster does to a job: the others may have ended well
                lost = f"{lost}: {_one_line(error)}"
                say(f"error: {self._name}: {_one_line(error)}")
        folder.take_parts(points)
        known = {point.id: _entry(point, one, folder) for point, one in zip(left, returned, strict=False)}
        for point in left:
            entry = known.get(point.id)
            if entry is None and not (returned == () and folder.finished(point)):
                entry = Entry(point.overrides, INVALID, None, point.id, sources(), 0.0, None, lost)
            if entry is not None:
                folder.add(entry, points)
        with contextlib.suppress(OSError):
            (folder.path / PARTS).rmdir()
        return False

    def _why_not(self, reason: str) -> str:
        line = " ".join(reason.split())[:200]
        if self._name not in INSTALL:
            return f"hydra/launcher={self._name}: {line}"
        extra = INSTALL[self._name]
        return f"hydra/launcher={self._name}: {line}; it comes with pip install -e '.[{extra}]'"


def open_launcher(overrides: Sequence[str]) -> Launcher:
    """Raises UsageError for one that is not there."""
    return Launcher(overrides)


class Task:
    """The function that Hydra calls on a worker, with the jobs in it."""

    def __init__(self, jobs: dict[int, Job]) -> None:
        self._jobs = jobs

    def __call__(self, cfg: DictConfig) -> Done:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.singleton import Singleton

        launcher = Singleton.get_state()
        GlobalHydra.instance().clear()  # the job composes a configuration of its own
        try:
            return work(self._jobs[cfg.number])
        finally:
            Singleton.set_state(launcher)


def work(job: Job) -> Done:
    """Measure one point on this host. Run directories go to the sweep's output where that can be seen."""
    from harness.conf import compose
    from harness.records import write_json
    from harness.sweep.command import measure

    if sources() != job.sources:
        line = f"host {socket.gethostname()} has other sources of this program than the driver"
        return Done(
            Entry(job.overrides, INVALID, None, job.point, sources(), 0.0, socket.gethostname(), line)
        )
    shared = _sees(job)
    with contextlib.ExitStack() as stack:
        folder, output = job.folder, job.output
        if not shared:
            output = folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchmark-")))
        cfg = compose([text for text in job.combination if not text.startswith("output.dir=")])
        cfg.output.dir = str(output)
        entry, interrupted = measure(cfg, job.overrides, job.point, folder)
        if entry is None or interrupted:
            raise KeyboardInterrupt
        if shared:
            write_json(folder / PARTS / f"{job.point}.json", entry.as_json())
            return Done(entry)
        return Done(entry, None if entry.run is None else _packed(folder / entry.run))


def _sees(job: Job) -> bool:
    """Whether this host shares the driver's folders: the same sweep is in it."""
    import json

    try:
        return bool(json.loads((job.folder / "sweep.json").read_text())["plan"] == job.plan)
    except (OSError, ValueError, LookupError):
        return False


def _job(point: Point, folder: SweepFolder) -> Job:
    output = Path(point.cfg.output.dir).expanduser().resolve()
    return Job(
        point.overrides, point.combination, point.id, folder.path.resolve(), output, folder.plan, sources()
    )


def _entry(point: Point, returned: Any, folder: SweepFolder) -> Entry:
    """Of a job that has ended in whatever way."""
    try:
        done = returned.return_value
    except Exception as error:  # Hydra raises what the job raised
        done = error
    if not isinstance(done, Done):
        line = _one_line(done)
        say(f"error: run {point.number}: {line}")
        return Entry(point.overrides, INVALID, None, point.id, sources(), 0.0, None, line)
    if done.archive is None:
        return done.entry
    output = Path(point.cfg.output.dir).expanduser()
    assert done.entry.run is not None
    with tarfile.open(fileobj=io.BytesIO(done.archive)) as archive:
        archive.extractall(output, filter="data")
    from dataclasses import replace

    return replace(done.entry, run=os.path.relpath(output / Path(done.entry.run).name, folder.path))


def _one_line(error: object) -> str:
    """The last line says most: what comes before it is the worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1] if len(lines) > 3 else ' '.join(lines)}"[:300]


def _packed(run_dir: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.add(run_dir, arcname=run_dir.name)
    return data.getvalue()
