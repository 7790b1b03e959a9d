"""A git repository whose revisions are quick to measure: each has packages of our names, whose `python -m
harness` writes a summary.json made to order, which is all that a gate asks of an older revision."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

MAIN = """
import json, os, pathlib, random, sys, time
tree = pathlib.Path(__file__).parents[1]
made = json.loads((tree / "made.json").read_text())
options = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
out = pathlib.Path(options["output.dir"].strip("'"))
number = len(list(out.glob("*"))) if out.exists() else 0
run = out / f"run{number}"
run.mkdir(parents=True)
(run / "tree").write_text(str(tree))
(run / "pid.partial").write_text(str(os.getpid()))
(run / "pid.partial").rename(run / "pid")
if made["sleep_s"]:
    time.sleep(made["sleep_s"])
if made["exit"]:
    print(made["says"])
    sys.exit(made["exit"])
factor = made["factor"] * random.Random(f"{out.name}{number}").lognormvariate(0, made["noise"])
block = lambda value: {"n": 50, "p50": value, "ci95": {"p50": [value, value]}, "reliable": {"p50": True}}
prints = {"schedule": made["schedule"], "config": "c", "host": "h", "device": "d"}
summary = {
    "schema_version": 1, "valid": made["valid"], "invalid_reasons": [] if made["valid"] else ["client_bound"],
    "null_reasons": {}, "engine": "continuous", "workload": "rag", "model": "tiny", "device": "cpu",
    "run": {"id": f"{out.name}{number}", "duration_s": 1.0, "fingerprint": prints},
    "counts": {"completed": 50, "failed": 0, "timed_out": 0, "rejected": 0},
    "latency_ms": {"tpot": block(5.0 * factor), "normalized": block(8.0 * factor)},
    "throughput": {"output_tokens_per_s": 400 / factor},
}
(run / "summary.json").write_text(json.dumps(summary))
print(f"results: {run}")
"""
MADE = {"factor": 1.0, "noise": 0.01, "valid": True, "schedule": "s", "sleep_s": 0, "exit": 0, "says": ""}


def repository(folder: Path, **made: Any) -> Path:
    """A repository with one commit on branch main."""
    for package in ("harness", "engines", "kernels", "workloads"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "harness" / "__main__.py").write_text(MAIN)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, **made)
    return folder


def change(folder: Path, **made: Any) -> None:
    """The working tree alone."""
    (folder / "made.json").write_text(json.dumps({**MADE, **made}))


def commit(folder: Path, **made: Any) -> None:
    change(folder, **made)
    git(folder, "add", "--all")
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    git(folder, *who, "commit", "--quiet", "--allow-empty", "-m", "made")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def worktrees(folder: Path) -> int:
    return git(folder, "worktree", "list", "--porcelain").count("worktree ")
