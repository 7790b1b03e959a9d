"""36.9 x from iteration-level scheduling (Orca, OSDI 2022)? It depends on the latency at which it is read.

Mean normalised latency (E2E over tokens of the answer) against the rate, for a server that batches whole
generations (`dynamic`, as FasterTransformer behind Triton) and for `orca`, which reserves the same. The
ratio of the rates at a limit is huge where the limit lies near the latency of an idle server: there a
static batch of two is too slow already. At a generous limit it is what slots are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, column, number, table
from harness.experiments.outcome import Outcome, median, outcome

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LIMITS = (1.2, 2.0, 5.0)
"""Times the latency of an idle server."""
RATES = {
    "dynamic": (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0),
    "orca": (0.5, 2.0, 4.0, 8.0, 12.0, 16.0, 18.0, 20.0, 22.0, 24.0, 27.0),
}
REAL_RATES = {"dynamic": (0.1, 0.25, 0.5, 1.0, 2.0), "orca": (0.5, 2.0, 4.0, 6.0, 8.0, 11.0, 15.0)}
"""Times what an idle engine does of one request after the other: machines differ."""
SMOKE_RATES = {"dynamic": (1.0, 4.0), "orca": (2.0, 16.0)}


def rate_at(curve: Sequence[tuple[float, float]], limit: float) -> tuple[float, str]:
    """(rate, mark): where a rising curve of (rate, latency) crosses a limit, between its points; mark "<": it
    is above from the first point on, ">": it never reaches it."""
    if curve[0][1] > limit:
        return curve[0][0], "<"
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 <= limit < y1:
            return x0 + (x1 - x0) * (limit - y0) / (y1 - y0), ""
    return curve[-1][0], ">"


def times_as_much(orca: tuple[float, str], static: tuple[float, str]) -> tuple[float, str]:
    """(ratio of the rates, mark): "" exact, ">" at least, "<" at most, "?" a guess, since both are open."""
    towards = {orca[1], {"<": ">", ">": "<", "": ""}[static[1]]} - {""}
    return orca[0] / static[0], "?" if len(towards) > 1 else (towards or {""}).pop()


def run(bench: Bench) -> Findings:
    rates = SMOKE_RATES if bench.smoke else REAL_RATES if bench.real else RATES
    idle = median([outcome(p) for p in bench.play("engine=orca", "workload.rate=0.5", "load.requests=10")])
    unit = 1e3 / (64.5 * idle.normalized_mean_ms) if bench.real and not bench.smoke else 1.0
    curves: dict[str, list[tuple[float, float]]] = {}
    outcomes: dict[str, Outcome] = {}
    last = None
    for engine, sweep in rates.items():
        curves[engine] = []
        for rate in (place * unit for place in sweep):
            requests = (
                round(min(40, 6 * rate))
                if bench.smoke
                else round(min(400, max(20, 12 * rate)))
                if bench.real
                else 240
            )
            bench.say(f"{bench.name}: {engine} at {rate:.3g}/s")
            (last,) = bench.play(
                f"engine={engine}",
                f"workload.rate={rate}",
                f"load.requests={requests}",
                "engine.max_queue_delay_ms=0",
            )
            found = outcomes[f"{engine}, {rate:.3g}/s"] = outcome(last)
            curves[engine].append((rate, found.normalized_mean_ms))
    assert last is not None
    # A machine that sleeps between two requests is slower than one with a little to do.
    floor = min(idle.normalized_mean_ms, *(latency for _, latency in curves["orca"]))
    rows, ratio = [], {}
    for times in LIMITS:
        static, orca = (rate_at(curves[engine], times * floor) for engine in ("dynamic", "orca"))
        ratio[times] = times_as_much(orca, static)
        rows.append(
            [
                f"{times:g} x idle, {times * floor:.1f} ms a token",
                *(f"{mark} {number(rate)}".strip() for rate, mark in (static, orca)),
                f"{ratio[times][1]} {ratio[times][0]:.1f}".strip(),
            ]
        )
    (near, near_mark), (far, far_mark) = ratio[LIMITS[0]], ratio[LIMITS[-1]]
    return Findings(
        claims=[
            Claim(
                "at a limit near the latency of an idle server the ratio of rates is more than tenfold",
                "36.9 x at 190 ms a token (GPT-3 175B, 16 A100); 55.4 x (1.3B) and 26.1 x (345M) at 11 ms "
                "(A10G)",
                f"{rows[0][3]} x at {LIMITS[0]:g} x idle",
                near > 10 and near_mark in ("", ">"),
            ),
            Claim(
                "it shrinks as the limit is relaxed",
                "not published: each source has one limit",
                ", ".join(f"{row[3]} x at {times:g} x" for times, row in zip(LIMITS, rows, strict=True)),
                near > far > 1 and near_mark in ("", ">") and far_mark in ("", "<"),
            ),
        ],
        because=(
            "the factor is read where a server that batches whole generations cannot batch at all: "
            "whoever arrives "
            "while a batch runs waits for its longest answer. The same two engines differ by what slots "
            "are worth as "
            "soon as some waiting is allowed."
        ),
        tables=[
            Table(("limit", "static rate/s", "orca rate/s", "x"), rows, "rates at a limit"),
            table(
                outcomes,
                {
                    "ms a token, mean": column("normalized_mean_ms"),
                    "p99": column("normalized_p99_ms"),
                    "wait p50, ms": column("queue_p50_ms"),
                    "batch": column("batch_mean"),
                },
                "engine, rate",
                "points",
            ),
        ],
        ratios={
            "highest rate": bench.ratios(last, capacity=max(o.output_tokens_per_s for o in outcomes.values()))
        },
        figure=_figure(curves, floor),
        outcomes=outcomes,
    )


def _figure(curves: dict[str, list[tuple[float, float]]], floor: float) -> Figure:
    from harness.experiments.figures import chart, level, line

    figure = chart(
        "Mean normalised latency against the rate", "requests/s", "ms a token", x_type="log", y_type="log"
    )
    names = {"dynamic": "whole generations (dynamic)", "orca": "every iteration (orca)"}
    for engine, curve in curves.items():
        line(figure, engine, [x for x, _ in curve], [y for _, y in curve], names[engine])
    for times in LIMITS:
        level(figure, times * floor, f"{times:g} x idle")
    figure.update_yaxes(range=[np.log10(floor * 0.8), np.log10(floor * 40)])
    figure.update_xaxes(tickvals=[0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    return figure


EXPERIMENT = Experiment(
    name="orca_latency",
    title="36.9 x from iteration-level scheduling, at which latency",
    source="Orca (OSDI 2022); PeriFlow on small models (friendli.ai, 2022-08-04)",
    published="36.9 x the rate of FasterTransformer at 190 ms a token (175B); 55.4 x (1.3B) and 26.1 x "
    "(345M) at 11 ms",
    run=run,
    real=False,
    minutes=0.3,
)
