"""Probes by measured runs: the server of an engine stays, and every probe has a run directory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capacity.configs import SATURATING_S, saturating_config
from harness.capacity.point import Limits, sample_of
from harness.capacity.prober import Interrupted, ProbeError, Prober, Seen
from harness.loadgen.processes import WorkerError
from harness.metrics.latency import per_request
from harness.metrics.run import load_run
from harness.run import new_run_dir
from harness.server_process import ServerError
from harness.standing import StandingServer

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.run import RunOutcome
    from harness.standing import Stage

OF_THE_SERVER = ("errors:", "no request completed")
"""Reasons of an invalid run that an overloaded server gives: the rate has failed, not the measurement."""
LATE = 0.05
"""Of a limit: what the client's own lag may be, where a rate is held to that limit."""


class Measured(Prober):
    """A context manager: the server lives as long. Runs go to cfg.output.dir."""

    def __init__(self, cfg: DictConfig, limits: Limits, stage: Stage) -> None:
        super().__init__(cfg, limits)
        self._server = StandingServer(cfg, Path(cfg.output.dir) / f"server-{cfg.engine.name}", stage)

    def __enter__(self) -> Measured:
        self._server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

    def saturate(self, requests: int) -> float:
        """Of a closed loop that keeps the engine full."""
        summary = self._run(saturating_config(self.cfg, requests, SATURATING_S)).summary
        assert summary is not None
        # The steady part leaves out how the last answers drain; of few requests it is the worse guess.
        parts = (summary["steady"]["throughput"] or {}, summary["throughput"])
        served = max(part.get("requests_per_s") or 0.0 for part in parts)
        if not served:
            reasons = summary["invalid_reasons"] or ["no request completed"]
            raise ProbeError(f"closed loop: {reasons[0]}")
        return float(served)

    def measure(self, cfg: DictConfig) -> Seen:
        outcome = self._run(cfg)
        assert outcome.summary is not None
        assert outcome.run_dir is not None
        run = load_run(outcome.run_dir)
        slo = run.meta.get("slo") or {}
        sample = sample_of(per_request(run.requests, slo), slo)
        if not len(sample.arrival_s):
            raise ProbeError(f"nothing was sent; see {outcome.run_dir}")
        answer, prompt = (float(run.schedule[name].mean()) for name in ("stop_after", "prompt_tokens"))
        invalid, warnings = weighed(outcome.summary, slo)
        return Seen(
            summary=outcome.summary,
            sample=sample,
            requests=len(run.schedule),
            tokens_per_request=(answer, prompt + answer),
            run=outcome.run_dir.name,
            invalid_reasons=invalid,
            warnings=warnings,
        )

    def _run(self, cfg: DictConfig) -> RunOutcome:
        try:
            outcome = self._server.measure(cfg, new_run_dir(cfg))
        except (ServerError, WorkerError) as error:
            raise ProbeError(str(error)) from None
        if outcome.interrupted:
            raise Interrupted
        if outcome.summary is None:
            raise ProbeError(f"the run did not begin; see {outcome.run_dir}")
        if self._server.died:
            raise ProbeError(self._server.died)
        return outcome


def weighed(summary: dict[str, Any], slo: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(why the figures cannot be used, what is only told). A run is invalid when its client's lag is a share
    of the median TTFT. A probe asks whether latencies keep their limits, which as a rule are far above that
    median: there a lag is told unless it is a share of the limit. (It is latency: no rate holds by it.)"""
    invalid: list[str] = []
    told: list[str] = []
    for reason in summary["invalid_reasons"]:
        if reason.startswith(OF_THE_SERVER):
            continue
        small = any(
            reason.startswith(f"client_bound: {label} lag") and _small(summary, f"{label}_lag_ms", slo, name)
            for label, name in (("send", "ttft_ms"), ("loop", "tpot_ms"))
        )
        (told if small else invalid).append(reason)
    return tuple(invalid), tuple(told)


def _small(summary: dict[str, Any], lag: str, slo: dict[str, Any], name: str) -> bool:
    limits = [own[name] for own in (slo, *(slo.get("classes") or {}).values()) if own.get(name)]
    p99 = summary["client"][lag]["p99"]
    return p99 is not None and bool(limits) and p99 <= LATE * min(limits)
