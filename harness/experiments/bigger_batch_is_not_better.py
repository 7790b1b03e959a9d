"""A bigger batch is not better past the ridge: throughput stops growing, the time of a token does not.

As many users as there are seats each ask again as soon as they have their answer (a closed loop), so that
every seat is taken, with max_num_seqs from 4 to 256. Up to the ridge, where a decode
step takes twice as long as it does for nobody, seats buy throughput for little; past it they buy little,
for TPOT in proportion. So goodput, the requests a second that meet both limits, has its best in the middle.
The TPOT limit is a multiple of what this machine does, so that the question is the same everywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, number
from harness.experiments.outcome import fitted_cost, outcome
from harness.experiments.simulation import Cost, Played

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SEATS = (4, 8, 16, 32, 64, 128, 256)
TURNS, LEAST = 4, 64
"""Requests of each user, and of all together at least."""
TTFT_MS, TPOT_TIMES = 2000.0, 3.0
"""Limits: the second in TPOT of an idle engine."""


def goodput(played: Played, ttft_ms: float, tpot_ms: float) -> float:
    """Requests/s within both limits."""
    met = 0
    for seen in played.seen:
        first, last = seen.tokens[0][0], seen.tokens[-1][0]
        ttft = (first - seen.intended_s) * 1e3
        tpot = (last - first) * 1e3 / max(1, seen.count - seen.tokens[0][1])
        met += ttft <= ttft_ms and tpot <= tpot_ms
    return met / (max(s.end_s or 0.0 for s in played.seen) - min(s.intended_s for s in played.seen))


def run(bench: Bench) -> Findings:
    seats = (1, 8, 64) if bench.smoke else SEATS
    idle = outcome(bench.play("engine.max_num_seqs=1", "load.requests=5", "workload.rate=0.8")[0])
    limit = TPOT_TIMES * idle.tpot_p50_ms
    plays: dict[int, Played] = {}
    for number_of in seats:
        bench.say(f"{bench.name}: {number_of} seats")
        (plays[number_of],) = bench.play(
            f"engine.max_num_seqs={number_of}",
            f"load.requests={max(LEAST, TURNS * number_of)}",
            clients=number_of,
        )
    found = {n: outcome(played) for n, played in plays.items()}
    good = {n: goodput(played, TTFT_MS, limit) for n, played in plays.items()}
    cost = fitted_cost([p.log for p in plays.values()]) if bench.real else Cost()
    best = max(good, key=good.__getitem__)
    near = min(seats, key=lambda n: abs(n - cost.ridge))
    last, middle = found[seats[-1]], found[near]
    faster = last.output_tokens_per_s / middle.output_tokens_per_s
    slower = last.tpot_p50_ms / middle.tpot_p50_ms
    return Findings(
        claims=[
            Claim(
                "past the ridge seats cost more in TPOT than they bring in throughput",
                "the ridge of the roofline: a batch is free until arithmetic takes as long as reading the "
                "weights",
                f"from {near} to {seats[-1]} seats {faster:.2f} x tokens/s, {slower:.2f} x TPOT p50",
                slower > 1.1 * faster,
            ),
            Claim(
                "goodput under limits on TTFT and TPOT is best in the middle",
                "goodput, not throughput (DistServe, OSDI 2024)",
                f"{best} seats, {number(good[best])} requests/s; {number(good[seats[-1]])} at {seats[-1]}",
                best not in (seats[0], seats[-1]) and good[best] > 1.1 * good[seats[-1]],
            ),
        ],
        because=(
            f"a pass takes {cost.step * 1e3:.1f} ms and {cost.row * 1e3:.2f} ms for each sequence in it, "
            "so the ridge is "
            f"at {cost.ridge:.0f}. With fewer seats less is served, with more "
            f"everybody misses the TPOT limit of {limit:.1f} ms. Every seat is taken: a closed loop of as "
            "many users as seats."
        ),
        tables=[
            Table(
                (
                    "max_num_seqs",
                    "tokens/s",
                    "TPOT p50, ms",
                    "TPOT p99",
                    "TTFT p50",
                    "batch",
                    "goodput, requests/s",
                ),
                [
                    [
                        str(n),
                        number(o.output_tokens_per_s),
                        number(o.tpot_p50_ms),
                        number(o.tpot_p99_ms),
                        number(o.ttft_p50_ms),
                        number(o.batch_mean),
                        number(good[n]),
                    ]
                    for n, o in found.items()
                ],
            )
        ],
        ratios={"most seats": bench.ratios(plays[seats[-1]], cost)},
        figure=_figure(seats, found, good, cost.ridge, limit),
        outcomes={"goodput": {str(n): v for n, v in good.items()}, **{str(n): o for n, o in found.items()}},
    )


def _figure(seats, found, good, ridge, limit) -> Figure:
    from harness.dashboard.colours import METRICS
    from harness.experiments.figures import chart, level, line, moment

    figure = chart("Seats past the ridge", "max_num_seqs", "of the best", x_type="log")
    tokens = [found[n].output_tokens_per_s for n in seats]
    line(figure, "tokens/s", seats, [t / max(tokens) for t in tokens], "tokens/s")
    line(figure, "goodput", seats, [good[n] / max(good.values()) for n in seats], "goodput")
    tpot = [found[n].tpot_p50_ms for n in seats]
    line(
        figure,
        "TPOT",
        seats,
        [t / max(tpot) for t in tpot],
        f"TPOT p50 (limit {limit:.0f} ms: dotted)",
        style=1,
    )
    level(figure, limit / max(tpot), "", METRICS["TPOT"])
    moment(figure, ridge, "ridge")
    figure.update_xaxes(tickvals=list(seats), range=[-0.05, math.log10(seats[-1]) + 0.05])
    figure.update_yaxes(range=[0, 1.1])
    return figure


EXPERIMENT = Experiment(
    name="bigger_batch_is_not_better",
    title="A bigger batch is not better past the ridge",
    source="the roofline model; goodput as in DistServe (OSDI 2024)",
    published="no single figure: a batch is free up to the ridge and paid for past it",
    run=run,
    real=True,
    minutes=0.8,
)
