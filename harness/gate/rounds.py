"""`--base-ref`: measured runs of two trees in rounds, shuffled and interleaved on one machine.

Each run is `python -m harness OVERRIDES` as a process of its own in its own tree, so both sides are equally
cold, each uses its own sources and kernels, and any older revision that writes summary.json will do. In each
round both sides run once. Who begins is drawn for the odd rounds and turned round for the even ones (base,
head, head, base, ...), so that neither a drift of the machine nor what the first run leaves behind favours a
side."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import child
from harness.cli import USAGE, say
from harness.conf import UsageError
from harness.gate.reading import read_summary
from harness.gate.revision import Tree

PACKAGES = ("harness", "engines", "kernels", "workloads")
WHOSE = "import importlib.util as u\nfor name in {!r}: print(u.find_spec(name).origin)"


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of one side. summary: None where it left none; problem: why it cannot be used."""

    side: str
    run: Path | None
    summary: dict[str, Any] | None
    problem: str | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    order: tuple[str, str]
    passes: dict[str, Pass]

    @property
    def problems(self) -> list[str]:
        return [f"{p.side}: {p.problem}" for p in self.passes.values() if p.problem]

    @property
    def valid(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class Runner:
    """Measures rounds. child is the run that is under way."""

    trees: tuple[Tree, Tree]
    overrides: list[str]
    folder: Path
    rng: random.Random
    child: subprocess.Popen[bytes] | None = None
    _number: int = 0
    _order: list[str] = field(default_factory=list)

    def check_sources(self) -> None:
        """Each tree runs its own sources, whatever is installed. Raises UsageError."""
        for tree in self.trees:
            command = [sys.executable, "-c", WHOSE.format(PACKAGES)]
            done = subprocess.run(
                command, cwd=tree.folder, env=environment(tree), capture_output=True, text=True
            )
            for origin in done.stdout.split():
                if not Path(origin).resolve().is_relative_to(tree.folder):
                    raise UsageError(f"--base-ref: {tree.name} would run {origin} instead of {tree.folder}")
            if done.returncode:
                raise UsageError(f"--base-ref: {tree.name} {tree.label} lacks one of {', '.join(PACKAGES)}")

    def rounds(self) -> Iterator[Round]:
        """One after the other, without end."""
        while True:
            self._number += 1
            if self._number % 2:
                self._order = [tree.name for tree in self.trees]
                self.rng.shuffle(self._order)
            else:
                self._order.reverse()
            sides = {tree.name: tree for tree in self.trees}
            first, second = self._order
            passes = {name: self._pass(sides[name]) for name in (first, second)}
            yield Round(self._number, (first, second), passes)

    def _pass(self, tree: Tree) -> Pass:
        output = self.folder / tree.name
        log = self.folder / f"{self._number:02}-{tree.name}.log"
        command = [sys.executable, "-m", "harness", *self.overrides, f"output.dir={_quoted(output)}"]
        with log.open("wb") as file:
            self.child = child.start(
                command,
                cwd=tree.folder,
                env=environment(tree),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches us alone, and we end it; so does our death
            )
            try:
                code = self.child.wait()
            finally:
                self.end()
        return read_pass(tree.name, code, log)

    def end(self) -> None:
        """The run under way, if there is one: asked to end, then killed."""
        if self.child is not None:
            child.end(self.child)
        self.child = None

    def kill(self) -> None:
        """At once. Its server sees the end of its input."""
        if self.child is not None and self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        self.child = None


def read_pass(side: str, code: int, log: Path) -> Pass:
    """What a run left behind. Raises UsageError where it refused what it was asked for."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing").strip()
    if code == USAGE:
        raise UsageError(f"{side}: {said.removeprefix('error: ')}")
    folder = next((Path(line[9:]) for line in reversed(lines) if line.startswith("results: ")), None)
    if folder is None:
        return Pass(side, None, None, f"no results, exit code {code}: {said}", code)
    try:
        summary = read_summary(folder)
    except (OSError, ValueError) as error:
        return Pass(side, folder, None, str(error), code)
    problem = None if summary["valid"] else "; ".join(summary["invalid_reasons"]) or "invalid"
    return Pass(side, folder, summary, problem, code)


def environment(tree: Tree) -> dict[str, str]:
    """Where Python finds the tree's packages first, and those of no other checkout."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in others if path and not (Path(path) / "harness").is_dir()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree.folder), *kept])}


def absolute(overrides: Sequence[str]) -> list[str]:
    """Files that an override names by a relative path are those of the current folder, on both sides."""
    changed = []
    for override in overrides:
        key, sign, value = override.partition("=")
        named = value.strip("'\"")
        is_path = os.sep in named or bool(Path(named).suffix)
        if sign and is_path and not Path(named).is_absolute() and os.path.exists(named):
            changed.append(f"{key}={_quoted(Path(named).resolve())}")
        else:
            changed.append(override)
    return changed


def _quoted(path: Path) -> str:
    """As one value of an override."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def told(overrides: Sequence[str]) -> str:
    return shlex.join(overrides)


def announce(done: Round, progress: str) -> None:
    times = ", ".join(
        f"{name} {done.passes[name].summary['run']['duration_s']:.1f} s"  # type: ignore[index]
        if done.passes[name].summary
        else name
        for name in done.order
    )
    state = "" if done.valid else f"; not used: {'; '.join(done.problems)}"
    say(f"round {done.number} ({progress} valid): {times}{state}")
