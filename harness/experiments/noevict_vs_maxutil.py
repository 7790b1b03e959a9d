"""NO_EVICT against MAX_UTILIZATION (TensorRT-LLM's two) with KV pressure and without.

What preempting costs depends on what a bigger batch is worth, so in virtual time the same requests meet two
machines: one on which a decode step costs nearly the same for any batch (below the ridge), and one on which
it costs by the sequence (past the ridge).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, column, medians, table
from harness.experiments.outcome import Outcome
from harness.experiments.ratios import Ratios
from harness.experiments.simulation import Cost

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENGINES = ("no_evict", "max_utilization")
POOLS = {"pressure": 193, "no pressure": 1025}
COSTS = {
    "below the ridge": Cost(),  # model=tiny: 16 seats are about the batch that doubles a step
    "past the ridge": Cost(
        step=0.0003, row=0.0045, token=0.0045
    ),  # a token costs the same wherever it stands
}


def run(bench: Bench) -> Findings:
    requests = ("load.requests=24",) if bench.smoke else ()
    found: dict[str, dict[str, Outcome]] = {}
    ratios: dict[str, Ratios] = {}
    for machine, cost in COSTS.items() if not bench.real else [("this machine", None)]:
        points = {
            f"{engine}, {pressure}": (f"engine={engine}", f"engine.num_kv_blocks={blocks}", *requests)
            for pressure, blocks in POOLS.items()
            for engine in ENGINES
        }
        plays = bench.rounds(points, cost=cost)
        found[machine] = medians(plays)
        ratios |= {f"{machine}, {p}": bench.ratios(plays[f"no_evict, {p}"][0], cost) for p in POOLS}
    rate, tail = _ratio(found, "output_tokens_per_s"), _ratio(found, "tpot_p99_ms")
    first = _ratio(found, "ttft_p50_ms")
    slack = 0.0 if not bench.real else 0.1
    claims = [
        Claim(
            "under pressure MAX_UTILIZATION has a p99 TPOT several times as long",
            "9.1 x",
            ", ".join(f"{tail[m, 'pressure']:.1f} x {m}" for m in found),
            all(tail[m, "pressure"] > 2 for m in found),
        ),
        *(
            Claim(
                f"and less throughput, {machine}",
                "-40.6 %",
                f"{100 * (rate[machine, 'pressure'] - 1):+.0f} %",
                rate[machine, "pressure"] < 1,
            )
            for machine in found
        ),
        *(
            Claim(
                f"and a shorter time to the first token, {machine}",
                "27.1 s against 35.8 s (0.76 x)",
                f"{first[machine, 'pressure']:.2f} x",
                first[machine, "pressure"] < 1,
            )
            for machine in found
        ),
        Claim(
            "without pressure they are equal",
            "equal",
            ", ".join(f"{rate[m, 'no pressure']:.2f} x {m}" for m in found),
            all(abs(rate[m, "no pressure"] - 1) <= slack for m in found),
        ),
    ]
    columns = {
        "tokens/s": column("output_tokens_per_s"),
        "TTFT p50, ms": column("ttft_p50_ms"),
        "TPOT p50, ms": column("tpot_p50_ms"),
        "p99, ms": column("tpot_p99_ms"),
        "preempted": column("preemptions"),
        "recomputed": column("recomputed"),
    }
    return Findings(
        claims=claims,
        because=(
            "where a step costs nearly the same for any batch the fuller pool pays for all that is "
            "computed again, and "
            "MAX_UTILIZATION is the faster one; past the ridge a bigger batch buys nothing and "
            "recomputation is all "
            "loss, as the user found. The long tail is there either way: a paused answer stands still."
        ),
        tables=[table(part, columns, "engine, KV", machine) for machine, part in found.items()],
        ratios=ratios,
        figure=_figure(found),
        outcomes=found,
    )


def _ratio(found: dict[str, dict[str, Outcome]], name: str) -> dict[tuple[str, str], float]:
    """max_utilization / no_evict, by machine and pressure."""
    return {
        (machine, p): getattr(part[f"max_utilization, {p}"], name) / getattr(part[f"no_evict, {p}"], name)
        for machine, part in found.items()
        for p in POOLS
    }


def _figure(found: dict[str, dict[str, Outcome]]) -> Figure:
    from harness.experiments.figures import bars, chart, level

    figure = chart("MAX_UTILIZATION over NO_EVICT", "", "x no_evict")
    rate, tail = _ratio(found, "output_tokens_per_s"), _ratio(found, "tpot_p99_ms")
    labels = [f"{machine},<br>{p}" for machine in found for p in POOLS]
    bars(figure, "tokens/s", labels, list(rate.values()), "tokens/s")
    bars(figure, "TPOT", labels, list(tail.values()), "TPOT p99")
    level(figure, 1.0, "")
    return figure


EXPERIMENT = Experiment(
    name="noevict_vs_maxutil",
    title="To evict or not",
    source="TensorRT-LLM#16827 (a user's measurement)",
    published="KV oversubscribed: -40.6 % throughput and 9.1 x p99 TPOT under MAX_UTILIZATION, a better "
    "TTFT; equal without pressure",
    run=run,
    real=False,
    minutes=0.1,
)
