"""One queue against three: chats, retrieval and summaries on one engine that is at its limit.

In one queue first come, first served, a chat waits behind every document before it. Three lanes with
weights 4, 2 and 1 share the engine by class, and a lane that does not use its share leaves it to the
others. `priority` orders the one queue by urgency, for comparison: it serves chats first at any price.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from harness.dashboard.colours import styles
from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, medians, number
from harness.experiments.outcome import Outcome, outcome
from harness.experiments.simulation import Played, Seen

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LOAD = 1.1
"""Of what one queue does of a backlog: there is a queue whose order decides something."""
CLASSES = ("interactive", "long_context", "batch")
LANES = "engine.lanes={interactive: {weight: 4}, long_context: {weight: 2}, batch: {weight: 1}}"
POINTS = {
    "one queue": ("engine=continuous",),
    "three lanes": ("engine=continuous", LANES),
    "priority": ("engine=continuous", "engine.queue=priority"),
}


def of(name: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.planned.request_class == name


def late(played: Played) -> int:
    """Completed after their deadline."""
    return sum(
        1
        for s in played.seen
        if s.planned.deadline_ms
        and not s.hung_up
        and ((s.end_s or 0.0) - s.intended_s) * 1e3 > s.planned.deadline_ms
    )


def run(bench: Bench) -> Findings:
    requests = ("load.requests=60",) if bench.smoke else ()
    at_once = ("workload.rate=null", "workload.arrivals.kind=at_once", "load.requests=60")
    full = outcome(bench.play(*POINTS["one queue"], *at_once)[0])
    rate = f"workload.rate={LOAD * full.completed / full.seconds:.4g}"
    plays = bench.rounds({name: [*how, *requests, rate] for name, how in POINTS.items()}, rounds=1)
    everybody = medians(plays)
    found: dict[str, dict[str, Outcome]] = {c: medians(plays, partial(outcome, only=of(c))) for c in CLASSES}
    chat = {name: o.ttft_p99_ms for name, o in found["interactive"].items()}
    batch = {name: o.ttft_p99_ms for name, o in found["batch"].items()}
    speed = {name: o.output_tokens_per_s for name, o in everybody.items()}
    return Findings(
        claims=[
            Claim(
                "lanes shorten the chats' p99 TTFT",
                "not published",
                f"{chat['one queue']:.0f} ms in one queue, {chat['three lanes']:.0f} ms in three lanes "
                f"({chat['priority']:.0f} ms by priority)",
                chat["three lanes"] < 0.8 * chat["one queue"],
            ),
            Claim(
                "the summaries pay, but not without bound",
                "not published",
                f"their p99 TTFT {batch['one queue']:.0f} ms in one queue, {batch['three lanes']:.0f} ms "
                "in three lanes "
                f"({batch['priority']:.0f} ms by priority)",
                batch["three lanes"] > batch["one queue"],
            ),
            Claim(
                "throughput is the same: order is not capacity",
                "not published",
                f"{speed['three lanes'] / speed['one queue']:.2f} x",
                abs(speed["three lanes"] / speed["one queue"] - 1) < 0.1,
            ),
        ],
        because=(
            "half of the requests are chats, but most of the tokens are the documents', so a chat's wait "
            "in one queue is "
            "made of documents. Lanes cut it without a second engine, since what is idle is lent."
        ),
        tables=[
            Table(
                ("class", "", "TTFT p50, ms", "TTFT p99", "E2E p99", "TPOT p99"),
                [
                    [
                        c,
                        name,
                        number(o.ttft_p50_ms),
                        number(o.ttft_p99_ms),
                        number(o.e2e_p99_ms),
                        number(o.tpot_p99_ms),
                    ]
                    for c, part in found.items()
                    for name, o in part.items()
                ],
            ),
            Table(
                ("", "tokens/s", "late", "preempted"),
                [
                    [name, number(o.output_tokens_per_s), str(late(plays[name][0])), number(o.preemptions)]
                    for name, o in everybody.items()
                ],
                "all",
            ),
        ],
        ratios={"one queue": bench.ratios(plays["one queue"][0], capacity=full.output_tokens_per_s)},
        figure=_figure(found),
        outcomes={**found, "all": everybody},
    )


def _figure(found: dict[str, dict[str, Outcome]]) -> Figure:
    from harness.experiments.figures import bars, chart

    figure = chart("p99 TTFT by class", "", "ms", y_type="log")
    labels = ["interactive (chat)", "long_context (retrieval)", "batch (summaries)"]
    for name, own in zip(POINTS, styles(["continuous"] * len(POINTS)), strict=True):  # one engine, its shades
        bars(figure, own.colour, labels, [part[name].ttft_p99_ms for part in found.values()], name)
    return figure


EXPERIMENT = Experiment(
    name="mixed_lanes",
    title="One queue against three lanes",
    source="none: lanes by class, as services run them",
    published="nothing",
    run=run,
    real=True,
    minutes=2,
)
