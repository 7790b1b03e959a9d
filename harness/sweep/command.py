"""`python -m harness -m`: the plan, the points one after the other, and the comparison."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli import INVALID, PASS, USAGE, is_of_the_disk, is_usage_error, put, say
from harness.conf import compose, expand
from harness.plan import check_engine, check_workloads, describe_sweep, missing_device, sweep_times
from harness.sweep.folder import SweepFolder, choose
from harness.sweep.points import Entry, Point, changed, draw_points, holds, sources, summary_error, worst
from harness.sweep.settings import split

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_sweep(overrides: list[str]) -> int:
    """Measure every combination that is not finished and compare all. Returns the worst exit code.

    What cannot be composed ends the sweep before anything has run. A point that fails (its server refuses or
    crashes, its run is invalid) does not end it; Ctrl-C ends it and compares what there is."""
    settings, rest = split(overrides)
    combinations = expand(rest)
    configs = [compose(combination) for combination in combinations]
    for cfg in configs:
        check_engine(cfg)
    check_workloads(configs)
    if configs[0].dry_run:
        put(describe_sweep(configs, changed(combinations)))
        missing = list(dict.fromkeys(filter(None, map(missing_device, configs))))
        for line in missing:
            say(f"error: {line}")
        return USAGE if missing and not settings.launcher else PASS
    launcher = None
    if settings.launcher:
        from harness.sweep.cluster import open_launcher

        launcher = open_launcher(settings.launcher)  # before anything is drawn: a launcher that is not there
    points = draw_points(combinations, configs)
    with choose(settings, points, Path(configs[0].output.dir).expanduser()) as folder:
        folder.take_parts(points)
        left = show_plan(points, folder)
        if launcher is not None and left:
            interrupted = launcher.run(left, folder, points)
        else:
            interrupted = run_here(left, folder, points)
        entries = [folder.entries[point.id] for point in points if point.id in folder.entries]
        if interrupted:
            say(f"the sweep ends after {len(entries)} of {len(points)} runs; the same command continues it")
        conclude(points, folder)
        return worst([entry.exit_code for entry in entries] + [INVALID] * interrupted)


def show_plan(points: Sequence[Point], folder: SweepFolder) -> list[Point]:
    """Print every point with how long it takes or that it is finished. Gives those that are left."""
    done = [folder.finished(point) for point in points]
    times = [None if entry else point.eta_s for entry, point in zip(done, points, strict=True)]
    for line in sweep_times(times, [point.overrides for point in points]):
        put(line)
    if any(done):
        put(f"{'':11}continues {folder.path} (sweep.resume=false begins anew)")
    return [point for entry, point in zip(done, points, strict=True) if entry is None]


def run_here(left: Sequence[Point], folder: SweepFolder, points: Sequence[Point]) -> bool:
    """One after the other on this host. Returns whether the user ended it."""
    for point in left:
        put(f"run {point.number} of {len(points)}: {point.name}")
        entry, interrupted = measure(point.cfg, point.overrides, point.id, folder.path)
        if entry is not None:
            folder.add(entry, points)
        if interrupted:
            return True
    return False


def measure(cfg: DictConfig, overrides: list[str], point: str, folder: Path) -> tuple[Entry | None, bool]:
    """(how it ended, None if it was never begun; whether the user ended it). Only a full disk raises."""
    from harness.run import run

    started = time.monotonic()

    def entry(code: int, run_dir: Path | None, error: str | None) -> Entry:
        where = None if run_dir is None else os.path.relpath(run_dir, folder)
        seconds = round(time.monotonic() - started, 1)
        return Entry(overrides, code, where, point, sources(), seconds, platform.node(), error)

    try:
        outcome = run(cfg)
    except KeyboardInterrupt:
        return None, True
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        if is_of_the_disk(error):
            raise
        if is_usage_error(error):
            say(f"error: {line}")
            return entry(USAGE, None, line), False
        traceback.print_exc()
        return entry(INVALID, None, f"{type(error).__name__}: {line}"), False
    error_line = outcome.error or summary_error(outcome.summary)
    return entry(outcome.exit_code, outcome.run_dir, error_line), outcome.interrupted


def conclude(points: Sequence[Point], folder: SweepFolder) -> None:
    """Say which points failed, print the comparison, write report.html into the sweep's folder."""
    from harness.comparison import print_comparison
    from harness.dashboard import write_dashboard

    measured = [
        path
        for entry in folder.entries.values()
        if entry.run
        and ((path := Path(os.path.normpath(folder.path / entry.run))) / "summary.json").is_file()
    ]
    if measured:
        print_comparison(measured)
        write_dashboard(measured, folder.path / "report.html")
    for point in points:
        entry = folder.entries.get(point.id)
        if entry is not None and not holds(entry):
            say(f"failed: run {point.number} of {len(points)}, {point.name}: {entry.error}")
    if measured:
        put(f"results: {folder.path}")
