"""Where continuous batching does not pay: equal lengths, and low load.

A job of prompts and answers of one length: a static batch has no slot to waste, since all of it ends at
once. And a server so quiet that requests hardly meet: nobody waits for anybody. Static batching is enough
for both, for the whole answer at least: it hands out nothing before the batch has ended, so the first token
is the last one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, column, medians, table
from harness.experiments.outcome import outcome
from harness.experiments.simulation import Played

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENGINES = ("static", "continuous")
WITHIN = 0.05
JOB = ("workload.rate=null", "workload.arrivals.kind=at_once")
QUIET = ("workload.rate=0.5",)
TURNS = 8
"""Of a quiet server, each a few requests: its latency is the machine's speed, which drifts by more than
WITHIN in a minute."""


def run(bench: Bench) -> Findings:
    job = "load.requests=32" if bench.smoke else "load.requests=96"
    quiet = "load.requests=8" if bench.smoke else "load.requests=3" if bench.real else "load.requests=96"
    plays = bench.rounds({f"{e}, job": [f"engine={e}", *JOB, job] for e in ENGINES})
    plays |= bench.rounds({f"{e}, quiet": [f"engine={e}", *QUIET, quiet] for e in ENGINES}, rounds=TURNS)
    found = medians(plays)
    rate = 1 / _ratio(plays, "job", "output_tokens_per_s")
    wait, tail, first = (_ratio(plays, "quiet", name) for name in ("e2e_p50_ms", "e2e_p99_ms", "ttft_p50_ms"))
    return Findings(
        claims=[
            Claim(
                f"a job of equal lengths takes as long either way, within {WITHIN:.0%}",
                "follows: slots wasted are longest / mean, which is 1",
                f"continuous / static: {rate:.3f} x tokens/s",
                abs(rate - 1) <= WITHIN,
            ),
            Claim(
                f"so does a usual answer of a quiet server, within {WITHIN:.0%}",
                "follows: a batch of one is a batch of one",
                f"static / continuous: E2E p50 {wait:.3f} x (p99 {tail:.2f} x)",
                abs(wait - 1) <= WITHIN,
            ),
            Claim(
                "but not its first token: static hands out whole answers",
                "follows",
                f"TTFT p50 {first:.0f} x",
                first > 3,
            ),
        ],
        because=(
            "continuous batching is worth the variance of lengths and the company of others; without "
            "either there is "
            "nothing to win. If answers are equally long and nobody reads them as they come, static is "
            "enough. The tail is "
            "those few who met: one that arrives during another's answer waits for its end."
        ),
        tables=[
            table(
                found,
                {
                    "tokens/s": column("output_tokens_per_s"),
                    "E2E p50, ms": column("e2e_p50_ms"),
                    "E2E p99": column("e2e_p99_ms"),
                    "TTFT p50": column("ttft_p50_ms"),
                    "batch": column("batch_mean"),
                    "useful": lambda o: f"{o.useful:.0%}",
                },
                "engine, load",
            )
        ],
        ratios={
            "job": bench.ratios(plays["continuous, job"][0]),
            "quiet": bench.ratios(
                plays["continuous, quiet"][0], capacity=found["continuous, job"].output_tokens_per_s
            ),
        },
        figure=_figure(rate, wait, tail, first),
        outcomes=found,
    )


def _ratio(plays: Mapping[str, Sequence[Played]], load: str, name: str) -> float:
    """static / continuous: the median over rounds, each against the one beside it."""
    sides = ([getattr(outcome(played), name) for played in plays[f"{e}, {load}"]] for e in ENGINES)
    return statistics.median(a / b for a, b in zip(*sides, strict=True))


def _figure(rate: float, wait: float, tail: float, first: float) -> Figure:
    from harness.experiments.figures import bars, chart, level

    figure = chart(
        "How much better continuous batching is, where lengths are equal", "", "x static", y_type="log"
    )
    labels = ["job: tokens/s", "quiet: E2E p50", "quiet: E2E p99", "quiet: TTFT p50"]
    bars(figure, "continuous", labels, [rate, wait, tail, first], "continuous")
    level(figure, 1.0, "static", "#D55E00")
    return figure


EXPERIMENT = Experiment(
    name="static_is_enough",
    title="Where continuous batching does not pay",
    source="follows from the factorisation of anyscale_throughput",
    published="nothing: gains are published, their absence is not",
    run=run,
    real=True,
    minutes=2,
)
