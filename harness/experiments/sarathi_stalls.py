"""What a long prompt does to those who are reading: the stall plot (Sarathi-Serve, OSDI 2024, figure 1a).

Eight answers are being streamed when one prompt of L tokens arrives. A scheduler that computes whole
prompts holds all eight up for as long as that takes; under chunked prefill no gap is longer than one pass
of the token budget. Each scheduler is tried several times, in turn, so that a slow moment of the machine
meets all.

Promised for chunked: no pass has more tokens than the budget, and longest gap <= SLACK x the longest pass
of the same prompt without the eight, each in its least disturbed try: what else runs only adds time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engines.config import EngineConfig
from engines.engine import Engine, Runner
from engines.request import Request
from engines.virtual import Clock, Log, VirtualRunner
from harness.conf import compose
from harness.experiments.experiment import Bench, Claim, Experiment, Findings, Table
from harness.experiments.outcome import fitted_cost
from harness.experiments.probe import probe
from harness.experiments.ratios import ratios
from harness.experiments.simulation import Cost
from harness.plan import draw_schedule

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from engines.runner import ModelRunner

DECODERS, THEIR_PROMPT = 8, 32
BEFORE, AFTER = 20, 20  # tokens of each answer before the long prompt arrives and after its first token
LENGTHS = (512, 1024, 2048)
TRIES = 5
SLACK = 1.5
"""For the decodes in the pass, the host's work between two, and a machine that others use."""
SCHEDULERS = {
    "prefill_first": ("prefill_first",),
    "continuous": ("continuous",),
    "chunked, budget 512": ("chunked",),
    "chunked, budget 128": ("chunked", "engine.max_num_batched_tokens=128"),
}


@dataclass(frozen=True, slots=True)
class Gaps:
    """What the readers saw. ms: each gap between two tokens, at: when it ended, ms since the arrival;
    first_ms: from the arrival to the long prompt's first token; most_tokens: of one pass."""

    ms: list[float]
    at: list[float]
    first_ms: float
    most_tokens: int
    log: Log

    @property
    def longest(self) -> float:
        return max(self.ms)


def engine_config(scheduler: str, *changes: str) -> EngineConfig:
    """Room for everybody: KV and seats decide nothing here."""
    cfg = compose([f"engine={scheduler}", "engine.num_kv_blocks=513", *changes])
    return EngineConfig.from_mapping(dict(cfg.engine))


def play(
    config: EngineConfig, runner: Runner, clock: Callable[[], float], length: int, decoders: int = DECODERS
) -> Gaps:
    """One arrival of a prompt of `length` tokens among `decoders` answers."""
    log = Log()
    engine = Engine(
        config,
        runner,
        num_kv_blocks=config.num_kv_blocks or 0,
        clock=clock,
        step_log=log,  # type: ignore[arg-type]
    )
    endless = config.max_model_len
    readers = [engine.add(_request(i, THEIR_PROMPT, endless)) for i in range(decoders)]
    said = dict.fromkeys(readers, 0)
    while readers and min(said.values()) < BEFORE:
        _step(engine, said)
    began = len(log.steps)
    arrival = clock()
    said[engine.add(_request(decoders, length, AFTER))] = 0
    while engine.has_work and list(said.values())[-1] < AFTER:
        _step(engine, said)
    long = max(said)
    stamps, first = [], None
    for step in log.steps[max(0, began - 1) :]:
        end = (step.start_ns + step.duration_ns) / 1e6 - arrival * 1e3
        if readers and readers[0] in step.ids:
            stamps.append(end)
        if first is None and long in step.ids:
            left = step.tokens[step.ids.index(long)]
            length -= left
            first = end if length == 0 else None
    most = max(step.prefill_tokens + step.decode_tokens for step in log.steps[began:])
    gaps = [b - a for a, b in pairwise(stamps)]
    return Gaps(gaps, stamps[1:], first or 0.0, most, log)


def longest_pass(config: EngineConfig, runner: Runner, clock: Callable[[], float], length: int) -> float:
    """Milliseconds of the longest pass of that prompt when nobody else is there."""
    log = Log()
    engine = Engine(
        config,
        runner,
        num_kv_blocks=config.num_kv_blocks or 0,
        clock=clock,
        step_log=log,  # type: ignore[arg-type]
    )
    engine.add(_request(0, length, 1))
    while engine.has_work:
        engine.step()
    return max(step.duration_ns for step in log.steps) / 1e6


def _request(number: int, length: int, answer: int) -> Request:
    prompt = [(number * 31 + i * 7) % 200 + 1 for i in range(length)]
    return Request(prompt, answer, stop_after=answer)


def _step(engine: Engine, said: dict[int, int]) -> None:
    for output in engine.step():
        said[output.seq_id] += len(output.token_ids)


Tries = dict[str, tuple[list[Gaps], list[float]]]
"""Of each scheduler, its tries and the longest passes of the prompt alone."""


def measure(bench: Bench, length: int, tries: int) -> Tries:
    configs = {name: engine_config(*how) for name, how in SCHEDULERS.items()}
    clock: Callable[[], float]
    if bench.real:
        runner: Runner = _model(configs["continuous"])
        clock = time.monotonic
    else:
        clock = Clock()
        runner = VirtualRunner(clock, Cost())
    found: Tries = {name: ([], []) for name in configs}
    for attempt in range(tries + bench.real):
        for name, config in configs.items():
            gaps = play(config, runner, clock, length)
            alone = longest_pass(config, runner, clock, length)
            if attempt or not bench.real:  # the first time of all warms up
                found[name][0].append(gaps)
                found[name][1].append(alone)
    return found


def _model(config: EngineConfig) -> ModelRunner:
    from engines.runner import build_runner

    return build_runner({"name": "tiny", "id": None, "impl": "lean", "weights": "random"}, config, "cpu")


def _cost(found: Tries) -> Cost:
    config = engine_config("continuous")
    return fitted_cost([*(g.log for gaps, _ in found.values() for g in gaps), *probe(config, _model(config))])


def run(bench: Bench) -> Findings:
    lengths = (512,) if bench.smoke else LENGTHS
    tries = 1 if bench.smoke or not bench.real else TRIES
    budgets = {name: engine_config(*how).max_num_batched_tokens for name, how in SCHEDULERS.items()}
    rows, longest = [], {}
    holds = True
    found: Tries = {}
    for length in lengths:
        bench.say(f"{bench.name}: a prompt of {length} tokens")
        found = measure(bench, length, tries)
        for name, (gaps, alone) in found.items():
            row = summary(name, length, gaps, alone) | {"budget": budgets[name]}
            rows.append(row)
            longest[name, length] = row["longest_ms"][1]
            if name.startswith("chunked"):
                holds &= row["most_tokens"] <= row["budget"] and row["longest_ms"][0] <= SLACK * min(alone)
    last = lengths[-1]
    whole = min(longest[name, last] for name in ("prefill_first", "continuous"))
    usual = {row["scheduler"]: row["usual_ms"] for row in rows if row["length"] == last}
    tight = longest["chunked, budget 128", last]
    first = {row["scheduler"]: row["first_ms"] for row in rows if row["length"] == last}
    config = engine_config("chunked")
    cost = _cost(found) if bench.real else Cost()
    return Findings(
        claims=[
            Claim(
                f"a whole prompt of {last} tokens holds all readers up for as long as its prefill takes",
                "stalls of seconds (Yi-34B, figure 1a); a pass with a prompt of 1,021 tokens takes 3.2 x "
                "one of 4 decodes",
                f"{whole:.0f} ms, {whole / usual['continuous']:.0f} x the usual gap",
                whole > 5 * usual["continuous"],
            ),
            Claim(
                f"chunked: no pass above its budget, and no gap above {SLACK:g} x its longest pass",
                "a bound, by construction",
                f"{tight:.0f} ms with a budget of 128, {longest['chunked, budget 512', last]:.0f} ms with "
                "512",
                holds,
                promise=True,
            ),
            Claim(
                "the long prompt pays for it with its own first token",
                "chunks of 512 cost 1.12 to 1.19 x in prefill",
                f"{first['chunked, budget 128'] / first['continuous']:.2f} x with a budget of 128, "
                f"{first['chunked, budget 512'] / first['continuous']:.2f} x with 512",
                first["chunked, budget 128"] > first["continuous"],
            ),
        ],
        because=(
            "a pass is as long as the tokens in it, and only a budget bounds those. A pass of equal size "
            "takes longer at the "
            "end of a long prompt, since it attends to all of it."
        ),
        tables=[
            Table(
                ("prompt", "scheduler", "usual gap", "longest (least to most)", "alone", "its TTFT, ms"),
                [
                    [
                        str(row["length"]), row["scheduler"], f"{row['usual_ms']:.1f}",
                        "{1:.1f} ({0:.0f} to {2:.0f})".format(*row["longest_ms"]), f"{row['alone_ms']:.1f}",
                        f"{row['first_ms']:.0f}",
                    ]
                    for row in rows
                ],
            )
        ],
        ratios={"the preset's traffic": ratios(draw_schedule(bench.config()), config, cost)},
        figure=_figure(found, last),
        outcomes={"rows": rows},
    )  # fmt: skip


def summary(name: str, length: int, gaps: Sequence[Gaps], alone: Sequence[float]) -> dict[str, Any]:
    longest = sorted(g.longest for g in gaps)
    return {
        "scheduler": name,
        "length": length,
        "usual_ms": statistics.median(ms for g in gaps for ms in g.ms),
        "longest_ms": [longest[0], statistics.median(longest), longest[-1]],
        "alone_ms": statistics.median(alone),
        "first_ms": statistics.median(g.first_ms for g in gaps),
        "most_tokens": max(g.most_tokens for g in gaps),
    }


def _figure(found: Tries, length: int) -> Figure:
    """Every gap of the try whose longest gap is the median one, at the time at which it ended."""
    from harness.experiments.figures import chart, line, moment

    figure = chart(
        f"Gaps between tokens of {DECODERS} readers, when a prompt of {length:,} tokens arrives",
        "ms since its arrival", "gap, ms",
    )  # fmt: skip
    for name, (tries, _) in found.items():
        shown = sorted(tries, key=lambda g: g.longest)[len(tries) // 2]
        line(figure, name.split(",")[0], shown.at, shown.ms, name, style=int("128" in name))
    figure.update_traces(line_shape="vh")
    moment(figure, 0.0, "the prompt arrives")
    figure.update_xaxes(range=[-50, None])
    return figure


EXPERIMENT = Experiment(
    name="sarathi_stalls",
    title="Who stalls the readers",
    source="Sarathi-Serve (OSDI 2024), figure 1a",
    published="whole prompts stall every decode for the length of their prefill; chunks bound the stall "
    "by the token budget",
    run=run,
    real=True,
    minutes=0.5,
)
