"""`python -m harness.capacity`: plan, probes, result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capacity import store
from harness.capacity.command import Asked, about, new_folder
from harness.capacity.configs import SATURATING_S
from harness.capacity.measure import BESIDE_S, Arm, Budget, exit_code, measure
from harness.capacity.prober import Prober
from harness.capacity.result import to_json
from harness.capacity.search import Rules
from harness.cli import PASS, in_words, put, say
from harness.records import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

USUAL_PROBES = 11
"""Of one engine: three to have one rate that holds and one that fails, three to bisect, the rest repeats."""


def run_capacity(asked: Asked) -> int:
    if asked.settings.dry_run:
        put(plan(asked))
        return PASS
    began = time.monotonic()
    folder = new_folder(asked, "capacity")
    facts = about(asked)
    write = partial(_write, folder, facts)
    with probers(asked, folder) as found:
        say(announcement(asked))
        arms = [Arm(name, prober) for name, prober in found.items()]
        of = asked.settings.capacity
        budget = Budget(
            asked.seconds - (time.monotonic() - began), of.probe_s, of.requests, tuple(of.curve or ())
        )
        measure(arms, Rules(of.tolerance, of.repeats), budget, say=say, save=write)
    return conclude(asked, arms, folder, write(arms))


@contextmanager
def probers(asked: Asked, folder: Path) -> Iterator[Mapping[str, Prober]]:
    """A prober for each engine; all servers stand until the end, so that their probes can take turns."""
    if asked.virtual:
        from harness.capacity.virtual import Virtual

        yield {name: Virtual(cfg, asked.limits) for name, cfg in asked.engines.items()}
        return
    from harness.capacity.measured import Measured
    from harness.standing import Stage

    with ExitStack() as stack:
        stage = stack.enter_context(Stage())
        yield {
            name: stack.enter_context(Measured(_into(cfg, folder), asked.limits, stage))
            for name, cfg in asked.engines.items()
        }


def _into(cfg: DictConfig, folder: Path) -> DictConfig:
    cfg.output.dir = str(folder)
    return cfg


def plan(asked: Asked) -> str:
    """For --dry-run: what will be done, and how long it takes."""
    from harness.eta import duration

    facts, of = about(asked), asked.settings.capacity
    cfg = next(iter(asked.engines.values()))
    requests = (
        f"{of.requests} requests" if of.requests else f"{of.probe_s:g} s of arrivals, 100 requests at least"
    )
    return "\n".join(
        (
            f"workload   {facts['workload']}, model {facts['model']}, seeds from {cfg.seed}",
            f"engines    {', '.join(asked.engines)}, in turn, each on a server that stays",
            f"limits     {facts['slo_text']}, growth {of.growth:g}",
            f"search     from a closed loop of {SATURATING_S:g} s; rates by factors, then by bisection to "
            f"{of.tolerance:.0%}; up to {of.repeats} probes of a rate near the limit",
            f"probes     {requests}; about {USUAL_PROBES} an engine",
            f"output     {asked.settings.output.dir}/<time>-capacity-<hex>",
            f"time       {_expected(asked, duration)}",
        )
    )


def announcement(asked: Asked) -> str:
    from harness.eta import duration

    return f"capacity of {', '.join(asked.engines)}: {_expected(asked, duration)}"


def _expected(asked: Asked, duration: Callable[[float], str]) -> str:
    if asked.virtual:
        return "seconds (virtual time)"
    from harness.eta import START_OTHERS_S, START_S

    cfg, of = next(iter(asked.engines.values())), asked.settings.capacity
    start_s = START_S.get(cfg.model.name, START_OTHERS_S)
    one = start_s + SATURATING_S + BESIDE_S + (USUAL_PROBES + len(of.curve or ())) * (of.probe_s + BESIDE_S)
    usual = min(asked.seconds, one * len(asked.engines))
    return f"about {duration(usual)}, at most {duration(asked.seconds)}"


def _write(folder: Path, facts: dict[str, Any], arms: Sequence[Arm]) -> dict[str, Any]:
    value = to_json(arms, facts, facts["cost_device_hour"])
    write_json(folder / "capacity.json", value)
    return value


def conclude(asked: Asked, arms: Sequence[Arm], folder: Path, value: dict[str, Any]) -> int:
    """Table, page, and what later runs may know."""
    from harness.capacity.page import write_page
    from harness.capacity.table import print_result

    print_result(value)
    for arm, result in zip(arms, value["arms"], strict=True):
        found = arm.interval
        if not asked.virtual and found.low is not None and found.high is not None:
            kept = {**result["capacity"], "measured_at": value["started_at"], "folder": str(folder.resolve())}
            try:
                store.save(asked.engines[arm.name], kept)
            except OSError as error:
                say(f"{arm.name}: load.utilization cannot know of it: {in_words(error)}")
    try:
        write_page(value, folder / "report.html")
    finally:
        put(f"results: {folder}")
    return exit_code(arms)
