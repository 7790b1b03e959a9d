"""What an order of the queue changes, in virtual time: `python -m engines.bench_queues [--seed N]`.

A pass takes STEP_S plus TOKEN_S for each token in it; there is no model. Everything else is the engine
itself, so the same seed gives the same figures on every machine. Three questions:

    deadlines   how many requests miss theirs where the load is more than the engine can do?
    tenants     what does a tenant that floods the engine take from one that does not?
    lanes       how long do short prompts wait for their first token among long ones?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from engines.config import EngineConfig
from engines.request import Request
from engines.step_log import RequestRecord
from engines.virtual import Arrival, Log, play

STEP_S = 0.010
TOKEN_S = 0.0002


def cost(rows: int, tokens: int) -> float:
    return STEP_S + TOKEN_S * tokens


def simulate(config: EngineConfig, arrivals: Seq[Arrival]) -> Log:
    """`arrivals` in the order of their time, in seconds; until the last answer is out."""
    blocks = config.num_kv_blocks or 1 + config.max_num_seqs * -(-config.max_model_len // config.block_size)
    return play(config, blocks, arrivals, cost)


def request(prompt: int, answer: int, **more: Any) -> Request:
    """It declares twice what it will answer."""
    return Request([0] * prompt, 2 * answer, stop_after=answer, **more)


def engine_config(scheduler: str = "chunked", **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 4096}
    return EngineConfig(name=scheduler, scheduler=scheduler, **{**values, **changes})


def poisson(rng: Random, rate: float, seconds: float, make: Any) -> list[Arrival]:
    arrivals, at = [], rng.expovariate(rate)
    while at < seconds:
        arrivals.append((at, make()))
        at += rng.expovariate(rate)
    return arrivals


def percentile(values: Seq[float], q: float) -> float:
    return float(np.percentile(values, q)) if values else float("nan")


def seconds(record: RequestRecord, since: str, until: str) -> float:
    return float(getattr(record, until) - getattr(record, since)) / 1e9


# -- deadlines -----------------------------------------------------------------------------------------------

RATES = {"just above capacity": 14.0, "far above": 16.0}  # requests per second
USUAL = {"pace": "usual", "least_answer": 32}
DEADLINE_ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "deadline, nobody dropped": {"queue": "deadline", "queue_policy": {"drop": False}},
    "deadline": {"queue": "deadline", "queue_policy": {"least_answer": 16}},
    "deadline, pace=usual": {"queue": "deadline", "queue_policy": USUAL},
    "deadline_then_fair": {"queue": "deadline_then_fair", "queue_policy": {**USUAL, "margin_ms": 2000}},
}


@dataclass(frozen=True)
class Missed:
    requests: int
    late: int  # answered after their deadline
    dropped: int

    @property
    def missed(self) -> int:
        return self.late + self.dropped


def deadlines(seed: int, rate: float, lasting_s: float = 60.0) -> dict[str, Missed]:
    """Each request is due 2 to 8 s after its arrival."""
    rng = Random(seed)

    def make() -> Request:
        return request(rng.randint(50, 400), rng.randint(16, 48), deadline_ms=rng.uniform(2000, 8000))

    arrivals = poisson(rng, rate, lasting_s, make)
    found = {}
    for name, changes in DEADLINE_ORDERS.items():
        late = dropped = 0
        for record in simulate(engine_config(**changes), arrivals).requests:
            due_ms = arrivals[record.seq_id][1].deadline_ms or 0.0
            if record.finish_reason == "deadline":
                dropped += 1
            elif seconds(record, "arrival_ns", "finish_ns") * 1e3 > due_ms:
                late += 1
        found[name] = Missed(len(arrivals), late, dropped)
    return found


# -- tenants -------------------------------------------------------------------------------------------------

TENANT_ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "fair": {"queue": "fair"},
}


@dataclass(frozen=True)
class Shared:
    heavy_share: float  # of the output tokens while both had something to wait for
    light_wait_p50_s: float
    light_wait_p99_s: float
    heavy_wait_p99_s: float


def tenants(seed: int) -> dict[str, Shared]:
    """The light tenant sends 4 requests a second; at 5 s the heavy one sends 400 at once."""
    found = {}
    for name, changes in TENANT_ORDERS.items():
        rng = Random(seed)
        light = poisson(rng, 4.0, 40.0, lambda rng=rng: request(rng.randint(50, 200), 32, tenant="light"))
        heavy = [(5.0, request(rng.randint(50, 200), 32, tenant="heavy")) for _ in range(400)]
        log = simulate(engine_config(**changes), sorted([*light, *heavy], key=lambda a: a[0]))
        waits: dict[str, list[float]] = {"light": [], "heavy": []}
        for record in log.requests:
            waits[record.tenant].append(seconds(record, "arrival_ns", "admitted_ns"))
        both = [r for r in log.requests if r.finish_ns is not None and 5e9 <= r.finish_ns <= 20e9]
        tokens = sum(r.output_tokens for r in both)
        found[name] = Shared(
            sum(r.output_tokens for r in both if r.tenant == "heavy") / tokens,
            percentile(waits["light"], 50),
            percentile(waits["light"], 99),
            percentile(waits["heavy"], 99),
        )
    return found


# -- lanes ---------------------------------------------------------------------------------------------------

LANES: dict[str, dict[str, Any]] = {
    "one queue": {},
    "lanes": {"lanes": {"interactive": {"weight": 4.0}, "long_context": {"weight": 1.0}}},
    "lanes with own budgets": {
        "lanes": {
            "interactive": {"weight": 4.0},
            "long_context": {"weight": 1.0, "max_num_seqs": 4, "max_num_batched_tokens": 384},
        }
    },
}


@dataclass(frozen=True)
class FirstTokens:
    interactive_p50_s: float
    interactive_p99_s: float
    long_p50_s: float
    end_s: float  # when the last answer is out


def lanes(seed: int, lasting_s: float = 60.0) -> dict[str, FirstTokens]:
    """Prompts of 20 to 100 tokens, 6 a second, among prompts of 2,000 to 3,500, one in two seconds."""
    found = {}
    for name, changes in LANES.items():
        rng = Random(seed)
        short = poisson(
            rng,
            6.0,
            lasting_s,
            lambda rng=rng: request(rng.randint(20, 100), 24, request_class="interactive"),
        )
        long = poisson(
            rng,
            0.5,
            lasting_s,
            lambda rng=rng: request(rng.randint(2000, 3500), 64, request_class="long_context"),
        )
        log = simulate(engine_config(**changes), sorted([*short, *long], key=lambda a: a[0]))
        ttft: dict[str, list[float]] = {"interactive": [], "long_context": []}
        for record in log.requests:
            ttft[record.request_class].append(seconds(record, "arrival_ns", "first_token_ns"))
        found[name] = FirstTokens(
            percentile(ttft["interactive"], 50),
            percentile(ttft["interactive"], 99),
            percentile(ttft["long_context"], 50),
            max(record.finish_ns or 0 for record in log.requests) / 1e9,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engines.bench_queues", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    for load, rate in RATES.items():
        print(f"{f'deadlines, {load}':32} {'requests':>9} {'missed':>9} {'late':>9} {'dropped':>9}")
        for name, m in deadlines(seed, rate).items():
            print(f"  {name:30} {m.requests:9} {m.missed:9} {m.late:9} {m.dropped:9}")
    print(f"{'tenants':32} {'heavy %':>9} {'light p50':>9} {'light p99':>9} {'heavy p99':>9}  queue wait, s")
    for name, s in tenants(seed).items():
        waits = f"{s.light_wait_p50_s:9.2f} {s.light_wait_p99_s:9.2f} {s.heavy_wait_p99_s:9.2f}"
        print(f"  {name:30} {s.heavy_share:9.0%} {waits}")
    print(f"{'lanes':32} {'short p50':>9} {'short p99':>9} {'long p50':>9} {'all out':>9}  TTFT, s")
    for name, t in lanes(seed).items():
        figures = f"{t.interactive_p50_s:9.2f} {t.interactive_p99_s:9.2f} {t.long_p50_s:9.2f} {t.end_s:9.1f}"
        print(f"  {name:30} {figures}")


if __name__ == "__main__":
    main()
