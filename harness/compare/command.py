"""The command line of a comparison: `python -m harness.compare key=value…`."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from harness.cli import INCONCLUSIVE, INVALID, PASS, guard, parse, put, say
from harness.compare.arms import Arm, make_arms
from harness.compare.refusal import refusals
from harness.compare.result import Result, as_json, conclude
from harness.compare.rounds import Bench, Ended
from harness.compare.settings import Settings, settings, split
from harness.compare.table import print_result
from harness.conf import UsageError
from harness.plan import check_workloads
from harness.standing import Stage

HELP = """\
usage: python -m harness.compare [--dry-run] 'engines=[A,B,...]' [key=value ...]
       python -m harness.compare [--dry-run] 'arms=[{name: NAME, key: value, ...}, ...]' [key=value ...]

Measure arms on the same schedule in interleaved rounds, a warm server each, and say who wins on what.

  python -m harness.compare +workload=rag 'engines=[static,continuous,chunked]' rounds=5
  python -m harness.compare +engine=chunked 'arms=[{name: small, engine.max_num_seqs: 8}, {name: large,
      engine.max_num_seqs: 32}]' until=decided
  python -m harness.compare 'arms=[engine=static, "engine=chunked engine.prefix_cache=true"]'

The first arm is the reference. All other key=value are settings of the runs: see `python -m harness --help`.

  rounds=5            each arm once a round, in a shuffled order that is reversed in every second round
  until=rounds        or decided: stop as soon as every figure has a word, from `rounds` to max_rounds
  max_rounds=15       with until=decided; default three times rounds
  metrics=[PATH,...]  figures of summary.json; PATH:lower or PATH:higher says what is good
  limit=0.05          the smallest effect that matters: nearer to 1 is the same
  confidence=0.95     of the intervals, over all looks together
  vary_seed=false     true: another schedule in each round: the verdict is of the kind of traffic
  aa=true             the reference a second time in every round: what differs by chance alone
  warmup=N            requests of an arm's pass before the first round (default a quarter of the schedule)
  --dry-run           print the plan and how long it takes, and stop
  -h, --help          print this and stop

A folder output.dir/<time>-compare-<hex> holds compare.json, report.html, arms/, rounds/ (run directories).
exit codes: 0 every figure has a word, 2 usage error, 3 refused, cut short or invalid, 4 inconclusive
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.help:
        print(HELP, end="")
        return PASS
    if arguments.multirun:
        raise UsageError("-m: a comparison has arms; sweep with python -m harness -m")
    own, overrides = split(arguments.overrides)
    chosen = settings(own)
    arms = make_arms(overrides, own.get("engines"), own.get("arms"))
    if arguments.dry_run or arms[0].cfg.dry_run:
        from harness.compare.plan import describe_comparison

        put(describe_comparison(arms, chosen))
        return PASS
    return compare(arms, chosen)


def compare(arms: Sequence[Arm], chosen: Settings) -> int:
    """Measure, judge, write, print."""
    check_workloads([arms[0].cfg])
    folder = new_folder(Path(arms[0].cfg.output.dir).expanduser())
    result = Result(arms, chosen, ())
    with Stage() as stage:
        try:
            with Bench(arms, chosen, folder, stage) as bench:
                while result.ended is None and not result.is_over:
                    result = _after_round(result, bench)
                    write(result, folder)
        except (Ended, KeyboardInterrupt) as end:  # while the servers were starting
            result = replace(result, ended=str(end) or "interrupted")
        except UsageError:  # a server has refused its settings
            shutil.rmtree(folder, ignore_errors=True)
            raise
        stage.interruption.on_signal = lambda: say("writing the results; once more to leave at once")
        if result.ended:
            whole = len(result.rounds)
            say(f"{result.ended}; {whole} whole round{'' if whole == 1 else 's'} kept")
        return finish(result, folder)


def _after_round(result: Result, bench: Bench) -> Result:
    """One more round, and what it makes of the result."""
    try:
        one = bench.measure_round()
    except (Ended, KeyboardInterrupt) as end:
        return replace(result, ended=str(end) or "interrupted")
    rounds = (*result.rounds, one)
    refused = refusals(one, result.arms) if one.valid else []
    return conclude(replace(result, rounds=rounds, refused=refused))


def write(result: Result, folder: Path) -> None:
    from harness.metrics.summary import clean
    from harness.records import write_json

    write_json(folder / "compare.json", clean(as_json(result, folder)))


def finish(result: Result, folder: Path) -> int:
    """Table, page, the last line, the exit code."""
    from harness.dashboard import write_dashboard

    if not result.rounds:
        shutil.rmtree(folder / "rounds", ignore_errors=True)
    write(result, folder)
    print_result(result)
    try:
        if result.valid:
            write_dashboard([folder], folder / "report.html")
    finally:
        put(f"results: {folder}")
    if result.ended or result.refused or not result.judged:
        return INVALID
    return PASS if result.decided else INCONCLUSIVE


def new_folder(output: Path) -> Path:
    """Raises UsageError."""
    folder = output / f"{datetime.now():%Y%m%d-%H%M%S}-compare-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"output.dir={output}: cannot be written ({error.strerror})") from None
    return folder
