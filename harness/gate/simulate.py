"""`python -m harness.gate.simulate`: how often the gate errs, with noise that was recorded on a real machine.

noise.json holds what base and head measured in rounds in which both were the same commit. A simulated gate
draws rounds from them (whole rounds, so that the metrics of one hang together as they did), exchanges the
sides at random, which nothing can tell apart in such rounds, makes the head slower by a factor, and asks the
very code that judges real rounds. `--record FOLDER...` writes such a file from gates of one commit."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cli import guard, put, say
from harness.conf import UsageError
from harness.gate.interleaved import Plan, hold, valid
from harness.gate.outcome import PASS, REGRESSION, USAGE, Result
from harness.gate.reading import measured, read_summary
from harness.gate.rounds import Pass, Round
from harness.gate.rules import DATA, Rules, default_rules, load_rules
from harness.table import grid

NOISE = DATA / "noise.json"
SLOW = 0.15
SCALES = {"latency_ms": 1, "throughput": -1}
"""The power of the slow-down that a figure takes, in a closed loop; counts and shares take none."""
UNSCALED = ("throughput.slo_attainment",)


@dataclass(frozen=True, slots=True)
class Noise:
    """rounds: of each recorded round, each side's figures by their path."""

    about: str
    rounds: tuple[tuple[dict[str, float], dict[str, float]], ...]


def load_noise(path: Path = NOISE) -> Noise:
    """Raises UsageError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        columns = data["metrics"]
        count = {len(column[side]) for column in columns.values() for side in ("base", "head")}
        if len(count) != 1 or not count.isdisjoint({0, 1}):
            raise ValueError("needs two or more rounds, as many of each metric")
        rounds = tuple(
            tuple(
                {name: float(column[side][k]) for name, column in columns.items()}
                for side in ("base", "head")
            )
            for k in range(count.pop())
        )
        return Noise(str(data["about"]), rounds)  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: is no recorded noise ({error}); --record makes one") from None


def record(folders: Sequence[Path], rules: Rules, about: str) -> dict[str, Any]:
    """Noise from gates whose base and head were the same: the figures of their valid rounds that both sides
    have in all of them. Raises UsageError, OSError and ValueError."""
    sides: dict[str, list[dict[str, Any]]] = {"base": [], "head": []}
    for folder in folders:
        gate = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
        if gate["base"]["sha"] != gate["head"]["sha"] or gate["head"]["dirty"]:
            raise UsageError(
                f"{folder}: its base and head are not the same commit, so not all of it is noise"
            )
        for done in gate["rounds"]:
            if done["valid"]:
                for side, summaries in sides.items():
                    summaries.append(read_summary(folder / done["runs"][side]))
    metrics = {}
    for rule in rules.metrics:
        columns = {
            side: [measured(s, rule.metric)[0] for s in summaries] for side, summaries in sides.items()
        }
        if all(value is not None for column in columns.values() for value in column):
            metrics[rule.metric] = columns
    return {"schema_version": 1, "about": about, "metrics": metrics}


def drawn(noise: Noise, slow: float, rng: random.Random) -> Iterator[Round]:
    """Simulated rounds without end, the head slower by this share."""
    for number in range(1, sys.maxsize):
        first, second = rng.choice(noise.rounds)
        if rng.random() < 0.5:
            first, second = second, first
        head = {name: value * (1 + slow) ** _scale(name) for name, value in second.items()}
        passes = {side: _pass(side, figures) for side, figures in (("base", first), ("head", head))}
        yield Round(number, ("base", "head"), passes)


def _scale(metric: str) -> int:
    return 0 if metric in UNSCALED else SCALES.get(metric.partition(".")[0], 0)


def _pass(side: str, figures: dict[str, float]) -> Pass:
    summary: dict[str, Any] = {"run": {"fingerprint": {"schedule": "recorded"}}}
    for path, value in figures.items():
        *blocks, name = path.split(".")
        block = summary
        for key in blocks:
            block = block.setdefault(key, {})
        block[name] = value
    return Pass(side, None, summary, None, PASS)


def simulate(
    noise: Noise, rules: Rules, plan: Plan, *, slow: float, times: int, seed: int = 0
) -> list[tuple[Result, int]]:
    """(verdict, rounds that it took) of that many simulated gates."""
    results = []
    for number in range(times):
        kept: list[Round] = []
        rng = random.Random(f"{seed} {slow} {number}")
        result = hold(drawn(noise, slow, rng), rules, plan, kept)
        results.append((result, len(valid(kept))))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.gate.simulate",
        description="How often the gate errs, with recorded noise. Exit 1: more than its rules promise.",
    )
    parser.add_argument("--noise", metavar="FILE", type=Path, default=NOISE, help="default: the recorded one")
    parser.add_argument("--rules", metavar="FILE", type=Path, help="default: those of --base-ref")
    parser.add_argument(
        "--slow", type=float, default=SLOW, help=f"share that the head is slower (default {SLOW})"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-rounds", type=int, help="as with --until decided (default: --rounds)")
    parser.add_argument("--times", type=int, default=1000, help="simulated gates of each kind (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", metavar="FOLDER", type=Path, nargs="+", help="write --noise from these gates"
    )
    parser.add_argument("--about", default="", help="with --record: where and how they were measured")
    args = parser.parse_args(argv)
    rules = load_rules(args.rules) if args.rules is not None else default_rules("base-ref")
    if args.record:
        data = record(args.record, rules, args.about)
        args.noise.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        put(f"{args.noise}: {len(data['metrics'])} metrics")
        return PASS
    most = args.max_rounds or args.rounds
    if args.rounds < 2 or most < args.rounds or args.times < 1:
        say(f"error: --rounds {args.rounds} --max-rounds {most}: needs 2 <= rounds <= most, and --times 1")
        return USAGE
    noise, plan = load_noise(args.noise), Plan(args.rounds, most)
    put(f"{len(noise.rounds)} recorded rounds: {noise.about}")
    table = grid("head", "pass", "regression", "inconclusive", "rounds (mean)")
    shares = {}
    for slow in (0.0, args.slow):
        results = simulate(noise, rules, plan, slow=slow, times=args.times, seed=args.seed)
        words = Counter(result.outcome for result, _ in results)
        shares[slow] = {word: words[word] / args.times for word in ("pass", "regression", "inconclusive")}
        mean = sum(rounds for _, rounds in results) / args.times
        cells = [f"{100 * share:.1f} %" for share in shares[slow].values()]
        table.add_row("the same" if not slow else f"{100 * slow:g} % slower", *cells, f"{mean:.1f}")
    from rich.console import Console

    Console(highlight=False).print(table)
    put(json.dumps({"same": shares[0.0], "slower": shares[args.slow], "rounds": args.rounds, "most": most}))
    kept = shares[0.0]["regression"] <= rules.false_alarms and shares[args.slow]["pass"] <= rules.misses
    return PASS if kept else REGRESSION


if __name__ == "__main__":
    sys.exit(guard(main))
