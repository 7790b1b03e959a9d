"""The command line of a comparison: `python -m harness.compare key=value…`."""

from __future__ import annotations

import sys

from harness.cli import PASS, guard, parse, put
from harness.conf import UsageError

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
    from harness.compare.arms import make_arms
    from harness.compare.settings import settings, split

    own, overrides = split(arguments.overrides)
    chosen = settings(own)
    arms = make_arms(overrides, own.get("engines"), own.get("arms"))
    if arguments.dry_run or arms[0].cfg.dry_run:
        from harness.compare.plan import describe_comparison

        put(describe_comparison(arms, chosen))
        return PASS
    from harness.compare.session import compare

    return compare(arms, chosen)
