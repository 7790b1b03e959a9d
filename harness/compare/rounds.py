"""Measuring the rounds: a warm server for each arm, one pass each a round, the reference twice where A/A is
asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.cli import put, say
from harness.compare.arms import Arm, repeat_of
from harness.compare.order import orders
from harness.compare.settings import Settings
from harness.conf import UsageError
from harness.loadgen.processes import WorkerError
from harness.plan import draw_schedule
from harness.server_process import ServerError
from harness.standing import Stage, StandingServer
from harness.table import lookup, number

if TYPE_CHECKING:
    import pandas as pd
    from omegaconf import DictConfig

    from workloads.schedule import Schedule

MOST_WARMUP = 100


@dataclass(frozen=True)
class Pass:
    """One arm in one round. requests: a row for each, with its latencies (harness.metrics.latency)."""

    run_dir: Path
    summary: dict[str, Any]
    requests: pd.DataFrame

    @property
    def problems(self) -> list[str]:
        return list(self.summary["invalid_reasons"])


@dataclass(frozen=True)
class Round:
    """A whole round: every arm was measured. passes: by name, in the order in which they were."""

    number: int
    passes: Mapping[str, Pass]

    @property
    def problems(self) -> list[str]:
        return [f"{name}: {reason}" for name, one in self.passes.items() for reason in one.problems]

    @property
    def valid(self) -> bool:
        return not self.problems


class Ended(Exception):
    """The comparison ends before its time; the message says why, in one line."""


class Bench:
    """The servers of all arms, in `folder`/arms, and the rounds measured on them, in `folder`/rounds."""

    def __init__(self, arms: Sequence[Arm], settings: Settings, folder: Path, stage: Stage) -> None:
        self._arms = {arm.name: arm for arm in arms}
        if settings.aa:
            self._arms[repeat_of(arms[0].name)] = arms[0]
        self._settings = settings
        self._folder = folder
        self._stage = stage
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, StandingServer] = {}  # by name of the arm, a second pass has its arm's
        self._orders = orders(list(self._arms), arms[0].cfg.seed)
        self.rounds: list[Round] = []

    def __enter__(self) -> Bench:
        """Start and warm every server. Raises Ended, and UsageError for what one of them refuses."""
        with contextlib.ExitStack() as stack:
            for arm in {arm.name: arm for arm in self._arms.values()}.values():
                put(f"starting {arm.name}")
                if arm.cfg.engine.kind == "openai" and not self._settings.vary_seed:
                    say(
                        f"warning: {arm.name} is not ours: its prefix cache is not emptied between rounds; "
                        "vary_seed=true sends other prompts each time"
                    )
                server = StandingServer(arm.cfg, self._arm_folder(arm), self._stage)
                with self._ending(arm.name):
                    self._servers[arm.name] = stack.enter_context(server)
                    self._warm_up(arm)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def measure_round(self) -> Round:
        """One more round. Raises Ended, and then it is not among `rounds`."""
        count, order = len(self.rounds) + 1, next(self._orders)
        valid = sum(one.valid for one in self.rounds)
        put(f"round {count} ({valid} valid before it): {', '.join(order)}")
        schedule: Schedule | None = None
        passes = {}
        for place, name in enumerate(order, 1):
            arm = self._arms[name]
            cfg = self._config(arm, count)
            schedule = draw_schedule(cfg) if schedule is None else schedule  # the same object for all arms
            run_dir = self._folder / "rounds" / f"{count:02}-{place}-{slug(name)}"
            passes[name] = self._measure(arm, cfg, run_dir, schedule)
            put(f"  {name}: {_gist(passes[name].summary)}")
        made = Round(count, passes)
        self.rounds.append(made)
        return made

    def _measure(self, arm: Arm, cfg: DictConfig, run_dir: Path, schedule: Schedule | None) -> Pass:
        from harness.metrics.latency import per_request
        from harness.metrics.run import load_run

        server = self._servers[arm.name]
        with self._ending(arm.name):
            outcome = server.measure(cfg, run_dir, schedule)
        if outcome.interrupted:
            raise Ended("interrupted")
        if server.died:
            raise Ended(f"server_died: {arm.name}: {server.died}")
        assert outcome.summary is not None
        return Pass(run_dir, outcome.summary, per_request(load_run(run_dir).requests))

    @contextlib.contextmanager
    def _ending(self, name: str) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise Ended("interrupted") from None
        except (ServerError, WorkerError) as error:
            raise Ended(f"{name}: {error}") from None
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None

    def _warm_up(self, arm: Arm) -> None:
        """A shorter pass, whose figures are not used."""
        count = warm_up_requests(len(draw_schedule(arm.cfg)), self._settings.warmup)
        if count:
            cfg = arm.cfg.copy()
            cfg.load.requests, cfg.load.duration_s = count, None
            outcome = self._servers[arm.name].measure(cfg, self._arm_folder(arm) / "warmup")
            if outcome.interrupted:
                raise Ended("interrupted")

    def _config(self, arm: Arm, round_number: int) -> DictConfig:
        if not self._settings.vary_seed:
            return arm.cfg
        cfg = arm.cfg.copy()
        cfg.seed = arm.cfg.seed + round_number - 1
        return cfg

    def _arm_folder(self, arm: Arm) -> Path:
        number = list(self._arms).index(arm.name) + 1
        return self._folder / "arms" / f"{number}-{slug(arm.name)}"


def warm_up_requests(planned: int, asked: int | None) -> int:
    return min(MOST_WARMUP, max(1, planned // 4)) if asked is None else asked


def slug(name: str) -> str:
    """As part of a folder's name, which a number before it makes unique."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:40]


def _gist(summary: dict[str, Any]) -> str:
    """A pass in a few words."""
    ttft, rate = (
        number(lookup(summary, path))
        for path in ("latency_ms.ttft.from_intended.p50", "throughput.output_tokens_per_s")
    )
    invalid = f"; INVALID {summary['invalid_reasons'][0]}" if summary["invalid_reasons"] else ""
    return f"TTFT p50 {ttft} ms, {rate} output tokens/s{invalid}"
