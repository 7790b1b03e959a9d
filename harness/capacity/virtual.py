"""Probes in virtual time: the engine's own loop and scheduler over a model that only takes time.

The same figures on every machine, in seconds: for a quick look, and for tests whose truth is known. Nobody
hangs up there, and the client and the network cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from engines.config import EngineConfig
from engines.request import Refused
from engines.virtual import Log
from harness.capacity.configs import saturating_config
from harness.capacity.point import Limits, Sample
from harness.capacity.prober import Prober, Seen
from harness.conf import UsageError
from harness.experiments.simulation import Cost, simulate
from harness.metrics.percentiles import describe
from harness.plan import draw_schedule
from harness.slo import limit, limits_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.schedule import Schedule, ScheduledRequest

BLOCKS = 4097
"""engine.num_kv_blocks where it is null: there is no model whose KV could be measured."""
SATURATING = 400
"""Requests that come at once: a good many batches of them."""


class Virtual(Prober):
    """cost: seconds of a pass of so many rows and tokens."""

    takes_its_arrivals = False

    def __init__(
        self, cfg: DictConfig, limits: Limits, cost: Callable[[int, int], float] | None = None
    ) -> None:
        super().__init__(cfg, limits)
        if cfg.engine.kind != "reference":
            raise UsageError(f"--virtual: engine={cfg.engine.name} is not ours; leave out --virtual")
        settings: dict[str, Any] = dict(cfg.engine)
        settings["num_kv_blocks"] = settings["num_kv_blocks"] or BLOCKS
        self.config = EngineConfig.from_mapping(settings)
        self.cost = cost or Cost()

    def saturate(self, requests: int) -> float:
        """Of requests that come all at once, the middle of them: neither the first batch nor the last."""
        schedule = draw_schedule(saturating_config(self.cfg, min(requests, SATURATING)))
        log = self._play(replace(request, arrival_s=0.0) for request in schedule)
        ends = np.sort([record.finish_ns or 0 for record in log.requests]) / 1e9
        first, last = len(ends) // 10, len(ends) - len(ends) // 10 - 1
        length = float(ends[last] - ends[first])
        return (last - first) / length if length > 0 else len(ends) / float(ends[-1])

    def measure(self, cfg: DictConfig) -> Seen:
        schedule = draw_schedule(cfg)
        log = self._play(schedule)
        drained = self.config.scheduler in ("static", "dynamic") and self.config.drain
        return seen(log, schedule, limits_of(cfg), drained=drained)

    def _play(self, requests: Iterable[ScheduledRequest]) -> Log:
        try:
            return simulate(self.config, requests, self.cost)  # type: ignore[arg-type]
        except Refused as error:
            raise UsageError(
                f"--virtual: a request is refused ({error}); nothing may be refused there"
            ) from None


def seen(log: Log, schedule: Schedule, slo: dict[str, Any], *, drained: bool) -> Seen:
    """What a client without delay of its own would have seen. drained: answers leave whole."""
    records = sorted(log.requests, key=lambda record: record.arrival_ns)
    arrival, admitted, first, end = (
        np.array([getattr(r, f"{name}_ns") for r in records], dtype=np.float64) / 1e9
        for name in ("arrival", "admitted", "first_token", "finish")
    )
    tokens = np.array([r.output_tokens for r in records])
    first = end if drained else first
    ttft, e2e = (first - arrival) * 1e3, (end - arrival) * 1e3
    paced = np.full(len(records), not drained) & (tokens > 1)
    tpot = np.where(paced, (end - first) * 1e3 / np.maximum(tokens - 1, 1), np.nan)
    classes = pd.Series([r.request_class for r in records])
    score = np.fmax(
        ttft / limit(slo, classes, "ttft_ms"), np.nan_to_num(tpot) / limit(slo, classes, "tpot_ms")
    )
    length = float(end.max() - arrival.min())
    answers, prompts = (sum(getattr(r, name) for r in schedule) for name in ("stop_after", "prompt_tokens"))
    met = int((score <= 1).sum())
    summary = {
        "latency_ms": {
            "ttft": {"from_intended": describe(ttft)},
            "e2e": {"from_intended": describe(e2e)},
            "tpot": describe(tpot),
            "normalized": describe(e2e / tokens),
            "queue_delay": describe((admitted - arrival) * 1e3),
        },
        "throughput": {
            "requests_per_s": len(records) / length,
            "output_tokens_per_s": answers / length,
            "total_tokens_per_s": (answers + prompts) / length,
            "goodput_rps": met / length,
            "slo_attainment": met / len(records),
        },
    }
    return Seen(
        summary=summary,
        sample=Sample(arrival, end, np.ones(len(records), dtype=bool), score),
        requests=len(records),
        tokens_per_request=(answers / len(records), (answers + prompts) / len(records)),
    )
