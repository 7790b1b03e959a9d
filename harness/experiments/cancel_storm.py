"""A wave of users hangs up: who gets their seats and their KV, and when?

28 ask at once, 16 get a seat, and half of all leave 0.15 s later. Iteration-level scheduling gives back seat
and KV before the next pass, and whoever waits takes them. A static batch computes on for nobody until its
longest answer ends, since its shape is fixed. No published benchmark shows this. Each engine plays the same
schedule with the wave and with the same users staying.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, medians, number
from harness.experiments.outcome import Outcome, outcome
from harness.experiments.simulation import Played

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENGINES = ("static", "continuous", "chunked")
NOBODY = "workload.classes.leaver.cancel=null"


def stayers(played: Played) -> Outcome:
    return outcome(played, lambda seen: seen.planned.request_class == "stayer")


def releases_ms(played: Played) -> list[float]:
    """Of who had a seat: from the hang-up until its KV was free."""
    return [
        ((r.finish_ns or 0) - r.abort_seen_ns) / 1e6
        for r in played.log.requests
        if r.abort_seen_ns is not None and r.abort_state not in (None, "queued")
    ]


def dead_rows(played: Played) -> int:
    """Rows of passes that were computed for nobody: of users who had left or whose answer had ended."""
    return sum(step.ended_rows for step in played.log.steps)


def run(bench: Bench) -> Findings:
    requests = ("load.requests=14", "engine.max_num_seqs=8") if bench.smoke else ()
    points = {
        f"{engine}, {wave}": [f"engine={engine}", *change, *requests]
        for engine in ENGINES
        for wave, change in (("they stay", [NOBODY]), ("half leave", []))
    }
    plays = bench.rounds(points)
    found = medians(plays, stayers)
    release = {
        engine: statistics.median(max(releases_ms(p), default=0.0) for p in plays[f"{engine}, half leave"])
        for engine in ENGINES
    }
    longest = {
        engine: max(s.duration_ns for p in plays[f"{engine}, half leave"] for s in p.log.steps) / 1e6
        for engine in ENGINES
    }
    gone = {engine: len(plays[f"{engine}, half leave"][0].hang_ups_s) for engine in ENGINES}
    dead = {name: statistics.median(dead_rows(p) for p in rounds) for name, rounds in plays.items()}
    gain = {e: found[f"{e}, they stay"].e2e_p99_ms / found[f"{e}, half leave"].e2e_p99_ms for e in ENGINES}
    prompt = all(release[e] <= longest[e] for e in ENGINES[1:])
    return Findings(
        claims=[
            Claim(
                "by iterations, seat and KV are free within one pass",
                "not published",
                ", ".join(f"{release[e]:.1f} ms ({e})" for e in ENGINES[1:]),
                prompt,
                promise=True,
            ),
            Claim(
                "a static batch keeps them until its longest answer has ended",
                "not published",
                f"{release['static']:,.0f} ms; {dead['static, half leave']:,.0f} rows computed for nobody",
                release["static"] > 20 * max(release[e] for e in ENGINES[1:]),
            ),
            Claim(
                "so who stays gains more by iterations: E2E p99 of the others",
                "not published",
                ", ".join(f"{gain[e]:.2f} x faster ({e})" for e in ENGINES),
                min(gain["continuous"], gain["chunked"]) > gain["static"],
            ),
        ],
        because=(
            f"{gone['static']} of the users hang up. Under static batching those in the running batch "
            "cost as much as "
            "if they read on, and only those who still waited make room; by iterations the head of the "
            "queue is in their seats "
            "one pass later."
        ),
        tables=[
            Table(
                (
                    "",
                    "stayers' E2E p50, ms",
                    "p99",
                    "TTFT p99",
                    "KV blocks mean",
                    "rows for nobody",
                    "release, ms",
                ),
                [
                    [
                        name,
                        number(o.e2e_p50_ms),
                        number(o.e2e_p99_ms),
                        number(o.ttft_p99_ms),
                        number(o.kv_mean),
                        number(dead[name]),
                        number(release[name.split(",")[0]]) if "leave" in name else "–",
                    ]
                    for name, o in found.items()
                ],
            )
        ],
        ratios={"static": bench.ratios(plays["static, they stay"][0])},
        figure=_figure(plays),
        outcomes=found,
    )


def _figure(plays: dict[str, list[Played]]) -> Figure:
    from harness.experiments.figures import chart, line, moment

    figure = chart(
        "Half of the users hang up: sequences in a pass that somebody waits for",
        "ms since they asked",
        "sequences",
    )
    wave = 0.0
    for engine in ENGINES[:2]:  # chunked lies upon continuous
        played = plays[f"{engine}, half leave"][0]
        start = min(s.intended_s for s in played.seen)
        wave = max(wave, *((at - start) * 1e3 for at in played.hang_ups_s))
        steps = played.log.steps
        times = [(s.start_ns / 1e9 - start) * 1e3 for s in steps]
        line(figure, engine, times, [s.num_seqs for s in steps], mode="lines", line_shape="hv")
    moment(figure, wave, "half of them leave")
    figure.update_yaxes(rangemode="tozero")
    return figure


EXPERIMENT = Experiment(
    name="cancel_storm",
    title="A wave of users hangs up",
    source="none: no benchmark shows it",
    published="nothing",
    run=run,
    real=True,
    minutes=0.4,
)
