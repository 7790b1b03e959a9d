"""One run's engines after another over one runner: a server that is measured several times starts every run
as a new server would, but warm. Weights, compiled kernels and graphs stay; queues, the KV pool with its
prefix cache, and all that a scheduler has learnt are new, and so are the files of the records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from engines.config import ConfigError
from engines.overlap import build_engine
from engines.routes import DEFAULT, Route, shares
from engines.runner import ModelRunner
from engines.server.engine_loop import ReportLog
from engines.shared_runner import SharedRunner
from engines.step_log import StepLog
from engines.turns import Engines


@dataclass(frozen=True, slots=True)
class Recording:
    """The engines of one run, and by route the logs that they write. problem: why they write none, though
    they were asked to."""

    engines: Engines
    logs: Mapping[str, ReportLog]
    problem: str | None = None

    @property
    def log(self) -> ReportLog:
        return self.logs[DEFAULT]


class Recordings:
    """`now` is the recording in progress."""

    def __init__(
        self, config: Mapping[str, Any], routes: Sequence[Route], runner: ModelRunner, records: Path | None
    ) -> None:
        """Raises ConfigError."""
        self._config = config
        self._routes = routes
        self._runner = runner
        self.now = self._open(records)

    def next(self, records: Path | None) -> Recording:
        """End what is in progress and begin another one in that folder; None: without records. Raises OSError
        when the end of the one before could not be written."""
        self.end()
        try:
            self.now = self._open(records)
        except ConfigError as error:
            self.now = replace(self._open(None), problem=str(error))
        return self.now

    def end(self, failed: bool = False) -> None:
        """Abort what is still under way and close the files. failed: the engine is in no state to say how it
        ends. Raises OSError."""
        endings = [] if failed else self.now.engines.end()
        graphs = self._runner.info()["graphs"]
        for log in self.now.logs.values():
            log.close()
        for name, ending in zip(self.now.engines.by_name, endings, strict=False):
            self.now.logs[name].end(replace(ending, graphs=graphs))

    def _open(self, records: Path | None) -> Recording:
        runner, engine_config = self._runner, self._routes[-1].engine
        logs = {DEFAULT: ReportLog(_step_log(records))}
        made, ids = {}, itertools.count()
        for route, (offset, num_kv_blocks) in zip(
            self._routes, shares(self._routes, runner.num_kv_blocks), strict=True
        ):
            if route.name != DEFAULT:
                folder = None if records is None else records / "routes" / route.name
                logs[route.name] = ReportLog(_step_log(folder), route.name, logs[DEFAULT])
            made[route.name] = build_engine(
                route.engine,
                SharedRunner(runner, offset, engine_config.block_size) if offset else runner,
                num_kv_blocks=num_kv_blocks,
                num_host_blocks=runner.num_host_blocks if route.name == DEFAULT else 0,
                eos_token_ids=runner.loaded.tokenizer.eos_token_ids,
                seed=self._config["seed"],
                step_log=cast(StepLog, logs[route.name]),
                ids=ids,
            )
        return Recording(Engines(made), logs)


Next = Callable[[Path | None], Recording]


def _step_log(records: Path | None) -> StepLog | None:
    if records is None:
        return None
    import pyarrow as pa

    pa.array([0])  # pyarrow loads pandas at the first conversion: not in the middle of an iteration
    try:
        return StepLog(records)
    except FileExistsError as error:
        raise ConfigError(f"--records {records}: {error.filename} exists; give another folder") from None
    except OSError as error:
        raise ConfigError(f"--records {records}: cannot be written ({error.strerror})") from None
