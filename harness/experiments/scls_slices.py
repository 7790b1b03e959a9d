"""How long should a slice be? SCLS (arXiv 2406.13511) against iteration-level scheduling.

Static batches wait for their longest answer. Cut into slices of S tokens they wait for at most S, but whoever
has not ended is prefilled again, with its answer so far. So there are two wastes: slots, rows computed for
answers that have ended and pads in front of prompts, which grow with S; and tokens computed again, which
shrink with it. A prefix cache takes the second away, where the pool is large enough to keep what is between
two slices. Baselines: continuous batching that reserves the worst case, and that takes KV as it goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, column, medians, number, table
from harness.experiments.outcome import Outcome

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SLICES = (16, 32, 64, 128, None)
LIMIT = 512  # tokens that every client declares: a slice of None lasts until the last answer of its batch
POOLS = {
    400: "what is cached is evicted before its next slice",
    2400: "everybody's KV stays cached, and no reservation is too large",
}
BASELINES = {
    "continuous, worst case": "engine.reservation=prompt_plus_max_tokens",
    "continuous, incremental": "engine.reservation=on_demand",
}


def points(blocks: int, smoke: bool) -> dict[str, list[str]]:
    """blocks: usable ones of the KV pool."""
    common = [f"engine.num_kv_blocks={blocks + 1}", *(["load.requests=24"] if smoke else [])]
    found = {
        f"S={size or 'inf'}{', cached' if cache else ''}": [
            "engine=sliced",
            f"engine.policy.slice_tokens={size or LIMIT}",
            f"engine.prefix_cache={str(cache).lower()}",
            *common,
        ]
        for cache in (False, True)
        for size in SLICES
    }
    return found | {name: ["engine=continuous", how, *common] for name, how in BASELINES.items()}


def run(bench: Bench) -> Findings:
    found, ratios = {}, {}
    for blocks in POOLS:
        plays = bench.rounds(points(blocks, bench.smoke))
        found[blocks] = medians(plays)
        ratios[f"pool of {blocks} blocks"] = bench.ratios(plays["continuous, incremental"][0])
    tight, roomy = ({name: o.output_tokens_per_s for name, o in found[blocks].items()} for blocks in POOLS)
    plain = {size: tight[f"S={size or 'inf'}"] for size in SLICES}
    cached = {size: roomy[f"S={size or 'inf'}, cached"] for size in SLICES}
    best, best_cached = max(plain, key=plain.__getitem__), max(cached, key=cached.__getitem__)
    static, slots = plain[None], found[400]["continuous, worst case"].output_tokens_per_s
    gain = plain[best] / static
    continuous = tight["continuous, incremental"]
    over = continuous / max(plain[best], cached[best_cached])
    sizes = [size or LIMIT for size in SLICES]
    return Findings(
        claims=[
            Claim(
                "slices carry more than iteration-level scheduling",
                "up to +315.8 % over sequence- and iteration-level schedulers",
                f"{100 * (gain - 1):+.0f} % against static, "
                f"{100 * (plain[best] / slots - 1):+.0f} % against worst-case reservation, "
                f"{100 * (plain[best] / continuous - 1):+.0f} % against paging",
                plain[best] > slots,
            ),
            Claim(
                "there is a best length in the middle, where the two wastes are about equal",
                "not published as a figure",
                f"S = {best or 'inf'}, {gain:.2f} x static (S = inf)",
                best not in (SLICES[0], SLICES[-1]),
            ),
            Claim(
                "with a prefix cache it moves to shorter slices",
                "not published",
                f"S = {best_cached or 'inf'} with a cache and room, {best or 'inf'} without",
                (best_cached or LIMIT) < (best or LIMIT),
            ),
        ],
        because=(
            f"the gain over static batching is real ({100 * (gain - 1):+.0f} %), but iteration-level "
            "scheduling without a "
            f"limit on its requests has more: {over:.2f} x the best slice, were there a cache and room for "
            "all. The published baseline limits what runs "
            "together lest memory run out; paging does not have to. What slices bound is the wait behind "
            "a long answer: "
            f"p99 is {number(found[400]['S=16'].normalized_p99_ms)} ms a token at S = 16 and "
            f"{number(found[400]['S=inf'].normalized_p99_ms)} at S = inf."
        ),
        tables=[
            table(part, _columns(), "", f"KV pool of {n} blocks: {POOLS[n]}") for n, part in found.items()
        ],
        ratios=ratios,
        figure=_figure(sizes, [*plain.values()], [*cached.values()], tight, continuous),
        outcomes={str(blocks): part for blocks, part in found.items()},
    )


def _columns():
    return {
        "tokens/s": column("output_tokens_per_s"),
        "slots wasted a token": column("slot_waste"),
        "computed again a token": lambda o: number(_again(o)),
        "useful": lambda o: f"{o.useful:.0%}",
        "ms a token p50": column("normalized_p50_ms"),
        "p99": column("normalized_p99_ms"),
    }


def _again(found: Outcome) -> float:
    return found.recomputed / (found.output_tokens_per_s * found.seconds)


def _figure(sizes, plain, cached, tight, continuous) -> Figure:
    from harness.experiments.figures import chart, line

    figure = chart("Throughput by the length of a slice", "slice, tokens", "output tokens/s", x_type="log")
    line(figure, "sliced", sizes, plain, "slices")
    line(figure, "sliced", sizes, cached, "slices, prefix cache and room for it", style=1)
    ends = [sizes[0], sizes[-1]]
    worst = tight["continuous, worst case"]
    line(figure, "continuous", ends, [continuous] * 2, "continuous, paged", mode="lines")
    line(figure, "orca", ends, [worst] * 2, "continuous, worst case reserved", mode="lines")
    figure.update_xaxes(tickvals=sizes, ticktext=[*map(str, sizes[:-1]), "inf (static)"])
    figure.update_yaxes(rangemode="tozero")
    return figure


EXPERIMENT = Experiment(
    name="scls_slices",
    title="How long a slice",
    source="SCLS (arXiv 2406.13511)",
    published="up to 315.8 % more throughput than sequence- and iteration-level schedulers",
    run=run,
    real=False,
    minutes=0.2,
)
