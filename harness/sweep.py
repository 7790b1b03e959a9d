"""A sweep: every combination of the given values, one run after the other, then one comparison."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import INVALID, PASS, SEVERITY, USAGE, is_usage_error, put, say
from harness.conf import compose, expand
from harness.plan import check_engine, check_workloads, describe_sweep
from harness.run import run

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Part:
    """One run of the sweep. overrides: those that are not the same in all."""

    overrides: list[str]
    exit_code: int
    run_dir: Path | None


def run_sweep(overrides: list[str]) -> int:
    """Run every combination and compare them. Returns the worst exit code.

    What cannot be composed ends the sweep before anything has run. A run that is invalid, or whose server
    refuses its settings, does not end it; Ctrl-C ends it and compares what there is."""
    combinations = expand(overrides)
    configs = [compose(combination) for combination in combinations]
    for cfg in configs:
        check_engine(cfg)
    check_workloads(configs)
    if configs[0].dry_run:
        put(describe_sweep(configs, changed(combinations)))
        return PASS
    parts: list[Part] = []
    for number, (cfg, names) in enumerate(zip(configs, changed(combinations), strict=True), 1):
        put(f"run {number} of {len(configs)}: {' '.join(names) or 'as configured'}")
        part, interrupted = _one(cfg, names)
        parts.append(part)
        if interrupted:
            say(f"the sweep ends after {number} of {len(configs)} runs")
            break
    folder = conclude(parts, Path(configs[0].output.dir).expanduser())
    if folder is not None:
        put(f"results: {folder}")
    return max((part.exit_code for part in parts), key=SEVERITY.index, default=PASS)


def changed(combinations: list[list[str]]) -> list[list[str]]:
    """Of each combination, the overrides that are not the same in all."""
    return [
        [text for place, text in enumerate(combination) if len({c[place] for c in combinations}) > 1]
        for combination in combinations
    ]


def conclude(parts: list[Part], output: Path) -> Path | None:
    """Print the comparison and write sweep.json and report.html into a folder of their own; None if nothing
    was measured (a dry run, or no run began)."""
    from harness.comparison import print_comparison
    from harness.dashboard import write_dashboard
    from harness.records import write_json

    measured = [part.run_dir for part in parts if part.run_dir and (part.run_dir / "summary.json").is_file()]
    if not measured:
        return None
    print_comparison(measured)
    folder = output / f"{datetime.now():%Y%m%d-%H%M%S}-sweep-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    runs: list[dict[str, Any]] = [
        {"overrides": p.overrides, "exit_code": p.exit_code, "run": p.run_dir and str(p.run_dir)}
        for p in parts
    ]
    write_json(folder / "sweep.json", {"schema_version": 1, "runs": runs})
    write_dashboard(measured, folder / "report.html")
    return folder


def _one(cfg: DictConfig, names: list[str]) -> tuple[Part, bool]:
    """(how it ended, whether the user ended it)."""
    try:
        outcome = run(cfg)
    except KeyboardInterrupt:
        return Part(names, INVALID, None), True
    except Exception as error:
        if not is_usage_error(error):
            raise
        say(f"error: {' '.join(str(error).split())}")
        return Part(names, USAGE, None), False
    return Part(names, outcome.exit_code, outcome.run_dir), outcome.interrupted
