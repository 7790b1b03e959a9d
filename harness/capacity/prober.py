"""What an engine shows of itself in one pass of requests, however that pass is made."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.capacity.configs import probe_config
from harness.capacity.point import Limits, Point, Sample, pressures
from harness.table import lookup

if TYPE_CHECKING:
    from omegaconf import DictConfig

LATENCIES = ("ttft", "tpot", "itl", "e2e", "normalized", "queue_delay", "prefill", "decode")
IN_VIRTUAL_TIME = ("ttft", "tpot", "e2e", "normalized", "queue_delay")
FROM_INTENDED = ("ttft", "e2e")
PERCENTILES = ("p50", "p90", "p95", "p99", "mean", "max")
RATES = {
    "goodput": "throughput.goodput_rps",
    "attainment": "throughput.slo_attainment",
    "requests_per_s": "throughput.requests_per_s",
    "output_tokens_per_s": "throughput.output_tokens_per_s",
}
"""Metrics of which more is better, and where a summary has them."""


class ProbeError(Exception):
    """A probe has no figures, and not because of its rate. The message is one line."""


class Interrupted(Exception):
    """The user has ended it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One pass. summary: summary.json, or as much of it as there is; tokens_per_request: of the plan, answer
    and everything; run: the name of its folder."""

    summary: Mapping[str, Any]
    sample: Sample
    requests: int
    tokens_per_request: tuple[float, float]
    run: str | None = None
    invalid_reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def metric(self, name: str) -> float | None:
        """ttft_p99, goodput, ...: see path_of."""
        value = lookup(dict(self.summary), path_of(name) or "")
        return None if value is None else float(value)


class Prober(ABC):
    """One engine that can be measured again and again. cfg: of a run of it."""

    takes_its_arrivals: ClassVar[bool] = True  # a probe is at least as long as its schedule

    def __init__(self, cfg: DictConfig, limits: Limits) -> None:
        self.cfg = cfg
        self.limits = limits

    @abstractmethod
    def saturate(self, requests: int) -> float:
        """Requests/s when the engine never waits for work. Raises ProbeError and Interrupted."""

    @abstractmethod
    def measure(self, cfg: DictConfig) -> Seen:
        """One pass with the traffic of cfg. Raises ProbeError and Interrupted."""

    def probe(self, rate: float, repeat: int, requests: int) -> Point:
        began = time.monotonic()
        cfg = probe_config(self.cfg, rate, repeat, requests)
        seen = self.measure(cfg)
        delay, itl = seen.metric("queue_delay_p50"), seen.metric("itl_p99")
        return Point(
            rate=rate,
            repeat=repeat,
            seed=cfg.seed,
            requests=seen.requests,
            pressures=pressures(seen.sample, self.limits, queue_delay_p50=delay, itl_p99=itl),
            attainment=seen.sample.attainment,
            ttft_p50=seen.metric("ttft_p50"),
            ttft_p99=seen.metric("ttft_p99"),
            tpot_p99=seen.metric("tpot_p99"),
            itl_p99=itl,
            queue_delay_p50=delay,
            requests_per_s=seen.metric("requests_per_s"),
            goodput_rps=seen.metric("goodput"),
            output_tokens_per_s=seen.metric("output_tokens_per_s"),
            total_tokens_per_s=lookup(dict(seen.summary), "throughput.total_tokens_per_s"),
            tokens_per_request=seen.tokens_per_request,
            run=seen.run,
            invalid_reasons=seen.invalid_reasons,
            warnings=seen.warnings,
            seconds=time.monotonic() - began,
        )


def path_of(metric: str) -> str | None:
    """Where summary.json has a metric; None where there is no such metric."""
    if metric in RATES:
        return RATES[metric]
    family, _, figure = metric.rpartition("_")
    if family not in LATENCIES or figure not in PERCENTILES:
        return None
    return f"latency_ms.{family}.{'from_intended.' if family in FROM_INTENDED else ''}{figure}"


def more_is_better(metric: str) -> bool:
    return metric in RATES
