"""One measured pass against a server that is ready: its load, what is recorded beside it, and meta.json.

Who starts and ends the server is no business of this: a run does it once (harness.run), a standing server is
measured several times (harness.standing). Whatever ends a pass early (Ctrl-C, a server that dies, a full
disk), what was measured is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.calibrate.store import load_calibration
from harness.cli import say, say_once
from harness.conf import UsageError
from harness.host import facts, fingerprint
from harness.interrupt import Interruption
from harness.loadgen.processes import LoadProcesses
from harness.loadgen.stop import Stop
from harness.plan import check_lengths, pool_tokens
from harness.scrape import Scraper, metrics_endpoint
from harness.server_process import ServerError, ServerProcess
from harness.slo import limits_of
from harness.target import RunTarget, asked_over, load_processes, load_settings, warm_up_requests
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

Finish = Callable[[], str | None]
"""Makes a server of ours end its records; why they are not whole, or None."""


class Measurement:
    """The state of one pass. began: the load has started, so there is something to keep. earlier: passes that
    this server has had before."""

    def __init__(
        self,
        cfg: DictConfig,
        run_dir: Path,
        interruption: Interruption,
        server: ServerProcess | None = None,
        earlier: int = 0,
    ) -> None:
        self.cfg = cfg
        self.run_dir = run_dir
        self.began = False
        self.server = server
        self._interruption = interruption
        self._earlier = earlier
        self._stop = Stop()
        self._sent_as: str | None = None  # of transports that the server lacks

    def send(
        self, target: RunTarget, schedule: Schedule, load: LoadProcesses, started_at: str, finish: Finish
    ) -> None:
        """Warm up, then the load itself with everything that is recorded beside it. started_at: as meta.json
        has it. finish: of the server, None for one that is not ours."""
        from harness.loadgen.job import Job
        from harness.loadgen.progress import Progress
        from harness.records import write_meta

        pool = pool_tokens(target.server.get("num_kv_blocks"), target.server.get("block_size"))
        warning = check_lengths(schedule, target.max_model_len, pool)
        requests, self._sent_as = asked_over(target, schedule)
        for line in filter(None, (warning, self._slow_kernels(target), self._sent_as, *schedule.notes)):
            say_once(line)
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
            server_pid=self.server.pid if self.server else None,
            client_pids=load.pids,
            gpu=target.server.get("device") if self.server else target.on_this_host,
        )
        scraper = Scraper(self.run_dir / "server_metrics.jsonl", *endpoint, t0_ns=t0_ns)
        try:
            with telemetry, scraper, progress, self._watchdog(target):
                result = load.run(t0_ns, self._stop, progress.update)
        finally:
            self._interruption.on_signal = lambda: say("ending the run; once more to leave at once")
        for note in result.notes:
            say_once(note)
        meta |= self._result(result, load, telemetry, scraper)
        meta["client"]["calibration"] = load_calibration(
            meta["host"], result.backend, meta["planned"]["rate"]
        )
        meta["planned"]["requests"] = result.scheduled  # fewer in a closed loop that ran out of time
        # A server that fails while it ends has left records out, however well the load went.
        failure = finish() if self.server is not None else None
        if failure is not None and meta["complete"]:
            meta |= {"complete": False, "incomplete_reason": f"server_died: {failure}"}
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
        if self.server is None:
            raise UsageError(f"engine.base_url={self.cfg.engine.base_url}: a test request failed: {problem}")
        if self.server.ended_within(DYING_S):
            raise ServerError(
                f"the server {self.server.describe_end()}; see {self.server.log}", refused=False
            )
        say(f"warning: a warm-up request failed: {problem}")

    def server_died(self, code: int) -> None:
        """From the watching thread."""
        assert self.server is not None
        self._end_early(f"server_died: the server {self.server.describe_end()}")

    def _watchdog(self, target: RunTarget) -> Watchdog:
        """For a server of ours: of a foreign one we only know what it sends."""
        pids = [] if self.server is None else [self.server.pid, target.server.get("engine_pid")]
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
            "earlier_passes": self._earlier,
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
