"""How long should a slice be? SCLS (arXiv 2406.13511) against iteration-level scheduling, in virtual time.

    python -m harness.experiments.slices

Static batches wait for their longest answer. Cut into slices of S tokens they wait for at most S, but whoever
has not ended is prefilled again, with its answer so far. So there are two wastes: slots, rows computed for
answers that have ended and pads in front of prompts, which grow with S; and tokens computed again, which
shrink with it. A prefix cache takes the second away, where the pool is large enough to keep what is between
two slices. Baselines: continuous batching that reserves the worst case, and that takes KV as it goes.

The engine is the real one, the model only takes time (harness/experiments/simulation.py), so the same seed
gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engines.config import EngineConfig
from engines.virtual import Log
from harness.conf import compose
from harness.experiments.ratios import Ratios, ratios
from harness.experiments.simulation import Cost, simulate
from workloads.schedule import Schedule, ScheduledRequest, Segment

SLICES = (16, 32, 64, 128, None)
LIMIT = 512  # tokens that every client declares: a slice of None lasts until the last answer of its batch
POOLS = {
    400: "what is cached is evicted before its next slice",
    2400: "everybody's KV stays cached, and no reservation is too large",
}
BASELINES = {
    "continuous, worst case": ("reservation=prompt_plus_max_tokens",),
    "continuous, incremental": ("reservation=on_demand",),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Waste in tokens for each token of an answer; time until the last answer is out."""

    name: str
    seconds: float
    output_tokens_per_s: float
    slot_waste: float
    recomputed: float
    useful: float  # share of what was computed
    normalized_p50_ms: float  # E2E over tokens of the answer
    normalized_p99_ms: float
    preemptions: int


def traffic(seed: int, requests: int) -> Schedule:
    """All at once: short prompts, and answers that are exponential with mean 100 up to LIMIT, as
    Anyscale drew them (2023)."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(32, 97, requests)
    answers = np.minimum(LIMIT, np.ceil(rng.exponential(100.0, requests))).astype(int)
    rows = tuple(
        ScheduledRequest(
            id=f"r{i:06d}",
            arrival_s=0.0,
            segments=(Segment(f"slices/{i}", int(prompt)),),
            prompt_tokens=int(prompt),
            max_tokens=LIMIT,
            stop_after=int(answer),
        )
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    )
    return Schedule(requests=rows, name="slices", seed=seed)


def engine(name: str, *changes: str) -> EngineConfig:
    """16 seats, prompt and answer of at most 640 tokens."""
    settings = [f"engine.{change}" for change in ("max_model_len=640", *changes)]
    return EngineConfig.from_mapping(dict(compose([f"engine={name}", *settings]).engine))


def configurations(blocks: int) -> dict[str, EngineConfig]:
    found = {}
    pool = f"num_kv_blocks={blocks + 1}"
    for cache in (False, True):
        for size in SLICES:
            name = f"sliced, S={size or 'inf'}" + (", prefix cache" if cache else "")
            changes = f"policy.slice_tokens={size or LIMIT}", f"prefix_cache={str(cache).lower()}"
            found[name] = engine("sliced", pool, *changes)
    return found | {name: engine("continuous", pool, *changes) for name, changes in BASELINES.items()}


def outcome(name: str, log: Log) -> Outcome:
    steps, answers = log.steps, log.requests
    tokens = sum(r.output_tokens for r in answers)
    slots = sum(s.ended_rows + s.left_pad_tokens for s in steps)
    again = sum(s.recomputed_tokens for s in steps)
    useful = sum(s.prefill_tokens + s.decode_tokens for s in steps)
    seconds = max(r.finish_ns or 0 for r in answers) / 1e9
    per_token = [((r.finish_ns or 0) - r.arrival_ns) / 1e6 / r.output_tokens for r in answers]
    return Outcome(
        name=name,
        seconds=seconds,
        output_tokens_per_s=tokens / seconds,
        slot_waste=slots / tokens,
        recomputed=again / tokens,
        useful=useful / (useful + slots + again),
        normalized_p50_ms=float(np.percentile(per_token, 50)),
        normalized_p99_ms=float(np.percentile(per_token, 99)),
        preemptions=sum(s.preemptions for s in steps),
    )


def experiment(seed: int, requests: int, blocks: int) -> tuple[Ratios, list[Outcome]]:
    """blocks: usable ones of the KV pool."""
    schedule, cost = traffic(seed, requests), Cost()
    configs = configurations(blocks)
    found = [outcome(name, simulate(config, schedule, cost)) for name, config in configs.items()]
    return ratios(schedule, next(iter(configs.values())), cost), found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.experiments.slices", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args(argv)
    result: dict[str, Any] = {
        "experiment": "slices",
        "seed": args.seed,
        "requests": args.requests,
        "pools": {},
    }
    for blocks, what in POOLS.items():
        shrunk, found = experiment(args.seed, args.requests, blocks)
        print(f"KV pool of {blocks} blocks: {what}\n\n{shrunk.text()}\n")
        print_table(found)
        result["pools"][blocks] = {"ratios": asdict(shrunk), "outcomes": [asdict(o) for o in found]}
    print("slots, again: tokens wasted for each token of an answer; p50, p99: ms a token, E2E over answer")
    print(json.dumps(result))
    return 0


def print_table(found: Sequence[Outcome]) -> None:
    print(
        f"{'virtual time':30} {'tokens/s':>8} {'slots':>6} {'again':>6} {'useful':>7} {'p50':>6} {'p99':>6}"
    )
    for o in found:
        print(
            f"{o.name:30} {o.output_tokens_per_s:8.0f} {o.slot_waste:6.2f} {o.recomputed:6.2f} "
            f"{o.useful:7.1%} {o.normalized_p50_ms:6.0f} {o.normalized_p99_ms:6.0f}"
        )
    print()


if __name__ == "__main__":
    raise SystemExit(main())
