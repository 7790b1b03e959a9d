"""What a long prompt does to those who are reading: the stall plot (Sarathi-Serve, OSDI 2024, figure 1a).

    python -m harness.experiments.stalls [--figure stalls.html]

Eight answers are being streamed when one prompt of L tokens arrives. A scheduler that computes whole prompts
holds all eight up for as long as that takes; under chunked prefill no gap is longer than one pass of the
token budget. The engine runs here with model=tiny in this process: no server, no network, so a gap is the
engine's own. Each scheduler is tried several times, in turn, so that a slow moment of the machine meets all.

Asserted for chunked (exit code 1): no pass has more tokens than the budget, and longest gap <= SLACK x the
longest pass of the same prompt without the eight, each in its least disturbed try: what else runs only adds
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.engine import Engine, Runner
from engines.request import Request
from engines.virtual import Log
from harness.conf import compose

DECODERS, THEIR_PROMPT = 8, 32
BEFORE, AFTER = 20, 20  # tokens of each answer before the long prompt arrives and after its first token
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
    return Gaps(gaps, stamps[1:], first or 0.0, most)


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


def measure(length: int, tries: int) -> dict[str, tuple[list[Gaps], list[float]]]:
    """Of each scheduler, its tries and the longest passes of the prompt alone."""
    from engines.runner import build_runner

    configs = {name: engine_config(*how) for name, how in SCHEDULERS.items()}
    runner = build_runner(
        {"name": "tiny", "id": None, "impl": "lean", "weights": "random"}, configs["continuous"], "cpu"
    )
    found: dict[str, tuple[list[Gaps], list[float]]] = {name: ([], []) for name in configs}
    for number in range(tries + 1):
        for name, config in configs.items():
            gaps = play(config, runner, time.monotonic, length)
            alone = longest_pass(config, runner, time.monotonic, length)
            if number:  # the first time of all warms up
                found[name][0].append(gaps)
                found[name][1].append(alone)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.experiments.stalls", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="of the prompt, tokens"
    )
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--figure", type=Path, help="write the gaps at the longest prompt as an HTML page")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {"experiment": "stalls", "tries": args.tries, "rows": []}
    budgets = {name: engine_config(*how).max_num_batched_tokens for name, how in SCHEDULERS.items()}
    holds = True
    print(f"{'prompt':8}{'ms':21}{'usual gap':>10}{'longest gap':>22}{'alone':>7}{'TTFT':>7}")
    for length in args.lengths:
        found = measure(length, args.tries)
        for name, (gaps, alone) in found.items():
            row = summary(name, length, gaps, alone) | {"budget": budgets[name]}
            result["rows"].append(row)
            low, middle, high = row["longest_ms"]
            print(
                f"{length:<8}{name:21}{row['usual_ms']:10.1f}{f'{middle:.1f} ({low:.0f} to {high:.0f})':>22}"
                f"{row['alone_ms']:7.1f}{row['first_ms']:7.0f}"
            )
            if name.startswith("chunked"):
                holds &= row["most_tokens"] <= row["budget"] and low <= SLACK * min(alone)
    print(
        "longest gap: median of the tries (least to most); alone: the prompt's longest pass without company\n"
        f"bound, chunked: least of longest gap <= {SLACK:g} x least of alone: "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    if args.figure:
        write_figure({name: gaps for name, (gaps, _) in found.items()}, args.lengths[-1], args.figure)
        print(f"figure: {args.figure}")
    print(json.dumps(result | {"bound_holds": holds}))
    return 0 if holds else 1


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


def write_figure(found: dict[str, list[Gaps]], length: int, path: Path) -> None:
    """Every gap of the try whose longest gap is the median one, at the time at which it ended."""
    import plotly.graph_objects as go

    from harness.dashboard.figures import COLOURS

    figure = go.Figure()
    for colour, (name, tries) in zip(COLOURS, found.items(), strict=False):
        shown = sorted(tries, key=lambda g: g.longest)[len(tries) // 2]
        figure.add_scatter(
            x=shown.at, y=shown.ms, name=name, mode="lines+markers", line={"color": colour, "shape": "vh"}
        )
    figure.add_vline(
        x=0, line_dash="dot", annotation_text="the prompt arrives", annotation_position="top left"
    )
    figure.update_xaxes(range=[-50, None])
    figure.update_layout(
        title=f"Gaps between tokens of {DECODERS} readers, when a prompt of {length} tokens arrives",
        xaxis_title="ms since its arrival",
        yaxis_title="gap, ms",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
    )
    figure.write_html(path, include_plotlyjs=True)


if __name__ == "__main__":
    raise SystemExit(main())
