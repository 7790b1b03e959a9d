"""Two revisions of this project side by side: the working tree, and a base checked out into a temporary
git worktree that is removed whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import harness
from harness.cli import say

PREFIX = "batchmark-gate-"
OURS = re.compile(rf"^worktree (.*/{PREFIX}(\d+)-[^/]+)/tree$", re.MULTILINE)
SHORT = 10


class RevisionError(ValueError):
    """No such revision can be had here: one line that says why and what would work."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One side. folder holds the packages (harness/, engines/ ...); dirty: files that no commit has."""

    name: str  # base | head
    folder: Path
    sha: str
    dirty: int = 0

    @property
    def label(self) -> str:
        changed = f" and {self.dirty} uncommitted change{'s' * (self.dirty > 1)}" if self.dirty else ""
        return f"{self.sha[:SHORT]}{changed}"


def head_tree(folder: Path | None = None) -> Tree:
    """The checkout that this code runs from, as it is. Raises RevisionError outside of a git checkout."""
    folder = (folder or Path(harness.__file__).parents[1]).resolve()
    top = _git(
        folder, "rev-parse", "--show-toplevel", problem=f"--base-ref: {folder} is not in a git checkout"
    )
    sha = _git(folder, "rev-parse", "--verify", "HEAD", problem=f"--base-ref: {top} has no commit yet")
    changes = _git(folder, "status", "--porcelain", "--", ".").splitlines()
    return Tree("head", folder, sha, len(changes))


class BaseTree:
    """`with BaseTree(ref, head) as base:` has the revision's files in a folder of its own for that long."""

    def __init__(self, ref: str, head: Tree) -> None:
        """Raises RevisionError for a revision that is not in this clone."""
        self._repository = head.folder
        hint = "fetch it first (a shallow clone needs fetch-depth: 0, or `git fetch origin REF`)"
        self.sha = _git(
            head.folder,
            *("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"),
            problem=f"--base-ref {ref}: no such revision in this clone; {hint}",
        )
        self._inside = head.folder.relative_to(Path(_git(head.folder, "rev-parse", "--show-toplevel")))
        self._folder: Path | None = None

    def __enter__(self) -> Tree:
        remove_orphans(self._repository)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
        tree = self._folder / "tree"
        try:
            _git(
                *(self._repository, "-c", "core.hooksPath=/dev/null"),
                *("worktree", "add", "--quiet", "--detach", str(tree), self.sha),
                problem=f"--base-ref: {self.sha[:SHORT]} cannot be checked out into {tree}",
            )
            if not (tree / self._inside / "harness" / "__main__.py").is_file():
                raise RevisionError(f"--base-ref: {self.sha[:SHORT]} has no harness to run")
        except BaseException:
            self.remove()
            raise
        return Tree("base", tree / self._inside, self.sha)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Twice does no harm."""
        if self._folder is not None:
            _remove(self._repository, self._folder)
            self._folder = None


def remove_orphans(repository: Path) -> None:
    """What gates that were killed have left behind."""
    for folder, pid in OURS.findall(_git(repository, "worktree", "list", "--porcelain")):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            say(f"removing {folder}, which a gate that was killed has left behind")
            _remove(repository, Path(folder))
        except PermissionError:
            continue


def _remove(repository: Path, folder: Path) -> None:
    """The folder first: git then only has to forget what is no longer there."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(RevisionError):
        _git(repository, "worktree", "prune", problem="")


def _git(folder: Path, *arguments: str, problem: str = "git") -> str:
    """Its output. Raises RevisionError: the problem and git's own last words."""
    try:
        # A session of its own: Ctrl-C is for us, who then clean up with it.
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise RevisionError("--base-ref: needs git, which is not in PATH") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RevisionError(f"{problem} ({said[-1]})" if said else problem)
    return done.stdout.strip()
