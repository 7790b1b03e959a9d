"""What one document in ten requests costs the chats beside it.

The same chats with documents among them and without, under whole prompts first, whole prompts in the
decodes' pass and chunks. sarathi_stalls plays one arrival by hand; here they arrive as they do, and their
effect is on percentiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.dashboard.colours import styles
from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, medians, number
from harness.experiments.outcome import Outcome, outcome
from harness.experiments.simulation import Played

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROUNDS = 2
POINTS = {
    "chats alone": ("engine=continuous", "workload.classes.document.weight=0"),
    "prompts first": ("engine=prefill_first",),
    "whole prompts": ("engine=continuous",),
    "chunks of 256": ("engine=chunked", "engine.max_num_batched_tokens=256"),
    "chunks of 64": ("engine=chunked", "engine.max_num_batched_tokens=64"),
}
ENGINES = ("prefill_first", "continuous", "chunked", "chunked")  # of the points after the first
ALONE = "#767676"


def chats(played: Played) -> Outcome:
    return outcome(played, lambda seen: seen.planned.request_class == "chat")


def documents(played: Played) -> Outcome:
    return outcome(played, lambda seen: seen.planned.request_class == "document")


def run(bench: Bench) -> Findings:
    requests = ("load.requests=30",) if bench.smoke else ()
    plays = bench.rounds({name: [*how, *requests] for name, how in POINTS.items()}, rounds=ROUNDS)
    found = medians(plays, chats)
    theirs = medians({name: rounds for name, rounds in plays.items() if name != "chats alone"}, documents)
    gap = {name: o.gap_p99_ms for name, o in found.items()}
    longest = {name: o.gap_max_ms for name, o in found.items()}
    alone, tpot = longest["chats alone"], {name: o.tpot_p99_ms for name, o in found.items()}
    return Findings(
        claims=[
            Claim(
                "documents computed whole multiply the chats' longest gap",
                "a pass with a prompt of 1,021 tokens takes 3.2 x one of 4 decodes (Yi-34B, Sarathi's data)",
                f"{longest['whole prompts'] / alone:.0f} x in the decodes' pass, "
                f"{longest['prompts first'] / alone:.0f} x prompts first",
                longest["whole prompts"] > 3 * alone,
            ),
            Claim(
                "chunks take most of it away",
                "stalls bounded by the token budget (Sarathi-Serve)",
                f"longest gap {longest['chunks of 64']:.0f} ms (64) and {longest['chunks of 256']:.0f} ms "
                "(256), "
                f"{longest['whole prompts']:.0f} ms whole",
                longest["chunks of 64"] < longest["chunks of 256"] < longest["whole prompts"],
            ),
            Claim(
                "and the documents pay",
                "TTFT is worse the smaller the chunk",
                f"their TTFT p50 {theirs['chunks of 64'].ttft_p50_ms:.0f} ms (64), "
                f"{theirs['chunks of 256'].ttft_p50_ms:.0f} ms (256), "
                f"{theirs['whole prompts'].ttft_p50_ms:.0f} ms whole",
                theirs["chunks of 64"].ttft_p50_ms > theirs["whole prompts"].ttft_p50_ms,
            ),
        ],
        because=(
            "every reader is in the pass that computes the document, so one document stalls all of them "
            "at a time. Chunks spread "
            "the same work over many passes. A mean over an answer hides it: TPOT p99 is "
            f"{tpot['whole prompts']:.1f} ms with whole prompts and {tpot['chunks of 64']:.1f} ms with "
            "chunks of 64, "
            "since the work is the same."
        ),
        tables=[
            Table(
                (
                    "",
                    "chats' TPOT p50, ms",
                    "p99",
                    "gap p99, ms",
                    "longest",
                    "TTFT p99",
                    "documents' TTFT p50",
                    "p99",
                ),
                [
                    [
                        name,
                        number(o.tpot_p50_ms),
                        number(o.tpot_p99_ms),
                        number(o.gap_p99_ms),
                        number(o.gap_max_ms),
                    ]
                    + [number(o.ttft_p99_ms)]
                    + [
                        number(getattr(theirs[name], f)) if name in theirs else "–"
                        for f in ("ttft_p50_ms", "ttft_p99_ms")
                    ]
                    for name, o in found.items()
                ],
            )
        ],
        ratios={"whole prompts": bench.ratios(plays["whole prompts"][0])},
        figure=_figure(gap, longest, {name: o.ttft_p50_ms for name, o in theirs.items()}),
        outcomes={"chats": found, "documents": theirs},
    )


def _figure(gap: dict[str, float], longest: dict[str, float], theirs: dict[str, float]) -> Figure:
    from harness.experiments.figures import bars, chart

    figure = chart("What documents cost the chats beside them", "", "ms", y_type="log")
    labels = ["chats: p99 gap", "chats: longest gap", "documents: TTFT p50"]
    for name, own in zip(POINTS, (ALONE, *(style.colour for style in styles(ENGINES))), strict=True):
        values = [gap[name], longest[name], *([theirs[name]] if name in theirs else [])]
        bars(figure, own, labels[: len(values)], values, name)
    figure.update_layout(bargap=0.15)
    return figure


EXPERIMENT = Experiment(
    name="long_prompt_interference",
    title="What a long prompt costs the others",
    source="Sarathi-Serve (OSDI 2024), its measured costs of passes",
    published="Yi-34B: 68 ms for a pass of 4 decodes, 218 ms with a prompt of 1,021 tokens in it",
    run=run,
    real=True,
    minutes=3.7,
)
