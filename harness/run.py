"""One measured run, from a configuration to a folder of records, a summary and a report.

The server is started first and the schedule is drawn while it loads, so the load begins within seconds of
the command. Whatever ends a run early (Ctrl-C, a server that dies, a full disk), what was measured is kept.
"""

from __future__ import annotations

import functools
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE, put, say
from harness.conf import UsageError
from harness.host import HostLock
from harness.interrupt import Interruption
from harness.loadgen.processes import LoadProcesses, WorkerError
from harness.measurement import Measurement
from harness.plan import check_engine, describe, draw_schedule, missing_device
from harness.server_process import ServerError, ServerProcess
from harness.target import RunTarget, foreign_target, our_target

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended. run_dir is None when there are no records (a dry run)."""

    exit_code: int
    run_dir: Path | None = None
    summary: dict[str, Any] | None = None
    interrupted: bool = False  # by the user
    error: str | None = None  # why nothing was measured


def run(cfg: DictConfig) -> RunOutcome:
    """Measure one configuration. Raises UsageError and its like for what the user can mend."""
    check_engine(cfg)
    if cfg.dry_run:
        put(describe(cfg, draw_schedule(cfg)))
        if missing := missing_device(cfg):
            say(f"error: {missing}")
        return RunOutcome(USAGE if missing else PASS)
    foreign = foreign_target(cfg) if cfg.engine.kind == "openai" else None
    with Interruption() as interruption, HostLock() as lock:
        lock.acquire(say)
        measurement = Measurement(cfg, new_run_dir(cfg), interruption)
        with kept_or_removed(measurement) as crash:
            measure(measurement, foreign, interruption)
        if not measurement.began:
            return RunOutcome(INVALID, measurement.run_dir, error=next(iter(crash), None))
        outcome = conclude(cfg, measurement.run_dir)
        return replace(outcome, interrupted=interruption.count > 0)


@contextmanager
def kept_or_removed(measurement: Measurement) -> Iterator[list[str]]:
    """A run that never began leaves no folder behind, unless its server crashed: server.log says why, and
    the list that this gives has it in one line."""
    crash: list[str] = []
    try:
        yield crash
    except BaseException as error:
        if measurement.began:
            raise
        crashed = isinstance(error, ServerError) and not error.refused
        if crashed or isinstance(error, WorkerError):
            say(f"error: {error}")
            crash.append(" ".join(str(error).split()))
            return
        shutil.rmtree(measurement.run_dir, ignore_errors=True)
        if isinstance(error, ServerError):
            raise UsageError(str(error)) from None
        raise


def measure(measurement: Measurement, foreign: RunTarget | None, interruption: Interruption) -> None:
    """Start what has to be started, send the load, end the server, write the records."""
    from omegaconf import OmegaConf

    cfg, run_dir = measurement.cfg, measurement.run_dir
    started_at = now_iso()
    config = run_dir / "config.yaml"
    with LoadProcesses() as load:
        interruption.at_once = load.kill
        OmegaConf.save(cfg, config, resolve=True)
        if foreign is not None:
            measurement.send(foreign, draw_schedule(cfg), load, started_at, lambda: None)
            return
        log = run_dir / "server.log"
        with ServerProcess(config, run_dir, log, on_exit=measurement.server_died) as server:
            measurement.server = server
            interruption.at_once = functools.partial(_kill, load, server)
            try:
                schedule = draw_schedule(cfg)  # while the server loads
                target = our_target(server.wait_ready(meanwhile=load.check), cfg)
            except BaseException:
                server.kill()  # it has nothing worth waiting for
                raise
            measurement.send(target, schedule, load, started_at, functools.partial(_ended, server))


def now_iso() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _ended(server: ServerProcess) -> str | None:
    return f"the server {server.describe_end()}" if server.stop() != 0 else None


def _kill(load: LoadProcesses, server: ServerProcess) -> None:
    load.kill()
    server.kill()


def conclude(cfg: DictConfig, run_dir: Path) -> RunOutcome:
    """From the records to summary, table, page and exit code. The last line names the folder."""
    from harness.dashboard import write_dashboard
    from harness.report import print_summary

    summary = summarise(run_dir)
    print_summary(summary)
    code = exit_code(cfg, summary)
    try:
        write_dashboard([run_dir], run_dir / "report.html")
    finally:
        put(f"results: {run_dir}")
    return RunOutcome(code, run_dir, summary)


def summarise(run_dir: Path) -> dict[str, Any]:
    """Close the records of a run and write summary.json from them."""
    from harness.metrics import write_summary
    from harness.records import finalise

    finalise(run_dir)
    return write_summary(run_dir)


def exit_code(cfg: DictConfig, summary: dict[str, Any]) -> int:
    """3 for a run that may not be believed; with slo.enforce, 1 for a miss and 4 if nothing can be judged."""
    if not summary["valid"]:
        return INVALID  # the table has said why
    if not cfg.slo.enforce:
        return PASS
    attained = summary["throughput"]["slo_attainment"]
    if attained is None:
        say("slo: attainment could not be measured")
        return INCONCLUSIVE
    if attained < cfg.slo.attainment:
        say(f"slo: {attained:.2%} of requests met the limits; slo.attainment={cfg.slo.attainment}")
        return REGRESSION
    return PASS


def new_run_dir(cfg: DictConfig) -> Path:
    """A fresh folder under output.dir, named by time and content; two runs at once never share one."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "-".join(_slug(str(part)) for part in (cfg.workload.name, cfg.engine.name, cfg.model.name))
    while True:
        path = Path(cfg.output.dir).expanduser() / f"{stamp}-{name}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise UsageError(f"output.dir={cfg.output.dir}: is not a folder") from None
            continue
        except OSError as error:
            raise UsageError(f"output.dir={cfg.output.dir}: cannot be written ({error.strerror})") from None
        return path


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text)[:40]
