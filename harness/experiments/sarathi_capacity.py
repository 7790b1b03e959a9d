"""How much more a scheduler carries within a limit on stalls (Sarathi-Serve, OSDI 2024, figures 10 to 12).

The highest rate at which the 99th percentile of the gaps between tokens (TBT) and the median wait stay
within their limits, by bisection, for several chunks, for whole prompts in the decodes' pass (a chunk
without end) and for vLLM v0's prompts first. What chunks cost is the time to the first token, drawn beside
it at one rate. The limits are the paper's for Yi-34B (0.2 and 1 s; a wait of 2 s) in units of its decode
step of 47 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table, number
from harness.experiments.outcome import Outcome, outcome
from harness.experiments.simulation import Cost, Played

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COST = Cost()
STEP_MS = COST(1, 1) * 1e3
LIMITS = {"strict": 200 / 46.8 * STEP_MS, "relaxed": 1000 / 46.8 * STEP_MS}
"""p99 of TBT, ms."""
WAIT_MS = 2000 / 46.8 * STEP_MS
POINTS = {
    "chunk 64": ("engine=chunked", "engine.max_num_batched_tokens=64"),
    "chunk 128": ("engine=chunked", "engine.max_num_batched_tokens=128"),
    "chunk 256": ("engine=chunked", "engine.max_num_batched_tokens=256"),
    "chunk 512": ("engine=chunked", "engine.max_num_batched_tokens=512"),
    "whole prompts": ("engine=continuous",),
    "prompts first": ("engine=prefill_first",),
}
LOW, HIGH = 0.2, 26.0
STEPS = 6


def capacity(passes: dict[float, Outcome], play, limit_ms: float, steps: int) -> float:
    """Requests/s: the highest rate within the limits; 0: none is. passes: those that are known by now."""
    low, high = 0.0, HIGH
    rate = LOW
    for _ in range(steps + 1):
        if rate not in passes:
            passes[rate] = play(rate)
        found = passes[rate]
        if found.gap_p99_ms <= limit_ms and found.queue_p50_ms <= WAIT_MS:
            low = rate
        else:
            high = rate
        if low == 0.0:
            return 0.0
        rate = (low * high) ** 0.5
    return low


def run(bench: Bench) -> Findings:
    requests = f"load.requests={24 if bench.smoke else 300}"
    steps = 2 if bench.smoke else STEPS
    rates: dict[str, dict[str, float]] = {name: {} for name in LIMITS}
    passes: dict[str, dict[float, Outcome]] = {name: {} for name in POINTS}
    last: list[Played] = []
    for name, how in POINTS.items():
        bench.say(f"{bench.name}: {name}")

        def play(rate: float, how=how) -> Outcome:
            last[:] = bench.play(*how, f"workload.rate={rate:.5g}", requests, cost=COST)
            return outcome(last[0])

        for limit, ms in LIMITS.items():
            rates[limit][name] = capacity(passes[name], play, ms, steps)
    common = 4.0
    at_one_rate = {
        name: outcome(bench.play(*how, f"workload.rate={common}", requests, cost=COST)[0])
        for name, how in POINTS.items()
    }
    chunks = [name for name in POINTS if name.startswith("chunk")]
    best = {limit: max(chunks, key=found.__getitem__) for limit, found in rates.items()}
    gain = {limit: found[best[limit]] / max(found["prompts first"], LOW) for limit, found in rates.items()}
    none = {limit: found["prompts first"] == 0 for limit, found in rates.items()}
    ttft = {name: o.ttft_p50_ms for name, o in at_one_rate.items()}
    rows = [
        [
            name,
            *(number(rates[limit][name]) if rates[limit][name] else f"< {LOW}" for limit in LIMITS),
            number(at_one_rate[name].gap_p99_ms),
            number(ttft[name]),
            number(at_one_rate[name].ttft_p99_ms),
        ]
        for name in POINTS
    ]
    return Findings(
        claims=[
            Claim(
                "under the strict limit chunks carry a multiple of what prompts first do",
                "2.6 x (Mistral-7B), 3.7 x (Yi-34B), 5.6 x (Falcon-180B, pipeline parallel)",
                f"{'more than ' if none['strict'] else ''}{gain['strict']:.1f} x ({best['strict']})",
                gain["strict"] > 2,
            ),
            Claim(
                "under the relaxed one too, but less",
                "both limits are in figure 10",
                f"{'more than ' if none['relaxed'] else ''}{gain['relaxed']:.1f} x ({best['relaxed']})",
                1 < gain["relaxed"] < gain["strict"],
            ),
            Claim(
                "a looser limit wants a larger chunk",
                "512 tokens strict, 2,048 relaxed",
                f"{best['strict']}, {best['relaxed']}",
                chunks.index(best["relaxed"]) > chunks.index(best["strict"]),
            ),
            Claim(
                "the first token pays: TTFT is worse the smaller the chunk",
                "chunks of 512 cost 1.12 to 1.19 x in prefill",
                f"p50 {ttft['chunk 64']:.0f} ms with 64, {ttft['chunk 512']:.0f} ms with 512, at "
                f"{common:g}/s",
                ttft["chunk 64"] > ttft["chunk 512"],
            ),
        ],
        because=(
            "with prompts computed whole a percent of the gaps is a prefill as soon as a percent of the "
            "passes has one, "
            "so the strict limit is passed at nearly any rate; a chunk keeps every gap below one pass of "
            "its budget and "
            "leaves capacity to decide."
        ),
        tables=[
            Table(
                (
                    "",
                    *(f"{name}: p99 TBT {ms:.0f} ms, rate/s" for name, ms in LIMITS.items()),
                    f"at {common:g}/s: p99 TBT, ms",
                    "TTFT p50",
                    "TTFT p99",
                ),
                rows,
            )
        ],
        ratios={"last point": bench.ratios(last[0], COST)},
        figure=_figure(rates, ttft),
        outcomes={"capacity": rates, "at one rate": at_one_rate},
    )


def _figure(rates: dict[str, dict[str, float]], ttft: dict[str, float]) -> Figure:
    from harness.dashboard.colours import colour, shade
    from harness.experiments.figures import chart

    figure = chart("Capacity within a limit on gaps, and its price", "", "requests/s carried")
    colours = (colour("chunked"), shade(colour("chunked"), 1), colour("continuous"))
    names = [f"p99 gap of {LIMITS[limit]:.0f} ms" for limit in rates] + ["TTFT p50 at 4/s (right)"]
    bars = [*(found.values() for found in rates.values()), ttft.values()]
    for place, (values, name, hue) in enumerate(zip(bars, names, colours, strict=True)):
        figure.add_bar(
            x=list(ttft),
            y=[round(v, 2) for v in values],
            name=name,
            marker={"color": hue},
            text=[f"{v:.0f} ms" if place == 2 else f"{v:.1f}" for v in values],
            textposition="outside",
            cliponaxis=False,
            offsetgroup=str(place),
            yaxis="y2" if place == 2 else "y",
        )
    figure.update_xaxes(type="category")
    top = 1.15 * max(ttft.values())
    figure.update_layout(yaxis2={"overlaying": "y", "side": "right", "range": [0, top], "showgrid": False})
    return figure


EXPERIMENT = Experiment(
    name="sarathi_capacity",
    title="What a bound on stalls is worth in capacity",
    source="Sarathi-Serve (OSDI 2024), figures 10 to 12",
    published="2.6 x (Mistral-7B), 3.7 x (Yi-34B), 5.6 x (Falcon-180B) the capacity of vLLM within a "
    "limit on p99 TBT",
    run=run,
    real=False,
    minutes=0.7,
)
