"""`python -m harness.capacity crossover`: rounds at several places, each engine once a round, in shuffled
order and on the same requests, until the crossing is known or the time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import names
from harness.capacity.command import Asked, about, new_folder
from harness.capacity.configs import probe_config
from harness.capacity.crossover import Crossing, Place, by_x, locate, next_place
from harness.capacity.measure import BESIDE_S, LEAST_REQUESTS, SATURATING_REQUESTS
from harness.capacity.prober import (
    IN_VIRTUAL_TIME,
    RATES,
    Interrupted,
    ProbeError,
    Prober,
    Seen,
    more_is_better,
    path_of,
)
from harness.capacity.run import probers
from harness.capacity.search import rounded
from harness.cli import INCONCLUSIVE, INVALID, PASS, put, say
from harness.conf import UsageError
from harness.plan import draw_schedule
from harness.records import write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

RATE_RANGE = 0.3, 1.1
"""Of what the slower engine serves when it is full."""
MIX_RANGE = 0.05, 0.9
SCALE_RANGE = 0.5, 2.0
UNITS = {"rate": "requests/s", "prompt_mix": "of long prompts", "length_scale": "(workload.length_scale)"}
LOOKED_AT = 400
"""Requests whose prompts say which class has the longest."""


@dataclass
class Pair:
    """Two engines and every figure of the metric: figures[x][engine] by round, None where it is missing."""

    names: tuple[str, str]
    metric: str
    over: str
    figures: dict[float, dict[str, list[float | None]]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def logarithmic(self) -> bool:
        return self.over != "prompt_mix"

    def places(self) -> list[Place]:
        return by_x({x: (of[self.names[0]], of[self.names[1]]) for x, of in self.figures.items()})


def run_crossover(asked: Asked) -> int:
    pair = check(asked)
    if asked.settings.dry_run:
        put(plan(asked, pair))
        return PASS
    folder, began, ended = new_folder(asked, "crossover"), time.monotonic(), None
    facts = about(asked)
    say(f"crossover of {' and '.join(pair.names)}: {expected(asked)}")
    try:
        with probers(asked, folder) as found:
            measure(asked, pair, found, began + asked.seconds, lambda: _write(folder, facts, asked, pair))
    except (Interrupted, KeyboardInterrupt):
        ended = "interrupted"
    except ProbeError as error:
        ended = str(error)
    return conclude(folder, facts, asked, pair, ended)


def check(asked: Asked) -> Pair:
    """Raises UsageError for what cannot be crossed."""
    metric, over = str(asked.settings.metric), str(asked.settings.over)
    if path_of(metric) is None:
        near = "ttft_p99, tpot_p99, itl_p99, e2e_p90, normalized_p50, queue_delay_p50"
        raise UsageError(f"metric={metric}: no such metric; choose one as {near}, or {', '.join(RATES)}")
    latency = metric.rpartition("_")[0]
    if asked.virtual and metric not in RATES and latency not in IN_VIRTUAL_TIME:
        known = ", ".join(IN_VIRTUAL_TIME)
        raise UsageError(f"metric={metric}: --virtual has no {latency}, only {known}; leave out --virtual")
    names = tuple(asked.engines)
    if len(names) != 2:
        raise UsageError(f"engines=[{','.join(names)}]: a crossover is of two engines")
    drained = [name for name, cfg in asked.engines.items() if cfg.engine.get("scheduler") == "static"]
    if metric.startswith(("tpot", "itl")) and drained and asked.engines[drained[0]].engine.drain:
        raise UsageError(f"metric={metric}: answers of {drained[0]} are drained; choose normalized_p99")
    if over == "prompt_mix":
        long_class(next(iter(asked.engines.values())))
    given = asked.settings.range
    if given is not None and not _is_range(given, over):
        raise UsageError(f"range={given}: needs two numbers, as [1,8]; shares of prompts within 0 and 1")
    return Pair((names[0], names[1]), metric, over)


def _is_range(given: Any, over: str) -> bool:
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        return False
    return 0 < low < high and (over != "prompt_mix" or high <= 1)


def long_class(cfg: DictConfig) -> str:
    """The class with the longest mean prompt. Raises UsageError where there are no two classes."""
    lengths: dict[str, list[int]] = {}
    sample = cfg.copy()
    sample.load.requests = LOOKED_AT
    for request in draw_schedule(sample):
        lengths.setdefault(request.request_class, []).append(request.prompt_tokens)
    if len(lengths) < 2 or any(name not in (cfg.workload.get("classes") or {}) for name in lengths):
        raise UsageError(
            f"over=prompt_mix: {cfg.workload.name} has one class; needs several, as rag or mixed"
        )
    return max(lengths, key=lambda name: statistics.fmean(lengths[name]))


def moved(cfg: DictConfig, over: str, x: float, number: int, requests: int) -> DictConfig:
    """The configuration of one pass at place x. Rounds have seeds of their own."""
    at = probe_config(cfg, x if over == "rate" else cfg.workload.rate, number, requests)
    if over == "length_scale":
        at.workload.length_scale = x
    if over == "prompt_mix":
        long = long_class(cfg)
        others = {name: terms.weight for name, terms in cfg.workload.classes.items() if name != long}
        at.workload.classes[long].weight = x
        for name, weight in others.items():
            at.workload.classes[name].weight = (1 - x) * weight / sum(others.values())
    return at


def measure(
    asked: Asked,
    pair: Pair,
    found: Mapping[str, Prober],
    deadline: float,
    save: Callable[[], Any],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fills the pair in. A place that is begun gets all of its rounds, unless the time is up; a round that
    is not whole is left out."""
    settings, rng = asked.settings, np.random.default_rng(asked.settings.seed)
    first, last, requests = span(asked, pair, found)
    grid = np.geomspace if pair.logarithmic else np.linspace
    xs = [rounded(float(x)) for x in grid(first, last, settings.points)]
    longest = 0.0
    for number in range(settings.rounds):
        for x in rng.permutation(xs):
            if clock() + longest > deadline:
                return
            longest = max(longest, _round(pair, found, float(x), number, requests, rng, clock))
            save()
    for _ in range(settings.points):
        x = next_place(pair.places(), confidence=settings.confidence, logarithmic=pair.logarithmic)
        if x is None:
            return
        for number in range(settings.rounds):
            if clock() + longest > deadline:
                return
            longest = max(longest, _round(pair, found, x, number, requests, rng, clock))
            save()


def span(asked: Asked, pair: Pair, found: Mapping[str, Prober]) -> tuple[float, float, int]:
    """(from, to, requests of a pass)."""
    settings, of = asked.settings, asked.settings.capacity
    given = None if settings.range is None else [float(x) for x in settings.range]
    cfg = next(iter(asked.engines.values()))
    rate = float(cfg.workload.rate) if pair.over != "rate" else 0.0
    if pair.over == "rate":
        if given is None:
            served = {name: prober.saturate(SATURATING_REQUESTS) for name, prober in found.items()}
            for name, value in served.items():
                say(f"{name}: serves {value:.3g} requests/s when it never waits for work")
            given = [share * min(served.values()) for share in RATE_RANGE]
        rate = (given[0] * given[1]) ** 0.5
    elif given is None:
        scale = float(cfg.workload.get("length_scale") or 1)
        given = list(MIX_RANGE) if pair.over == "prompt_mix" else [scale * by for by in SCALE_RANGE]
    return given[0], given[1], of.requests or max(LEAST_REQUESTS, round(of.probe_s * rate))


def _round(
    pair: Pair,
    found: Mapping[str, Prober],
    x: float,
    number: int,
    requests: int,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> float:
    """Both engines at x, in random order. Seconds that it took."""
    began, values = clock(), {}
    for name in rng.permutation(list(pair.names)):
        prober = found[str(name)]
        seen = _valid(
            partial(prober.measure, moved(prober.cfg, pair.over, x, number, requests)), str(name), x
        )
        values[str(name)] = seen.metric(pair.metric)
        pair.runs.append({"x": x, "round": number, "arm": str(name), "run": seen.run})
    for name, value in values.items():
        of_place = pair.figures.setdefault(x, {each: [] for each in pair.names})
        of_place[name].append(value)
    told = ", ".join(
        f"{name} {'-' if values[name] is None else f'{values[name]:.4g}'}" for name in pair.names
    )
    say(f"{x:.3g} {UNITS[pair.over]}, round {number + 1}: {pair.metric} {told}")
    return clock() - began


def _valid(measure: Callable[[], Seen], name: str, x: float) -> Seen:
    """A pass that is invalid is tried once more. Raises ProbeError for a second one."""
    seen = measure()
    if seen.invalid_reasons:
        say(f"{name} at {x:.3g}: {seen.invalid_reasons[0]}; once more")
        seen = measure()
        if seen.invalid_reasons:
            raise ProbeError(f"{name} at {x:.3g}: {seen.invalid_reasons[0]}, twice")
    return seen


def _write(folder: Path, facts: dict[str, Any], asked: Asked, pair: Pair) -> dict[str, Any]:
    places = pair.places()
    confidence = asked.settings.confidence
    crossing = locate(
        places, confidence=confidence, logarithmic=pair.logarithmic, seed=int(asked.settings.seed)
    )
    value = {
        "schema_version": 1,
        "kind": "crossover",
        **facts,
        "metric": pair.metric,
        "over": pair.over,
        "confidence": confidence,
        "arms": [{"name": name, "engine": name} for name in pair.names],
        "crossover": {
            "rate": crossing.x,
            "low": crossing.low,
            "high": crossing.high,
            "by": overtaker(pair, crossing),
            **{key: item for key, item in asdict(crossing).items() if key not in ("x", "low", "high")},
        },
        "text": sentence(pair, crossing, places),
        "points": [
            {
                "x": place.x,
                **{name: list(v) for name, v in zip(pair.names, (place.reference, place.arm), strict=True)},
                **{
                    key: item
                    for key, item in asdict(place.effect(confidence)).items()
                    if key in ("ratio", "low", "high", "rounds", "reason")
                },
            }
            for place in places
        ],
        "runs": pair.runs,
    }
    write_json(folder / "capacity.json", value)
    return value


def overtaker(pair: Pair, crossing: Crossing) -> str | None:
    """Who is better above the crossing, or throughout."""
    if crossing.arm_above is None:
        return None
    return pair.names[1] if crossing.arm_above == more_is_better(pair.metric) else pair.names[0]


def sentence(pair: Pair, crossing: Crossing, places: list[Place]) -> str:
    better, unit = overtaker(pair, crossing), UNITS[pair.over]
    what = names.name(path_of(pair.metric) or pair.metric)
    span_text = f"[{places[0].x:.3g}, {places[-1].x:.3g}] {unit}" if places else "any place"
    if crossing.kind == "crossover":
        other = next(name for name in pair.names if name != better)
        return (
            f"{what}: {better} overtakes {other} at {crossing.x:.3g} {unit} "
            f"(between {crossing.low:.3g} and {crossing.high:.3g})"
        )
    if crossing.kind == "none":
        return f"{what}: no crossover in {span_text}; {better} is better throughout"
    if crossing.kind == "same":
        return f"{what}: no crossover in {span_text}; the two are the same within 2 %"
    return f"{what}: inconclusive in {span_text}: {crossing.reason}"


def conclude(folder: Path, facts: dict[str, Any], asked: Asked, pair: Pair, ended: str | None) -> int:
    from harness.capacity.crossover_page import print_crossover, write_crossover

    value = _write(folder, facts, asked, pair)
    print_crossover(value)
    if ended is not None:
        say(f"ended early: {ended}")
    try:
        write_crossover(value, folder / "report.html")
    finally:
        put(f"results: {folder}")
    if ended is not None:
        return INVALID
    return INCONCLUSIVE if value["crossover"]["kind"] == "inconclusive" else PASS


def plan(asked: Asked, pair: Pair) -> str:
    """For --dry-run."""
    facts, settings = about(asked), asked.settings
    where = "found from a closed loop" if settings.range is None else f"{list(settings.range)}"
    return "\n".join(
        (
            f"workload   {facts['workload']}, model {facts['model']}, seeds from {facts['seed']}",
            f"engines    {pair.names[0]} (reference) and {pair.names[1]}, in shuffled order",
            f"metric     {pair.metric}; {'more' if more_is_better(pair.metric) else 'less'} is better",
            f"over       {pair.over}, {where}: {settings.points} places, then up to as many at the crossing",
            f"rounds     {settings.rounds} a place, {settings.capacity.probe_s:g} s of arrivals each",
            f"output     {settings.output.dir}/<time>-crossover-<hex>",
            f"time       {expected(asked)}",
        )
    )


def expected(asked: Asked) -> str:
    from harness.eta import duration

    if asked.virtual:
        return "seconds (virtual time)"
    one = 2 * (1.2 * asked.settings.capacity.probe_s + BESIDE_S)
    first = asked.settings.points * asked.settings.rounds * one
    return (
        f"about {duration(min(first, asked.seconds))} for the first places, at most {duration(asked.seconds)}"
    )
