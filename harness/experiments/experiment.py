"""What an experiment is: a published figure, a plan, and a verdict on what came out here."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engines.config import EngineConfig
from harness.conf import compose
from harness.experiments.outcome import Outcome, fitted_cost, median, outcome
from harness.experiments.probe import probe
from harness.experiments.ratios import Ratios, ratios
from harness.experiments.simulation import Cost, Played, play_real, play_virtual
from harness.plan import draw_schedule

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from engines.runner import ModelRunner
    from workloads.schedule import Schedule, ScheduledRequest

HELD, PARTLY, NOT = "held", "partly", "not held"
ROUNDS = 3
"""Of a real point, in turn with the others: a slow moment of the machine meets all."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One published statement and what was found. promise: ours, so that it may not fail."""

    text: str
    published: str
    measured: str
    held: bool
    promise: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """because: why it came out so, one or two sentences. outcomes: of every point, for machines."""

    claims: Sequence[Claim]
    because: str
    tables: Sequence[Table]
    ratios: Mapping[str, Ratios]
    figure: Figure
    outcomes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        held = [claim.held for claim in self.claims]
        return HELD if all(held) else PARTLY if any(held) else NOT


@dataclass(frozen=True, slots=True)
class Experiment:
    """real: by default it runs a model on this machine, since time has to be right; else in virtual time.
    minutes: about, on two cores. run: everything that it does."""

    name: str
    title: str
    source: str
    published: str
    run: Callable[[Bench], Findings]
    real: bool
    minutes: float


class Bench:
    """Plays points of one experiment: its Hydra preset with overrides, in virtual time or for real (a model
    in this process, without a server). smoke: a minimal form, whose verdict says little."""

    def __init__(
        self,
        name: str,
        *,
        real: bool = False,
        smoke: bool = False,
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name, self.real, self.smoke, self.seed, self.say = name, real, smoke, seed, say
        self._configs: dict[tuple[str, ...], Any] = {}
        self._runners: dict[tuple[int | None, ...], ModelRunner] = {}

    def config(self, *overrides: str) -> Any:
        """Composing takes 0.1 s, so a search over rates does it once."""
        rates = [o for o in overrides if o.startswith("workload.rate=") and o != "workload.rate=null"]
        others = tuple(o for o in overrides if o not in rates)
        if others not in self._configs:
            self._configs[others] = compose([f"experiment={self.name}", f"seed={self.seed}", *others])
        cfg = copy.deepcopy(self._configs[others])
        if rates:
            cfg.workload.rate = float(rates[-1].partition("=")[2])
        return cfg

    def play(
        self, *overrides: str, cost: Cost | None = None, times: int = 1, clients: int | None = None
    ) -> list[Played]:
        """One pass for each of `times`, on one engine. cost: of virtual time. clients: a closed loop of so
        many, each with its share of the requests, one after the other."""
        cfg = self.config(*overrides)
        config, schedule = EngineConfig.from_mapping(dict(cfg.engine)), draw_schedule(cfg)
        rows = schedule if clients is None else closed_loop(schedule, clients)
        if not self.real:
            return play_virtual(config, rows, cost, times)
        runner = self._runner(config, cfg.model, schedule)
        vocab = runner.loaded.config.vocab
        gc.collect()
        return play_real(config, rows, runner, vocab, times)

    def rounds(
        self, points: Mapping[str, Sequence[str]], rounds: int = ROUNDS, cost: Cost | None = None
    ) -> dict[str, list[Played]]:
        """Every point so many times, in turn. Once where nothing varies."""
        found: dict[str, list[Played]] = {name: [] for name in points}
        for number in range(rounds if self.real and not self.smoke else 1):
            for name, overrides in points.items():
                self.say(f"{self.name}: {name}, round {number + 1}")
                found[name] += self.play(*overrides, cost=cost)
        return found

    def ratios(self, played: Played, cost: Cost | None = None, capacity: float | None = None) -> Ratios:
        """cost: None: what the passes took, where they are real; otherwise that of virtual time."""
        if cost is None:
            cost = self._fitted(played) if self.real else Cost()
        return ratios([seen.planned for seen in played.seen], played.config, cost, capacity)

    def _fitted(self, played: Played) -> Cost:
        return fitted_cost([played.log, *probe(played.config, self._runners[_pool_key(played.config)])])

    def _runner(self, config: EngineConfig, model: Any, schedule: Schedule) -> ModelRunner:
        """One for each pool; it is warm."""
        key = _pool_key(config)
        if key not in self._runners:
            from engines.runner import build_runner

            self._runners[key] = runner = build_runner(dict(model), config, "cpu")
            warm = [
                replace(row, arrival_s=0.0, think_s=None, cancel_kind="none", cancel_value=None)
                for row in list(schedule)[:4]
            ]
            play_real(config, warm, runner, runner.loaded.config.vocab)
        return self._runners[key]


def _pool_key(config: EngineConfig) -> tuple[int | None, ...]:
    return config.num_kv_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens


def closed_loop(rows: Iterable[ScheduledRequest], clients: int) -> list[ScheduledRequest]:
    """The same requests, dealt out to clients: the next one of each comes when its last one has ended."""
    return [
        replace(
            row,
            arrival_s=0.0,
            session=f"client-{i % clients}",
            turn=i // clients,
            think_s=None if i < clients else 0.0,
        )
        for i, row in enumerate(rows)
    ]


def medians(
    found: Mapping[str, Sequence[Played]], how: Callable[[Played], Outcome] = outcome
) -> dict[str, Outcome]:
    """Of each point, figure by figure over its rounds."""
    return {name: median([how(played) for played in rounds]) for name, rounds in found.items()}


def table(
    outcomes: Mapping[str, Outcome],
    columns: Mapping[str, Callable[[Outcome], str]],
    first: str,
    name: str = "",
) -> Table:
    """A row for each point; columns: title -> cell."""
    rows = [[point, *(cell(o) for cell in columns.values())] for point, o in outcomes.items()]
    return Table((first, *columns), rows, name)


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, without exponent; a dash for what was not measured."""
    if value != value:
        return "–"
    if abs(value) >= 10 ** (digits - 1) or value == 0:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def column(field_name: str) -> Callable[[Outcome], str]:
    return lambda found: number(float(getattr(found, field_name)))


def spread(values: Iterable[float]) -> str:
    low, high = min(values := list(values)), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"
