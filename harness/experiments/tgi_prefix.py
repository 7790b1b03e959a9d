"""13 x on long prompts (TGI v3)? A warm prefix cache on a repeated conversation; cold it is less.

Conversations of three turns run twice on one engine, with a prefix cache and without. The first time the
cache finds what the turns before said, the second time nearly every prompt. Cold and warm are told apart,
and the run without a cache is the control: its second time has to be as slow as its first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, medians, number
from harness.experiments.outcome import Outcome
from harness.experiments.simulation import Played

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS = {"no cache": "engine.prefix_cache=false", "prefix cache": "engine.prefix_cache=true"}
PASSES = ("cold", "warm")


def run(bench: Bench) -> Findings:
    sessions = ("load.requests=12",) if bench.smoke else ()
    plays: dict[str, list[Played]] = {f"{name}, {state}": [] for name in POINTS for state in PASSES}
    for number_ in range(3 if bench.real and not bench.smoke else 1):
        for name, how in POINTS.items():
            bench.say(f"{bench.name}: {name}, round {number_ + 1}")
            passes = bench.play("engine=continuous", how, *sessions, times=2)
            for state, played in zip(PASSES, passes, strict=True):
                plays[f"{name}, {state}"].append(played)
    found: dict[str, Outcome] = medians(plays)
    hits = {point: _hits(rounds[0]) for point, rounds in plays.items()}
    seconds = {point: o.seconds for point, o in found.items()}
    cold = seconds["no cache, cold"] / seconds["prefix cache, cold"]
    warm = seconds["no cache, warm"] / seconds["prefix cache, warm"]
    control = seconds["no cache, cold"] / seconds["no cache, warm"]
    return Findings(
        claims=[
            Claim(
                "warm, a prefix cache is several times as fast",
                "13.8 x (8 x H100, long), 3.9 x (4 x L4), 1.1 x (L4), TGI against vLLM, second run",
                f"{warm:.1f} x",
                warm > 2,
            ),
            Claim(
                "cold it is much less",
                "2.3 x (8 x H100, long, first run)",
                f"{cold:.1f} x",
                1 < cold < 0.8 * warm,
            ),
            Claim(
                "without a cache the second run is no faster: nothing else is warm",
                "not published",
                f"{control:.2f} x",
                abs(control - 1) < 0.1,
            ),
        ],
        because=(
            f"the second time {hits['prefix cache, warm']:.0%} of the prompts' tokens are in the cache, "
            "the first time "
            f"{hits['prefix cache, cold']:.0%} (the turns before). What remains are the decodes, which no "
            "cache makes "
            "faster, and on a CPU prompts are dear. Hence a rule of this harness: a prefix cache is "
            "emptied between runs."
        ),
        tables=[
            Table(
                ("", "seconds", "prompt tokens cached", "TTFT p50, ms", "TTFT p99", "TPOT p50"),
                [
                    [
                        point,
                        number(o.seconds),
                        f"{hits[point]:.0%}",
                        number(o.ttft_p50_ms),
                        number(o.ttft_p99_ms),
                        number(o.tpot_p50_ms),
                    ]
                    for point, o in found.items()
                ],
            )
        ],
        ratios={"one pass": bench.ratios(plays["no cache, cold"][0])},
        figure=_figure(seconds),
        outcomes=found,
    )


def _hits(played: Played) -> float:
    records = played.log.requests
    return sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)


def _figure(seconds: dict[str, float]) -> Figure:
    from harness.experiments.figures import bars, chart

    figure = chart("The same conversations twice", "", "seconds for all of them")
    labels = [f"{state} ({'first' if state == 'cold' else 'second'} time)" for state in PASSES]
    for name, engine in zip(POINTS, ("static", "continuous"), strict=True):
        bars(figure, engine, labels, [seconds[f"{name}, {state}"] for state in PASSES], name)
    return figure


EXPERIMENT = Experiment(
    name="tgi_prefix",
    title="13 x on long prompts, cold and warm",
    source="TGI v3 (docs, conceptual/chunking)",
    published="20 long requests a second time: 2 s against vLLM's 27.5 s (8 x H100); the first time 12.1 "
    "against 28.3 s",
    run=run,
    real=True,
    minutes=0.6,
)
