"""A server that is started once and measured several times, each pass a run directory of its own.

    with Stage() as stage, StandingServer(cfg, folder, stage) as server:
        outcome = server.measure(cfg, run_dir)            # the first pass
        outcome = server.measure(other_cfg, other_dir)    # workload, load, slo and seed may differ

Every pass begins in the state of a new server, but warm: the prefix cache is empty and the scheduler has
learnt nothing, while weights, kernels and graphs are loaded (engines.server.recordings). Several servers may
stand at once, as long as one is measured at a time; one that is not computes nothing. A server that somebody
else runs (engine=openai) can be measured so too, but its caches are its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from harness.cli import say
from harness.conf import UsageError
from harness.host import HostLock
from harness.interrupt import Interruption
from harness.loadgen.processes import LoadProcesses
from harness.measurement import Measurement
from harness.plan import check_engine, draw_schedule
from harness.run import RunOutcome, exit_code, now_iso, summarise
from harness.server_process import ServerError, ServerProcess
from harness.target import RunTarget, foreign_target, our_target

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.schedule import Schedule

MAY_CHANGE = ("workload", "load", "slo", "seed", "output", "dry_run")
"""Settings that a pass may have otherwise than its server."""


class Stage:
    """What the standing servers of a process share: the host, which is theirs alone, and the signals. The
    first Ctrl-C ends the pass in progress (between passes it raises KeyboardInterrupt), the second one ends
    servers and program at once."""

    _open: ClassVar[bool] = False

    def __init__(self) -> None:
        self.interruption = Interruption()
        self._lock = HostLock()
        self._kills: list[Callable[[], None]] = []

    def __enter__(self) -> Stage:
        if Stage._open:  # it would wait for its own lock
            raise RuntimeError("a process has one Stage: give it to every StandingServer")
        self.interruption.__enter__()
        try:
            self._lock.acquire(say)
        except BaseException:
            self.interruption.__exit__(None, None, None)
            raise
        Stage._open = True
        self.interruption.at_once = self._kill
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        Stage._open = False
        self._lock.release()
        self.interruption.__exit__(kind, value, trace)

    @property
    def interrupted(self) -> bool:
        return self.interruption.count > 0

    def on_leaving(self, kill: Callable[[], None]) -> None:
        """What a second Ctrl-C has to kill; it may have ended by then."""
        self._kills.append(kill)

    def _kill(self) -> None:
        for kill in self._kills:
            kill()


class StandingServer:
    """One server, in its folder with config.yaml and server.log. Without a stage it has one of its own, and
    the process no other server."""

    def __init__(self, cfg: DictConfig, folder: Path, stage: Stage | None = None) -> None:
        self.cfg = cfg
        self.folder = folder
        self.passes = 0
        self._own_stage = stage is None
        self._stage = Stage() if stage is None else stage
        self._server: ServerProcess | None = None
        self._target: RunTarget | None = None
        self._measurement: Measurement | None = None

    def __enter__(self) -> StandingServer:
        """Starts it and waits until it is ready. Raises UsageError for settings that it refuses, ServerError
        when it dies."""
        check_engine(self.cfg)
        if self._own_stage:
            self._stage.__enter__()
        try:
            self._start()
        except BaseException as error:
            if self._server is not None:
                self._server.kill()
                self._server.stop()
            if self._own_stage:
                self._stage.__exit__(None, None, None)
            if isinstance(error, ServerError) and error.refused:
                raise UsageError(str(error)) from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._server is not None:
                self._server.stop()
        finally:
            if self._own_stage:
                self._stage.__exit__(kind, value, trace)

    @property
    def died(self) -> str | None:
        """How it ended, if it has."""
        if self._server is None or self._server.returncode is None:
            return None
        return f"the server {self._server.describe_end()}"

    def measure(self, cfg: DictConfig, run_dir: Path, schedule: Schedule | None = None) -> RunOutcome:
        """One pass: all records and summary.json in run_dir, which must not hold any. schedule: the one to
        send, in the place of the one that cfg draws. Raises UsageError where cfg asks for another server, and
        ServerError when this one is gone. A pass that is cut short is an outcome, exit code 3."""
        from omegaconf import OmegaConf

        self._check_same_server(cfg)
        assert self._target is not None
        run_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, run_dir / "config.yaml", resolve=True)
        started_at = now_iso()
        measurement = Measurement(cfg, run_dir, self._stage.interruption, self._server, self.passes)
        try:
            with LoadProcesses() as load:
                self._stage.on_leaving(load.kill)
                schedule = draw_schedule(cfg) if schedule is None else schedule
                if self._server is not None:
                    self._server.record(run_dir)
                self._measurement = measurement
                measurement.send(self._target, schedule, load, started_at, self._end_records)
        except BaseException:
            if not measurement.began:
                shutil.rmtree(run_dir, ignore_errors=True)
            raise
        finally:
            self._measurement = None
            self._stage.interruption.on_signal = None
        self.passes += 1
        summary = summarise(run_dir)
        return RunOutcome(exit_code(cfg, summary), run_dir, summary, self._stage.interrupted)

    def _start(self) -> None:
        from omegaconf import OmegaConf

        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.yaml"
        OmegaConf.save(self.cfg, config, resolve=True)
        if self.cfg.engine.kind == "openai":
            self._target = foreign_target(self.cfg)
            return
        log = self.folder / "server.log"
        self._server = ServerProcess(config, None, log, on_exit=self._on_exit)
        self._stage.on_leaving(self._server.kill)
        self._target = our_target(self._server.wait_ready(), self.cfg)

    def _end_records(self) -> str | None:
        assert self._server is not None
        try:
            self._server.record(None)
        except ServerError as error:
            return str(error)
        return None

    def _on_exit(self, code: int) -> None:
        """From the watching thread."""
        measurement = self._measurement
        if measurement is not None:
            measurement.server_died(code)

    def _check_same_server(self, cfg: DictConfig) -> None:
        for key in cfg:
            if key not in MAY_CHANGE and cfg[key] != self.cfg.get(key):
                changed = _first_difference(str(key), cfg[key], self.cfg.get(key))
                raise UsageError(f"{changed}: a pass may differ from its server in {', '.join(MAY_CHANGE)}")


def _first_difference(key: str, value: Any, old: Any) -> str:
    from omegaconf import DictConfig

    if isinstance(value, DictConfig) and isinstance(old, DictConfig):
        for name in map(str, value):
            if value[name] != old.get(name):
                return _first_difference(f"{key}.{name}", value[name], old.get(name))
    return f"{key}={value!s} (the server has {old!s})"
