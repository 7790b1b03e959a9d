"""`python -m harness.gate.prove`: real gates on this machine, some of one commit against itself and as many
of a commit that makes every pass of the engine slower.

The slow-down is a commit on a branch of a temporary clone: after each pass the engine sleeps for 15 % of the
time that the pass took. Comparisons of both kinds alternate. Nobody gets a false alarm and nothing slow
passes: exit 0, else 1. Inconclusive is counted apart."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import child
from harness.cli import guard, put, say
from harness.conf import UsageError
from harness.gate.outcome import PASS, REGRESSION
from harness.gate.revision import Tree, head_tree
from harness.gate.rounds import environment
from harness.interrupt import Interruption

OVERRIDES = ("+workload=rag", "+engine=continuous", "load=closed", "load.concurrency=4", "load.requests=24")
SOURCE = Path("engines") / "engine.py"
PASS_LINE = "            result = self.runner.run(ready.batch)\n"
SLOWER = """\
            began = self.clock()
            result = self.runner.run(ready.batch)
            __import__("time").sleep({slow} * (self.clock() - began))
"""
KINDS = ("same", "slower")


def clones(folder: Path, slow: float) -> dict[str, Tree]:
    """A clone of HEAD for each kind; the slower one has one commit more. Raises UsageError."""
    head = head_tree()
    made = {}
    for kind in KINDS:
        clone = folder / kind
        _git(None, "clone", "--quiet", "--shared", "--no-checkout", str(head.folder), str(clone))
        _git(clone, "checkout", "--quiet", "-b", kind, head.sha)
        made[kind] = Tree(kind, clone, head.sha)
    source = made["slower"].folder / SOURCE
    text = source.read_text(encoding="utf-8")
    if text.count(PASS_LINE) != 1:
        raise UsageError(
            f"{SOURCE}: no longer has the one line where a pass runs; mend harness/gate/prove.py"
        )
    source.write_text(text.replace(PASS_LINE, SLOWER.format(slow=slow)), encoding="utf-8")
    who = ("-c", "user.name=prove", "-c", "user.email=prove@localhost", "-c", "commit.gpgsign=false")
    _git(made["slower"].folder, *who, "commit", "--quiet", "--all", "-m", f"Sleep {slow:g} of every pass")
    return made


def compare(tree: Tree, options: Sequence[str], under: Sequence[str], output: Path) -> dict[str, Any]:
    """One gate of the clone's working tree against the commit that it was made from: its JSON line."""
    command = [*under, sys.executable, "-m", "harness.gate", "--base-ref", tree.sha, *options]
    how = {"cwd": tree.folder, "env": environment(tree), "stdout": subprocess.PIPE, "text": True}
    with child.running([*command, f"output.dir='{output}'"], **how) as gate:
        said, _ = gate.communicate()
    try:
        return dict(json.loads(said.splitlines()[-1]))
    except (IndexError, ValueError):
        raise UsageError(f"the gate ended with code {gate.returncode}; see above") from None


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m harness.gate.prove",
        description="Real gates on this machine, of a commit against itself and of a slower one.",
        epilog=f"overrides of the runs after --; default: {shlex.join(OVERRIDES)}",
    )
    parser.add_argument("--times", type=int, default=10, help="gates of each kind (default 10)")
    parser.add_argument("--slow", type=float, default=0.15, help="share of each pass to sleep (default 0.15)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-rounds", type=int, help="add rounds until decided, up to this many")
    parser.add_argument("--rules", metavar="FILE", type=Path, help="default: those of --base-ref")
    parser.add_argument(
        "--under", metavar="CMD", default="", help="run each gate under it, as a lock or taskset"
    )
    parser.add_argument(
        "-o", metavar="FOLDER", type=Path, default=Path("results/prove"), help="where runs go"
    )
    args = parser.parse_args(words[:end])
    options = ["--rounds", str(args.rounds)]
    if args.max_rounds:
        options += ["--until", "decided", "--max-rounds", str(args.max_rounds)]
    if args.rules:
        options += ["--rules", str(args.rules.resolve())]
    overrides = ["--", *(words[end + 1 :] or OVERRIDES)]
    output = args.o.resolve()
    output.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with Interruption(), tempfile.TemporaryDirectory(prefix="batchmark-prove-") as folder:
        trees = clones(Path(folder), args.slow)
        for number in range(args.times):
            for kind in KINDS:
                seed = ["--seed", str(number)]
                line = compare(
                    trees[kind], [*options, *seed, *overrides], shlex.split(args.under), output / kind
                )
                found.append({"kind": kind, **line})
                took = f"{line['gate']} after {line.get('valid_rounds')} rounds"
                say(f"{number + 1} of {args.times}, {kind}: {took}")
                (output / "proof.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    counts = {kind: dict(Counter(f["gate"] for f in found if f["kind"] == kind)) for kind in KINDS}
    put(json.dumps({"slow": args.slow, **counts}))
    good = "regression" not in counts["same"] and "pass" not in counts["slower"]
    return PASS if good else REGRESSION


def _git(folder: Path | None, *arguments: str) -> None:
    command = ["git", *(("-C", str(folder)) if folder else ()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"git {arguments[0]}: {said}")


if __name__ == "__main__":
    sys.exit(guard(main))
