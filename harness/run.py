"""One measured run, from a configuration to a folder of records, a summary and a report.

The server is started first and the schedule is drawn while it loads, so the load begins within seconds of
the command. Whatever ends a run early (Ctrl-C, a server that dies, a full disk), what was measured is kept.
"""

from __future__ import annotations

import functools
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.calibrate.store import load_calibration
from harness.cli import INCONCLUSIVE, INVALID, PASS, REGRESSION, put, say
from harness.conf import UsageError
from harness.host import HostLock, facts, fingerprint
from harness.interrupt import Interruption
from harness.loadgen.processes import LoadProcesses, WorkerError
from harness.loadgen.stop import Stop
from harness.plan import check_engine, check_lengths, describe, draw_schedule, pool_tokens
from harness.scrape import Scraper, metrics_endpoint
from harness.server_process import ServerError, ServerProcess
from harness.slo import limits_of
from harness.target import (
    RunTarget,
    asked_over,
    foreign_target,
    load_processes,
    load_settings,
    our_target,
    warm_up_requests,
)
from harness.telemetry import Telemetry
from harness.watchdog import Watchdog

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.loadgen.settings import LoadResult
    from workloads.schedule import Schedule

LEAD_NS = 100_000_000
"""From the choice of t0 to the first possible arrival: time to start the samplers, to tell the workers and to
build the first bodies."""
LEAD_NS_PER_REQUEST = 5_000
"""A worker puts its requests in order first."""

DYING_S = 3.0
"""How long a server that failed the warm-up gets to end of itself, before the load is tried all the same."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended. run_dir is None when there are no records (a dry run)."""

    exit_code: int
    run_dir: Path | None = None
    summary: dict[str, Any] | None = None
    interrupted: bool = False  # by the user


def run(cfg: DictConfig) -> RunOutcome:
    """Measure one configuration. Raises UsageError and its like for what the user can mend."""
    check_engine(cfg)
    if cfg.dry_run:
        put(describe(cfg, draw_schedule(cfg)))
        return RunOutcome(PASS)
    foreign = foreign_target(cfg) if cfg.engine.kind == "openai" else None
    with Interruption() as interruption, HostLock() as lock:
        lock.acquire(say)
        measurement = Measurement(cfg, new_run_dir(cfg), interruption)
        with measurement.kept_or_removed():
            measurement.measure(foreign)
        if not measurement.began:
            return RunOutcome(INVALID, measurement.run_dir)
        outcome = conclude(cfg, measurement.run_dir)
        return replace(outcome, interrupted=interruption.count > 0)


class Measurement:
    """The state of one run. began: the load has started, so there is something to keep."""

    def __init__(self, cfg: DictConfig, run_dir: Path, interruption: Interruption) -> None:
        self.cfg = cfg
        self.run_dir = run_dir
        self.began = False
        self._interruption = interruption
        self._server: ServerProcess | None = None
        self._stop = Stop()
        self._sent_as: str | None = None  # of transports that the server lacks

    @contextmanager
    def kept_or_removed(self) -> Iterator[None]:
        """A run that never began leaves no folder behind, unless its server crashed: server.log says why."""
        try:
            yield
        except BaseException as error:
            if self.began:
                raise
            crashed = isinstance(error, ServerError) and not error.refused
            if crashed or isinstance(error, WorkerError):
                say(f"error: {error}")
                return
            shutil.rmtree(self.run_dir, ignore_errors=True)
            if isinstance(error, ServerError):
                raise UsageError(str(error)) from None
            raise

    def measure(self, foreign: RunTarget | None) -> None:
        """Start what has to be started, send the load, end the server, write the records."""
        from omegaconf import OmegaConf

        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        config = self.run_dir / "config.yaml"
        with LoadProcesses() as load:
            self._interruption.at_once = load.kill
            OmegaConf.save(self.cfg, config, resolve=True)
            if foreign is not None:
                self._send(foreign, draw_schedule(self.cfg), load, started_at)
                return
            log = self.run_dir / "server.log"
            with ServerProcess(config, self.run_dir, log, on_exit=self._server_died) as self._server:
                self._interruption.at_once = functools.partial(_kill, load, self._server)
                try:
                    schedule = draw_schedule(self.cfg)  # while the server loads
                    target = our_target(self._server.wait_ready(meanwhile=load.check), self.cfg)
                except BaseException:
                    self._server.kill()  # it has nothing worth waiting for
                    raise
                self._send(target, schedule, load, started_at)

    def _send(self, target: RunTarget, schedule: Schedule, load: LoadProcesses, started_at: str) -> None:
        """Warm up, then the load itself with everything that is recorded beside it."""
        from harness.loadgen.job import Job
        from harness.loadgen.progress import Progress
        from harness.records import write_meta

        pool = pool_tokens(target.server.get("num_kv_blocks"), target.server.get("block_size"))
        warning = check_lengths(schedule, target.max_model_len, pool)
        requests, self._sent_as = asked_over(target, schedule)
        for line in filter(None, (warning, self._slow_kernels(target), self._sent_as, *schedule.notes)):
            say(line)
        endpoint = metrics_endpoint(self.cfg.engine, target.load.root_url, target.load.api_key)
        progress = Progress(len(schedule))
        job = Job(
            target=target.load,
            settings=load_settings(self.cfg, self.run_dir.name),
            requests=requests,
            seed=schedule.seed,
            log=self.run_dir / "requests.jsonl",
            warm_up=warm_up_requests(target.max_model_len),
            live=progress.enabled,
        )
        load.prepare(job, workers=load_processes(self.cfg, requests, target.server))
        schedule.to_parquet(self.run_dir / "schedule.parquet")  # while they warm up
        meta = self._meta(target, schedule, started_at)
        self._warmed_up(load.wait_ready())
        t0_ns = time.monotonic_ns() + LEAD_NS + LEAD_NS_PER_REQUEST * len(schedule)
        meta["t0_ns"] = t0_ns
        self._interruption.on_signal = lambda: self._end_early("interrupted")
        write_meta(self.run_dir, meta)
        self.began = True
        telemetry = Telemetry(
            self.run_dir / "telemetry.jsonl",
            t0_ns=t0_ns,
            server_pid=self._server.pid if self._server else None,
            client_pids=load.pids,
            gpu=target.server.get("device") if self._server else target.on_this_host,
        )
        scraper = Scraper(self.run_dir / "server_metrics.jsonl", *endpoint, t0_ns=t0_ns)
        try:
            with telemetry, scraper, progress, self._watchdog(target):
                result = load.run(t0_ns, self._stop, progress.update)
        finally:
            self._interruption.on_signal = lambda: say("ending the run; once more to leave at once")
        for note in result.notes:
            say(note)
        meta |= self._result(result, load, telemetry, scraper)
        meta["client"]["calibration"] = load_calibration(
            meta["host"], result.backend, meta["planned"]["rate"]
        )
        meta["planned"]["requests"] = result.scheduled  # fewer in a closed loop that ran out of time
        # A server that fails while it ends has left records out, however well the load went.
        if self._server is not None and self._server.stop() != 0 and meta["complete"]:
            reason = f"server_died: the server {self._server.describe_end()}"
            meta |= {"complete": False, "incomplete_reason": reason}
        write_meta(self.run_dir, meta)

    def _slow_kernels(self, target: RunTarget) -> str | None:
        """The fallback costs much more than any scheduler gains, so it is not left to the server's log."""
        if (target.server.get("device"), target.server.get("attention")) != ("cpu", "torch"):
            return None
        log = self.run_dir / "server.log"
        return (
            f"warning: attention runs on the slow torch kernels, since the C++ ones did not build; see {log}"
        )

    def _warmed_up(self, problem: str | None) -> None:
        """problem: what went wrong with a request of the warm-up."""
        if problem is None:
            return
        if self._server is None:
            raise UsageError(f"engine.base_url={self.cfg.engine.base_url}: a test request failed: {problem}")
        if self._server.ended_within(DYING_S):
            raise ServerError(
                f"the server {self._server.describe_end()}; see {self._server.log}", refused=False
            )
        say(f"warning: a warm-up request failed: {problem}")

    def _server_died(self, code: int) -> None:
        """From the watching thread."""
        assert self._server is not None
        self._end_early(f"server_died: the server {self._server.describe_end()}")

    def _watchdog(self, target: RunTarget) -> Watchdog:
        """For a server of ours: of a foreign one we only know what it sends."""
        pids = [] if self._server is None else [self._server.pid, target.server.get("engine_pid")]
        return Watchdog(
            [pid for pid in pids if pid], lambda what: self._end_early(f"server_stopped: its {what}")
        )

    def _end_early(self, reason: str) -> None:
        if self.began and not self._stop.is_set:
            say(f"{reason}; keeping what was measured")
        self._stop.set(reason)

    def _meta(self, target: RunTarget, schedule: Schedule, started_at: str) -> dict[str, Any]:
        """meta.json as it stands before the load."""
        from omegaconf import OmegaConf

        cfg, server = self.cfg, dict(target.server)
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        host = facts()
        device = server.get("device")
        return {
            "run": self.run_dir.name,
            "started_at": started_at,
            "t0_ns": None,
            "load_end_ns": None,
            "duration_s": None,
            "complete": False,
            "incomplete_reason": "running",
            "seed": cfg.seed,
            "length_mode": target.length_mode,
            "engine": cfg.engine.name,
            "workload": schedule.name,
            "model": target.load.model,
            "device": device,
            "fingerprint": fingerprint(
                schedule_sha256=schedule.sha256(), config=config, host=host, server=server
            ),
            "server": server,
            "host": host,
            "engine_cpu_cores": server.get("threads") if device == "cpu" else None,
            "clock_pairs": [],
            "slo": limits_of(cfg),
            "planned": {
                "requests": len(schedule),
                "rate": schedule.planned_rate if cfg.load.kind == "open" else None,
                "length_scale": schedule.length_scale,
            },
            "client": {
                "backend": None,
                "processes": None,
                "loop_lag_ms": [],
                "read_lag_ms": [],
                "cpu_s": None,
            },
        }

    def _result(
        self, result: LoadResult, load: LoadProcesses, telemetry: Telemetry, scraper: Scraper
    ) -> dict[str, Any]:
        """What is only known after the load."""
        reason = self._stop.reason or result.incomplete_reason
        return {
            "load_end_ns": result.load_end_ns,
            "duration_s": result.load_end_ns / 1e9,
            "complete": reason is None,
            "incomplete_reason": reason,
            "clock_pairs": [list(pair) for pair in telemetry.clock_pairs],
            "client": {
                "backend": result.backend or None,
                "stamps": result.stamps or None,
                "processes": len(load.pids),
                "loop_lag_ms": list(result.loop_lag_ms),
                "read_lag_ms": list(result.read_lag_ms),
                "cpu_s": result.cpu_s,
                "connections": result.connections,
                "sent_attempts": result.sent_attempts,
                "retried": result.retried,
                "clock_offset_step_ns": result.clock_offset_step_ns,
                "notes": [*filter(None, [self._sent_as]), *result.notes],
            },
            "telemetry": telemetry.meta(),
            "server_metrics": scraper.meta(),
        }


def _kill(load: LoadProcesses, server: ServerProcess) -> None:
    load.kill()
    server.kill()


def conclude(cfg: DictConfig, run_dir: Path) -> RunOutcome:
    """From the records to summary, table, page and exit code. The last line names the folder."""
    from harness.dashboard import write_dashboard
    from harness.metrics import write_summary
    from harness.records import finalise
    from harness.report import print_summary

    finalise(run_dir)
    summary = write_summary(run_dir)
    print_summary(summary)
    code = exit_code(cfg, summary)
    try:
        write_dashboard([run_dir], run_dir / "report.html")
    finally:
        put(f"results: {run_dir}")
    return RunOutcome(code, run_dir, summary)


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
