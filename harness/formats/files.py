"""The files that a gate leaves for CI: which options there are, and how they are written."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from harness.formats.bencher import bencher
from harness.formats.github_benchmark import bigger_is_better, smaller_is_better
from harness.formats.junit import junit
from harness.formats.markdown import markdown
from harness.formats.pytorch import pytorch
from harness.formats.report import Report
from workloads import output

FORMATS: dict[str, tuple[Callable[[Report], str], str]] = {
    "markdown": (markdown, "append a markdown section, as for $GITHUB_STEP_SUMMARY"),
    "junit": (junit, "JUnit XML: a test case a metric; inconclusive is skipped"),
    "gab-smaller": (smaller_is_better, "github-action-benchmark, customSmallerIsBetter"),
    "gab-bigger": (bigger_is_better, "github-action-benchmark, customBiggerIsBetter"),
    "bencher": (bencher, "Bencher Metric Format"),
    "pytorch": (lambda report: pytorch(report, os.environ), "PyTorch benchmark database, schema v3"),
}


class OutputError(ValueError):
    """Files that cannot be written as asked: one line with the option, its value and what is wrong."""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files for CI (docs/gates.md)")
    for name, (_, what) in FORMATS.items():
        group.add_argument(f"--{name}", metavar="FILE", type=Path, help=what)


def chosen(args: argparse.Namespace) -> dict[str, Path]:
    """The files asked for, by format. Raises OutputError where one would overwrite another."""
    paths = {name: getattr(args, name.replace("-", "_")) for name in FORMATS}
    asked = {name: path for name, path in paths.items() if path is not None}
    inputs = {name: getattr(args, name, None) for name in ("baseline", "rules")}
    taken = {path.resolve(): name for name, path in inputs.items() if path is not None}
    for name, path in asked.items():
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            raise OutputError(f"--{name} {path}: is the file of --{other} too; name another")
    return asked


def write_all(paths: dict[str, Path], report: Report) -> list[str]:
    """Write what can be written; give a line for each file that could not."""
    failures = []
    for name, path in paths.items():
        text = FORMATS[name][0](report).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (append if name == "markdown" else output.whole)(path, text)
        except OSError as error:
            failures.append(f"--{name} {path}: cannot be written ({error.strerror})")
    return failures


def append(path: Path, text: bytes) -> None:
    """All of text at the end of the file, or none of it; what others wrote there stays. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            left = memoryview(text)
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise
