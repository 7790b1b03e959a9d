"""What a scheduler costs itself: `python -m engines.bench_scheduler [--presets continuous chunked ...]`.

The engine over a model that takes no time, in the steady state of a busy server: `running` sequences and
`waiting` more in the queue, prompts of 64 tokens, answers of 1 to 256, so that in every iteration some end
and others enter. Microseconds of CPU time an iteration, mean of --steps iterations after as many for warming
up (CPU time: what other processes take is not the scheduler's):

    schedule   Scheduler.schedule: who gets how many tokens
    publish    tokens appended, ends seen, seats and KV given back, outputs made
    sum        of these two: the scheduler's own cost
    assemble   from the plan to the arrays of the pass
    records    the rest of the host's work: tallies, the step record, admission's figures

`growth` is that of the sum from the fewest to the most running, over that of running: 1.00 is linear. Last
line: JSON.

    python -m engines.bench_scheduler --host-gap smollm2 [--presets chunked] [--running 32]

is the same engine over a real model: what of an iteration is the host gap, from the end of a pass to the
start of the next.

    python -m engines.bench_scheduler --peer vllm transformers [--presets chunked]

puts the schedulers of other systems beside ours, in the same process and on the same requests; what each
figure includes is in engines/bench_peers.py. A peer that is not installed is skipped."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from engines import bench_peers
from engines.busy import ANSWER, PROMPT, Stopwatch, busy_engine, preset_config, presets, top_up
from engines.step_log import RequestRecord, StepRecord

PARTS = ("schedule", "publish", "assemble")
GOAL_US = {"running": 256, "waiting": 1000, "us": 300.0}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.presets = args.presets or (["chunked"] if args.peer else presets())
    unknown = sorted(set(args.presets) - set(presets()))
    if unknown:
        print(f"--presets {unknown[0]}: choose from {', '.join(presets())}", file=sys.stderr)
        return 2
    if args.host_gap:
        return host_gap(args)
    if args.peer:
        return peers(args)
    print(
        f"{args.waiting} waiting, prompts of {PROMPT}, answers of 1 to {ANSWER}; CPU us an iteration, "
        f"mean of {args.steps}"
    )
    print(
        f"{'preset':<17}{'running':>8}"
        + "".join(f"{name:>10}" for name in ("schedule", "publish", "sum", "assemble", "records"))
        + f"{'growth':>8}"
    )
    rows = []
    for name in args.presets:
        own = []
        for running in args.running:
            row = measure(name, running, args.waiting, args.steps)
            own.append(row)
            if running == max(args.running) and len(own) > 1:
                row["growth"] = round(row["sum"] / own[0]["sum"] / (running / own[0]["running"]), 3)
            growth = f"{row['growth']:>8.2f}" if "growth" in row else ""
            figures = (row["schedule"], row["publish"], row["sum"], row["assemble"], row["records"])
            print(f"{name:<17}{running:>8}" + "".join(f"{figure:>10.1f}" for figure in figures) + growth)
        rows += own
    host = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    print(
        json.dumps(
            {
                "bench": "scheduler",
                "unit": "us",
                "goal": GOAL_US,
                **host,
                "waiting": args.waiting,
                "steps": args.steps,
                "rows": rows,
            }
        )
    )
    return 0


def host_gap(args: argparse.Namespace) -> int:
    """A median of every iteration's share: a pass that the machine interrupts says nothing."""
    from engines.runner import build_runner  # torch

    rows = []
    for preset in args.presets:
        for running in args.running:
            config = preset_config(preset, running)
            runner = build_runner(
                {"name": args.host_gap, "id": None, "impl": "lean", "weights": None}, config
            )
            engine = busy_engine(preset, running, args.waiting, runner)
            engine.recorder.log = log = _Log()  # type: ignore[assignment]
            for _ in range(args.steps):
                top_up(engine, args.waiting)
                engine.step()
            gaps = [(s.host_gap_ns, s.duration_ns) for s in log.steps if s.host_gap_ns is not None]
            share = statistics.median(gap / (gap + duration) for gap, duration in gaps)
            gap_ms = statistics.median(gap for gap, _ in gaps) / 1e6
            pass_ms = statistics.median(duration for _, duration in gaps) / 1e6
            print(
                f"{preset}, {running} running on {args.host_gap}: pass {pass_ms:.2f} ms, "
                f"host gap {gap_ms:.3f} ms, {share:.2%} of an iteration"
            )
            rows.append(
                {
                    "preset": preset,
                    "running": running,
                    "model": args.host_gap,
                    "pass_ms": pass_ms,
                    "host_gap_ms": gap_ms,
                    "share": share,
                }
            )
    print(json.dumps({"bench": "host_gap", "steps": args.steps, "rows": rows}))
    return 0


def peers(args: argparse.Namespace) -> int:
    """Ours beside those of other systems that are installed."""
    versions = {name: bench_peers.version(name) for name in args.peer}
    for name in [name for name, version in versions.items() if version is None]:
        print(f"--peer {name}: skipped, {name} is not installed in this environment", file=sys.stderr)
        del versions[name]
    if not versions:
        return 2
    print(
        f"{args.waiting} waiting, prompts of {PROMPT}, answers of 1 to {ANSWER}; CPU us an iteration, "
        f"mean of {args.steps}, in turn; {', '.join(f'{name} {v}' for name, v in versions.items())}"
    )
    columns = ("schedule", "update", "sum", "times_ours", "same")
    print(f"{'side':<17}{'running':>8}" + "".join(f"{name:>11}" for name in columns))
    rows = []
    for preset in args.presets:
        for running in args.running:
            for row in bench_peers.compare(preset, list(versions), running, args.waiting, args.steps):
                figures = "".join(f"{row[name]:>11}" for name in columns)
                print(f"{row['side']:<17}{running:>8}{figures}", flush=True)
                rows.append({"preset": preset, **row})
    print(json.dumps({"bench": "scheduler_peers", "unit": "us", "versions": versions, "rows": rows}))
    return 0


class _Log:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        pass

    def flush(self) -> None:
        pass


def measure(preset: str, running: int, waiting: int, steps: int) -> dict[str, Any]:
    """The parts of an iteration, in microseconds."""
    engine = busy_engine(preset, running, waiting)
    clocks = Stopwatch(engine)
    seconds: dict[str, list[float]] = {name: [] for name in (*PARTS, "sum", "records")}
    gc.collect()
    gc.disable()  # a pass over all objects now and then would be somebody's bad luck
    try:
        for i in range(2 * steps):
            top_up(engine, waiting)
            clocks.spent.clear()
            begin = time.thread_time()
            engine.step()
            total, spent = time.thread_time() - begin, clocks.spent
            if i >= steps:
                for name in PARTS:
                    seconds[name].append(spent[name])
                seconds["sum"].append(spent["schedule"] + spent["publish"])
                seconds["records"].append(total - sum(spent.values()))
    finally:
        gc.enable()
        clocks.stop()
    parts = {name: round(statistics.fmean(values) * 1e6, 1) for name, values in seconds.items()}
    return {"preset": preset, "running": running, **parts}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m engines.bench_scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--presets", nargs="+", help="engines of harness/conf/engine; all, with --peer chunked")
    p.add_argument("--running", nargs="+", type=int, default=[16, 64, 256, 1024])
    p.add_argument("--host-gap", metavar="MODEL", help="over a real model: tiny or smollm2")
    p.add_argument("--peer", nargs="+", choices=list(bench_peers.PEERS), help="other systems' schedulers")
    p.add_argument("--waiting", type=int, default=1000)
    p.add_argument("--steps", type=int, default=200)
    return p


if __name__ == "__main__":
    sys.exit(main())
