"""One probe: a rate, what was seen there, and how hard it pressed against each limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEAST = 0.01
"""The smallest pressure: below it nothing is told apart."""
SWING = 1.0, 0.1
"""Requests, and share of those under way, by which a steady load may differ from third to third."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rate has to keep. attainment: the share of requests that keep their TTFT and TPOT."""

    attainment: float
    growth: float = 0.05
    queue_delay_p50_ms: float | None = None
    itl_p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The requests of a probe. score: the larger of TTFT and TPOT over their limits; infinite for one that
    was judged and not served. end_s: NaN for one that never left. [requests]"""

    arrival_s: Floats
    end_s: Floats
    judged: NDArray[np.bool_]
    score: Floats

    @property
    def attainment(self) -> float | None:
        return float(np.mean(self.score[self.judged] <= 1)) if self.judged.any() else None


@dataclass(frozen=True, slots=True)
class Point:
    """Times in ms; what was not measured is None. pressures: figure over limit, by criterion; up to 1 all is
    well. seconds: how long the probe took in all."""

    rate: float
    repeat: int
    seed: int
    requests: int
    pressures: Mapping[str, float]
    attainment: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tpot_p99: float | None = None
    itl_p99: float | None = None
    queue_delay_p50: float | None = None
    requests_per_s: float | None = None
    goodput_rps: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    tokens_per_request: tuple[float, float] | None = None  # of the plan: answer, prompt and answer
    run: str | None = None
    invalid_reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def pressure(self) -> float:
        return max(self.pressures.values(), default=math.inf)

    @property
    def ok(self) -> bool:
        return self.pressure <= 1

    @property
    def over(self) -> tuple[str, ...]:
        """The criteria that were not kept."""
        return tuple(name for name, value in self.pressures.items() if value > 1)

    @property
    def sustained(self) -> tuple[float, float] | None:
        """(output, total) tokens/s: what came in where the rate held, since then as much leaves however
        short the probe; else what was computed."""
        if self.ok and self.tokens_per_request is not None:
            return self.rate * self.tokens_per_request[0], self.rate * self.tokens_per_request[1]
        if self.output_tokens_per_s is None or self.total_tokens_per_s is None:
            return None
        return self.output_tokens_per_s, self.total_tokens_per_s

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["pressures"] = {k: v if math.isfinite(v) else None for k, v in self.pressures.items()}
        value["pressure"] = self.pressure if math.isfinite(self.pressure) else None  # nobody was served
        return {**value, "ok": self.ok, "over": list(self.over)}


def pressures(
    sample: Sample, limits: Limits, *, queue_delay_p50: float | None = None, itl_p99: float | None = None
) -> dict[str, float]:
    """Of each criterion, figure over limit. One whose figure was not measured is left out."""
    found = {"slo": slo_pressure(sample, limits.attainment), "growth": growth_pressure(sample, limits.growth)}
    for name, figure, limit in (
        ("queue_delay", queue_delay_p50, limits.queue_delay_p50_ms),
        ("itl", itl_p99, limits.itl_p99_ms),
    ):
        if figure is not None and limit is not None:
            found[name] = max(LEAST, figure / limit)
    return found


def slo_pressure(sample: Sample, attainment: float) -> float:
    """The score that `attainment` of the judged requests keep: at most 1 iff so many kept their limits."""
    scores = np.sort(sample.score[sample.judged])
    if not scores.size:
        return math.inf
    needed = max(1, math.ceil(attainment * scores.size - 1e-9))
    return max(LEAST, float(scores[needed - 1]))


def growth_pressure(sample: Sample, growth: float) -> float:
    """Whether requests pile up: by how many more are under way in the last third of the arrivals than in the
    second, over what is allowed: `growth` of those that came meanwhile, and the swings of a steady load.

    Where arrivals outrun the server by a share g, that share of them stays behind, whatever the latency still
    is. The first third fills the engine and says nothing."""
    arrival, end = sample.arrival_s, np.where(np.isnan(sample.end_s), np.inf, sample.end_s)
    first, last = float(arrival.min()), float(arrival.max())
    third = (last - first) / 3
    if third <= 0:
        return LEAST
    before, after = (
        float(np.clip(np.minimum(end, start + third) - np.maximum(arrival, start), 0, None).sum()) / third
        for start in (first + third, first + 2 * third)
    )
    allowed = growth * arrival.size / 3 + SWING[0] + SWING[1] * before
    return max(LEAST, (after - before) / allowed)


def sample_of(frame: pd.DataFrame, slo: Mapping[str, Any]) -> Sample:
    """The sample of a run; frame: harness.metrics.latency.per_request, slo: of its meta.json."""
    from harness.slo import limit

    frame = frame[np.isfinite(frame["intended_s"])].sort_values("intended_s")
    ttft, tpot = (limit(slo, frame["request_class"], name) for name in ("ttft_ms", "tpot_ms"))
    first = frame["ttft_ms"].fillna(frame["e2e_ms"]).to_numpy(np.float64)
    score = np.fmax(first / ttft, frame["tpot_ms"].fillna(0.0).to_numpy(np.float64) / tpot)
    served = (frame["outcome"] == "completed").to_numpy(bool) & np.isfinite(first)
    return Sample(
        arrival_s=frame["intended_s"].to_numpy(np.float64),
        end_s=frame["end_s"].to_numpy(np.float64),
        judged=frame["judged"].to_numpy(bool),
        score=np.where(served, score, np.inf),
    )
