"""NO_EVICT against MAX_UTILIZATION (TensorRT-LLM's two) with KV pressure and without, in virtual time.

    python -m harness.experiments.eviction

The traffic is that of harness/conf/experiment/eviction.yaml, whose real runs are one sweep away. What
preempting costs depends on what a bigger batch is worth, so the same requests meet two machines: one on which
a decode step costs nearly the same for any batch (below the ridge), and one on which it costs by the sequence
(past the ridge).
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
from harness.experiments.ratios import ratios
from harness.experiments.simulation import Cost, simulate
from harness.plan import draw_schedule

ENGINES = ("no_evict", "max_utilization")
POOLS = {"pressure": 193, "none": 1025}
COSTS = {
    "below the ridge": Cost(),  # model=tiny: 16 seats are about the batch that doubles a step
    "past the ridge": Cost(
        step=0.0003, row=0.0045, token=0.0045
    ),  # a token costs the same wherever it stands
}


@dataclass(frozen=True, slots=True)
class Outcome:
    output_tokens_per_s: float
    ttft_p50_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    preemptions: int
    recomputed: int


def outcome(log: Log) -> Outcome:
    done = log.requests
    ttft = [((r.first_token_ns or 0) - r.arrival_ns) / 1e9 for r in done]
    tpot = [
        ((r.finish_ns or 0) - (r.first_token_ns or 0)) / 1e6 / (r.output_tokens - 1)
        for r in done
        if r.output_tokens > 1
    ]
    return Outcome(
        output_tokens_per_s=sum(r.output_tokens for r in done) / max(r.finish_ns or 0 for r in done) * 1e9,
        ttft_p50_s=float(np.percentile(ttft, 50)),
        tpot_p50_ms=float(np.percentile(tpot, 50)),
        tpot_p99_ms=float(np.percentile(tpot, 99)),
        preemptions=sum(s.preemptions for s in log.steps),
        recomputed=sum(s.recomputed_tokens for s in log.steps),
    )


def experiment(seed: int = 0, requests: int = 120) -> dict[str, Any]:
    """By machine and pool: the ratios, and the outcome of each engine."""
    found: dict[str, Any] = {}
    for machine, cost in COSTS.items():
        for pressure, blocks in POOLS.items():
            part: dict[str, Any] = {}
            for name in ENGINES:
                cfg = compose(
                    [
                        "experiment=eviction",
                        f"engine={name}",
                        f"engine.num_kv_blocks={blocks}",
                        f"load.requests={requests}",
                        f"seed={seed}",
                    ]
                )
                config, schedule = EngineConfig.from_mapping(dict(cfg.engine)), draw_schedule(cfg)
                part[name] = asdict(outcome(simulate(config, schedule, cost)))
                part["ratios"] = ratios(schedule, config, cost)
            found[f"{machine}, KV pressure: {pressure}"] = part
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.experiments.eviction", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=120)
    args = parser.parse_args(argv)
    found = experiment(args.seed, args.requests)
    for title, part in found.items():
        print(f"{title}\n\n{part['ratios'].text()}\n")
        print(
            f"{'virtual time':18}{'tokens/s':>9}{'TTFT p50':>10}{'TPOT p50':>10}{'p99, ms':>9}"
            f"{'preempted':>11}{'recomputed':>12}"
        )
        for name in ENGINES:
            o = Outcome(**part[name])
            print(
                f"{name:18}{o.output_tokens_per_s:9.0f}{o.ttft_p50_s:8.1f} s{o.tpot_p50_ms:10.1f}"
                f"{o.tpot_p99_ms:9.1f}{o.preemptions:11}{o.recomputed:12}"
            )
        print()
        part["ratios"] = asdict(part["ratios"])
    print(
        json.dumps({"experiment": "eviction", "seed": args.seed, "requests": args.requests, "parts": found})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
