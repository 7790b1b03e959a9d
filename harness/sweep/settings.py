"""What a sweep itself is told: sweep.dir, sweep.resume and Hydra's launcher. They never reach a run's
configuration, so they are not part of what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.conf import UsageError, unknown

SETTINGS = ("sweep.dir", "sweep.resume")
LAUNCHER = ("hydra/launcher", "hydra.launcher")


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """folder: where sweep.json and report.html go; None: a new folder under output.dir, or the one of an
    interrupted sweep over the same points. must_exist: there has to be a sweep to continue. launcher: Hydra's
    own overrides, empty for runs on this host."""

    folder: Path | None = None
    resume: bool = True
    must_exist: bool = False
    launcher: tuple[str, ...] = ()


def is_of_sweep(text: str) -> bool:
    key = text.lstrip("+").partition("=")[0]
    return key.startswith(("sweep.", *(f"{name}." for name in LAUNCHER))) or key in LAUNCHER


def split(overrides: list[str]) -> tuple[SweepSettings, list[str]]:
    """(of the sweep, of its runs). Raises UsageError."""
    folder: Path | None = None
    resume, must_exist = True, False
    launcher: list[str] = []
    rest = [text for text in overrides if not is_of_sweep(text)]
    for text in filter(is_of_sweep, overrides):
        key, given, value = text.lstrip("+").partition("=")
        if key.startswith(LAUNCHER):
            launcher.append(text)
            continue
        if key not in SETTINGS:
            raise unknown(f"{key} is not a setting of a sweep", key, SETTINGS)
        if not given or not value:
            raise UsageError(
                f"{text}: needs {'a folder' if key == 'sweep.dir' else 'auto, false or a folder'}"
            )
        if key == "sweep.dir":
            folder = Path(value).expanduser()
        elif value in ("auto", "true", "false"):
            resume, must_exist = value != "false", False
        else:
            folder, must_exist = Path(value).expanduser(), True
    if launcher and not any(text.lstrip("+").startswith("hydra/launcher=") for text in launcher):
        raise UsageError(f"{launcher[0]}: of which launcher? add hydra/launcher=ray or submitit_slurm")
    return SweepSettings(folder, resume, must_exist, tuple(launcher)), rest
