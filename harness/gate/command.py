"""The command line of the gate."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cli import in_words, put, say
from harness.formats import Report
from harness.formats.files import OutputError, add_options, chosen, write_all
from harness.gate.baseline import Baseline, gate, held_to, load_baseline, make_baseline
from harness.gate.constants import gate_constants, of_run, worse_of
from harness.gate.interleaved import Plan, hold, valid
from harness.gate.outcome import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE, Result, concluded
from harness.gate.reading import FINGERPRINT, check_paths, read_summary
from harness.gate.revision import BaseTree, Tree, head_tree
from harness.gate.rounds import Round, Runner, absolute, announce, told
from harness.gate.rules import Rules, default_rules, load_rules
from harness.gate.show import machine_line, print_result
from harness.interrupt import Interruption
from harness.metrics.summary import clean
from harness.records import write_json

ROUNDS, MAX_ROUNDS = 5, 25
NO_SUMMARY: dict[str, Any] = {"run": {"id": None, "fingerprint": dict.fromkeys(FINGERPRINT)}}
"""Of a head that left none."""
POLICY = {"4": INCONCLUSIVE, "pass": PASS, "fail": REGRESSION}
EPILOG = """\
a run against three kinds of reference (docs/gates.md):
  python -m harness.gate RUN --baseline results/baselines/rag.json    a committed baseline, same machine
  python -m harness.gate RUN --rules slo.yaml                         constants: its metrics with a limit
  python -m harness.gate --base-ref main -- +workload=rag +engine=continuous load=closed load.requests=24
                                       a git revision and the working tree, measured now in turns

exit codes: 0 pass, 1 regression, 2 usage, 3 invalid, 4 inconclusive
The last line is one JSON object.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m harness.gate",
        description="Did it become worse? Hold a run, or the working tree, against a reference.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("run", metavar="RUN", nargs="?", help="a run directory (not with --base-ref)")
    add("--baseline", metavar="FILE", type=Path, help="a committed baseline")
    add("--write-baseline", action="store_true", help="write it from RUN; tolerances that it holds are kept")
    add("--rules", metavar="FILE", type=Path, help="YAML: metrics, limits, and which can fail the gate")
    policy = "exit code of an inconclusive gate: 4, pass: 0, fail: 1"
    add("--inconclusive", choices=POLICY, default="4", help=policy)
    base = made.add_argument_group(
        "against a git revision, in interleaved rounds; the run's overrides after --"
    )
    add = base.add_argument
    add("--base-ref", metavar="REF", help="branch, tag or commit to measure the working tree against")
    add("--rounds", metavar="N", type=int, help=f"runs of each side (default {ROUNDS}, at least 2)")
    add("--until", choices=("decided",), help="add rounds until every metric is decided")
    add("--max-rounds", metavar="N", type=int, help=f"with --until (default {MAX_ROUNDS})")
    add("--seed", type=int, default=0, help="of the order of the runs (default 0)")
    add("overrides", metavar="OVERRIDE", nargs="*", help="as for python -m harness")
    add_options(made)
    return made


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:end])
    args.overrides += words[end + 1 :]
    try:
        check(args, given="--" in words)
        outputs = chosen(args)
        if args.base_ref is not None:
            return base_ref(args, outputs, console)
        return one_run(args, outputs, console)
    except (OSError, ValueError) as error:
        say(f"error: {in_words(error)}")
        return USAGE


def check(args: argparse.Namespace, given: bool) -> None:
    """Raises OutputError (a ValueError) for options that do not go together."""

    def refuse(message: str) -> None:
        raise OutputError(message)

    if args.base_ref is not None:
        if "=" in (args.run or ""):  # the -- was forgotten
            args.run, args.overrides = None, [args.run, *args.overrides]
        if args.run is not None:
            refuse(f"{args.run}: --base-ref measures its own runs; their overrides follow after --")
        if args.baseline is not None or args.write_baseline:
            refuse(f"--base-ref {args.base_ref}: has its own reference; leave --baseline out")
        rounds = ROUNDS if args.rounds is None else args.rounds
        if rounds < 2:
            refuse(f"--rounds {rounds}: needs 2 or more; one round has no interval")
        if args.max_rounds is not None and args.until is None:
            refuse(f"--max-rounds {args.max_rounds}: goes with --until decided")
        if args.max_rounds is not None and args.max_rounds < rounds:
            refuse(f"--max-rounds {args.max_rounds}: is less than --rounds {rounds}")
        return
    if args.overrides or given:
        refuse(f"{told(args.overrides) or '--'}: overrides go with --base-ref")
    for name in ("rounds", "until", "max_rounds"):
        if getattr(args, name) is not None:
            refuse(f"--{name.replace('_', '-')}: goes with --base-ref")
    if args.run is None or (args.baseline is None and args.rules is None):
        refuse("needs RUN with --baseline FILE or --rules FILE, or --base-ref REF with overrides; see --help")
    if args.write_baseline and args.baseline is None:
        refuse("--write-baseline: needs --baseline FILE, where to write it")


def one_run(args: argparse.Namespace, outputs: dict[str, Path], console: Console | None) -> int:
    """RUN against a baseline, constants, or both."""
    if args.write_baseline and outputs:
        raise OutputError(f"--{next(iter(outputs))}: nothing is judged with --write-baseline; leave one out")
    rules = load_rules(args.rules) if args.rules is not None else None
    summary = read_summary(Path(args.run))
    if rules is not None and summary["valid"]:
        check_paths(rules, summary)
    if args.write_baseline:
        return write(args.baseline, summary, rules)
    if args.baseline is None:
        assert rules is not None
        result, against = gate_constants(summary, rules), rules.source
    else:
        baseline = load_baseline(args.baseline)
        result, against = against_baseline(summary, baseline, rules, args.baseline), str(args.baseline)
    report = Report(result.outcome, result.reasons, against, result.figures, summary)
    return deliver(args, outputs, result, report, console)


def against_baseline(summary: dict[str, Any], baseline: Baseline, rules: Rules | None, path: Path) -> Result:
    """The baseline's own metrics; with rules theirs, and their constants (which no other machine excuses)."""
    if rules is None:
        return gate(summary, baseline)
    result = gate(summary, held_to(baseline, rules, path))
    constants = {r.metric: of_run(r, summary) for r in rules.metrics if r.limit is not None}
    if not constants or result.exit == INVALID:
        return result
    figures = [worse_of(f, constants.pop(f.metric)) if f.metric in constants else f for f in result.figures]
    whole = concluded([*figures, *constants.values()])
    unclear = result.reasons and whole.exit == PASS
    return replace(whole, exit=INCONCLUSIVE if unclear else whole.exit, reasons=result.reasons)


def base_ref(args: argparse.Namespace, outputs: dict[str, Path], console: Console | None) -> int:
    """The working tree against a revision, measured now."""
    from harness.conf import compose
    from harness.plan import check_engine

    rules = load_rules(args.rules) if args.rules is not None else default_rules("base-ref")
    overrides, output = split_output(absolute(args.overrides))
    cfg = compose(overrides)  # what is wrong with them is said before anything is checked out
    check_engine(cfg)
    parent = Path(output or cfg.output.dir).expanduser().resolve()
    rounds = args.rounds or ROUNDS
    plan = Plan(rounds, (args.max_rounds or max(MAX_ROUNDS, rounds)) if args.until else rounds)
    head = head_tree()
    checkout = BaseTree(args.base_ref, head)
    kept: list[Round] = []
    with Interruption() as interruption, checkout as base:
        folder = new_folder(parent)
        runner = Runner((base, head), overrides, folder, random.Random(args.seed))
        interruption.at_once = functools.partial(leave, runner, checkout)
        runner.check_sources()
        same = "; the same commit" if base.sha == head.sha and not head.dirty else ""
        say(f"base {args.base_ref} ({base.label}), head {head.label}{same}")
        try:
            result = hold(watched(runner, plan), rules, plan, kept)
        except KeyboardInterrupt:
            reason = f"interrupted after {len(valid(kept))} rounds; nothing is judged; results: {folder}"
            result = Result(INVALID, reasons=(reason,))
    done = len(valid(kept))
    summary = next((p.summary for r in reversed(kept) if (p := r.passes["head"]).summary), NO_SUMMARY)
    against = f"{args.base_ref} ({base.sha[:10]}), {done} rounds"
    report = Report(result.outcome, result.reasons, against, result.figures, summary)
    record: dict[str, Any] = {
        "base": {"ref": args.base_ref, **machine_tree(base)},
        "head": machine_tree(head),
    }
    record |= {"overrides": overrides, "rules": rules.source, "seed": args.seed}
    record |= {"rounds": [machine_round(r, folder) for r in kept]}
    code = deliver(args, outputs, result, report, console, results=str(folder), valid_rounds=done)
    write_json(folder / "gate.json", {"schema_version": 1, **machine_line(result, report, code), **record})
    return code


def leave(runner: Runner, checkout: BaseTree) -> None:
    """After the second Ctrl-C."""
    runner.kill()
    checkout.remove()


def split_output(overrides: list[str]) -> tuple[list[str], str | None]:
    """(the others, where the gate's own folder goes): each side has a folder inside it."""
    mine = [o for o in overrides if o.lstrip("+").startswith("output.dir=")]
    folder = mine[-1].partition("=")[2].strip("'\"") if mine else None
    return [o for o in overrides if o not in mine], folder


def new_folder(parent: Path) -> Path:
    folder = parent / f"{datetime.now():%Y%m%d-%H%M%S}-gate-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"output.dir={parent}: cannot be written ({error.strerror})") from None
    return folder


def machine_tree(tree: Tree) -> dict[str, Any]:
    return {"sha": tree.sha, "dirty": tree.dirty}


def machine_round(done: Round, folder: Path) -> dict[str, Any]:
    runs = {name: p.run and os.path.relpath(p.run, folder) for name, p in done.passes.items()}
    problems = {"problems": done.problems} if done.problems else {}
    return {"number": done.number, "order": done.order, "runs": runs, "valid": done.valid, **problems}


def watched(runner: Runner, plan: Plan) -> Iterator[Round]:
    found = 0
    for done in runner.rounds():
        found += done.valid
        announce(done, f"{found} of {plan.most}")
        yield done


def deliver(
    args: argparse.Namespace,
    outputs: dict[str, Path],
    result: Result,
    report: Report,
    console: Console | None,
    **more: Any,
) -> int:
    """The table, the files for CI, the line for machines; returns the exit code."""
    print_result(report, console)
    failures = write_all(outputs, report)
    for failure in failures:
        say(f"error: {failure}")
    code = POLICY[args.inconclusive] if result.exit == INCONCLUSIVE else result.exit
    code = USAGE if failures else code
    put(json.dumps(clean(machine_line(result, report, code, **more)), allow_nan=False))
    return code


def write(path: Path, summary: dict[str, Any], rules: Rules | None) -> int:
    """Write a baseline; an invalid run makes none."""
    if not summary["valid"]:
        say(f"error: the run is invalid ({'; '.join(summary['invalid_reasons'])}): no baseline")
        return INVALID
    baseline = make_baseline(summary, load_baseline(path) if path.exists() else None, rules)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, clean(baseline))  # in one step: a full disk leaves the committed one as it was
    put(json.dumps({"baseline": str(path), "run": baseline["run"], "metrics": list(baseline["metrics"])}))
    return PASS
