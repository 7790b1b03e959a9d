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
start of the next."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from omegaconf import OmegaConf

import engines.engine
from engines.batch import Copies, RaggedBatch, StepResult
from engines.config import EngineConfig
from engines.engine import Engine
from engines.request import Request
from engines.step_log import RequestRecord, StepRecord
from harness.conf import choices, compose

PROMPT, ANSWER, BLOCK = 64, 256, 16
PARTS = ("schedule", "publish", "assemble")
GOAL_US = {"running": 256, "waiting": 1000, "us": 300.0}


class NoModel:
    def run(self, batch: RaggedBatch) -> StepResult:
        return StepResult(np.zeros(len(batch.sample_rows), dtype=np.int64))

    def copy(self, copies: Copies) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    unknown = sorted(set(args.presets) - set(presets()))
    if unknown:
        print(f"--presets {unknown[0]}: choose from {', '.join(presets())}", file=sys.stderr)
        return 2
    if args.host_gap:
        return host_gap(args)
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


class _Log:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        pass

    def flush(self) -> None:
        pass


def presets() -> list[str]:
    return [name for name in choices("engine") if name != "openai"]


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


def busy_engine(preset: str, running: int, waiting: int, runner: Any = None) -> Engine:
    config = preset_config(preset, running)
    engine = Engine(config, runner or NoModel(), num_kv_blocks=config.num_kv_blocks or 0)
    top_up(engine, running + waiting)
    engine.step()
    return engine


def preset_config(preset: str, running: int) -> EngineConfig:
    """The preset with `running` seats, and KV for as many and a few more."""
    longest = PROMPT + ANSWER
    limits = [
        f"engine.max_num_seqs={running}",
        f"engine.max_num_batched_tokens={max(65536, running * longest)}",
        f"engine.max_model_len={longest}",
        f"engine.block_size={BLOCK}",
        f"engine.num_kv_blocks={1 + (running + 64) * -(-longest // BLOCK)}",
    ]
    if preset == "dynamic":
        limits.append(f"engine.policy.preferred_batch_sizes=[{running}]")
    node: Any = OmegaConf.to_container(compose([f"engine={preset}", *limits]).engine)
    return EngineConfig.from_mapping(node)


_lengths = random.Random(7)


def top_up(engine: Engine, waiting: int) -> None:
    while len(engine.scheduler.waiting) < waiting:
        engine.add(Request([1] * PROMPT, _lengths.randint(1, ANSWER), ignore_eos=True))


class Stopwatch:
    """Adds up the time that the engine spends in its parts."""

    def __init__(self, engine: Engine) -> None:
        self.spent: Counter[str] = Counter()
        self._assemble = engines.engine.assemble
        engine.scheduler.schedule = self._timed("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
        engine.scheduler.published = self._timed("publish", engine.scheduler.published)  # type: ignore[method-assign]
        engine._publish = self._timed("publish", engine._publish)  # type: ignore[method-assign]
        engine._dismiss = self._timed("publish", engine._dismiss)  # type: ignore[method-assign]
        engines.engine.assemble = self._timed("assemble", self._assemble)

    def stop(self) -> None:
        engines.engine.assemble = self._assemble

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args)
            finally:
                self.spent[part] += time.thread_time() - begin  # type: ignore[assignment]

        return call


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m engines.bench_scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--presets", nargs="+", default=presets(), help="engines of harness/conf/engine")
    p.add_argument("--running", nargs="+", type=int, default=[16, 64, 256, 1024])
    p.add_argument("--host-gap", metavar="MODEL", help="over a real model: tiny or smollm2")
    p.add_argument("--waiting", type=int, default=1000)
    p.add_argument("--steps", type=int, default=200)
    return p


if __name__ == "__main__":
    sys.exit(main())
