"""Published results rerun: `python -m harness.experiments [NAME | gallery]`.

Without a name, the list. With one, that experiment: a table for people, the claims with what was published
beside what came out, a verdict, and the five ratios; -o also writes <name>.json, .md and .png. `gallery`
runs them all, each in a process of its own, and writes the index.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli import PASS, REGRESSION, guard, put, say

GALLERY = "gallery"
EPILOG = """\
exit codes: 0 it ran (whatever the verdict), 1 a promise of ours was broken, 2 usage, 3 it could not run
real: model=tiny in this process, no server; virtual: the same engine, and a model that only takes time
over HTTP a single point is `python -m harness +experiment=NAME +engine=X`
"""


def main(argv: Sequence[str] | None = None) -> int:
    return guard(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.experiments",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="an experiment, or gallery for all; without it, the list")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--virtual", action="store_true", help="in virtual time, also where time should be real")
    how.add_argument(
        "--real", action="store_true", help="a model on this machine, also where counts would do"
    )
    parser.add_argument("--smoke", action="store_true", help="a minimal form: does it run at all?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="folder for <name>.json, .md and .png")
    parser.add_argument(
        "--resume", action="store_true", help="gallery: skip what has been finished in this form"
    )
    parser.add_argument("--timeout", type=float, default=900, help="gallery: seconds for each of them (900)")
    args = parser.parse_args(argv)
    if args.name is None:
        put(listing())
        return PASS
    if args.name == GALLERY:
        from harness.experiments.gallery import gallery

        return gallery(args)
    return run_one(args)


def run_one(args: argparse.Namespace) -> int:
    from harness.experiments.experiment import Bench
    from harness.experiments.registry import experiment
    from harness.experiments.result import result, text

    chosen = experiment(args.name)
    real = args.real or (chosen.real and not args.virtual)
    began = time.monotonic()
    bench = Bench(chosen.name, real=real, smoke=args.smoke, seed=args.seed, say=say)
    if real and not args.smoke:
        from harness.host import HostLock

        with HostLock() as lock:  # two measured runs on one host would measure each other
            lock.acquire(say)
            findings = chosen.run(bench)
    else:
        findings = chosen.run(bench)
    found = result(
        chosen, findings, real=real, smoke=args.smoke, seed=args.seed, seconds=time.monotonic() - began
    )
    put(text(found))
    if args.output is not None:
        from harness.experiments.gallery import write_result

        put(f"results: {write_result(found, args.output)}")
    return exit_code(found)


def exit_code(found: dict[str, Any]) -> int:
    broken = [claim for claim in found["claims"] if claim["promise"] and not claim["held"]]
    for claim in broken:
        say(f"broken promise: {claim['text']}: {claim['measured']}")
    return REGRESSION if broken else PASS


def listing() -> str:
    from harness.experiments.registry import all_experiments

    lines = [f"{'experiment':28}{'time':>9}  {'':8}title"]
    for e in all_experiments():
        lines.append(f"{e.name:28}{minutes(e.minutes):>9}  {'real' if e.real else 'virtual':8}{e.title}")
    return "\n".join(
        [
            *lines,
            "",
            "python -m harness.experiments NAME [--virtual | --real] [--smoke] [-o DIR]; NAME=gallery: all",
        ]
    )


def minutes(value: float) -> str:
    return f"{value:g} min" if value >= 1 else f"{60 * value:.0f} s"
