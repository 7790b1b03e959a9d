"""The client's own bias under a given configuration: its very schedule and load settings, against a server
that answers at once. What is left of every figure is the client's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.calibrate.client import ClientRun, run_client
from harness.calibrate.compare import compare
from harness.calibrate.noise import NoiseWatch
from harness.calibrate.table import Cores, cost
from harness.calibrate.truth import truth_server
from harness.loadgen.settings import LoadSettings
from harness.tokenizer import load_tokenizer
from workloads.schedule import ScheduledRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig

HELD_SEND_LAG_MS = 5.0
HELD_RATE = 0.98
"""A rate is held when p99 of the send lag is below the first and the realised rate is at least this share of
the drawn one: the limits of a valid run."""
MIN_S = 1.0
"""A schedule compressed to less than this says nothing about a rate."""
MOST_FACTOR = 64
KEPT = (
    *("requests", "completed", "tokens", "rate", "tokens_per_s", "send_lag_p50", "send_lag_p99"),
    *("ttft_p50_error", "ttft_p99_error", "ttft_error_p50", "ttft_error_p99", "stamp_error_p50"),
    *("stamp_error_p99", "read_lag_p50", "read_lag_p99", "loop_lag_p99", "cpu_s_per_1k_tokens", "stamps"),
)


def measure_bias(
    cfg: DictConfig,
    requests: Sequence[ScheduledRequest],
    settings: LoadSettings,
    cores: Cores,
    *,
    faster: bool,
) -> dict[str, Any]:
    """Figures of KEPT (ms), rate_held (1/s), and what disturbed the measurement. faster: an open schedule is
    also sent twice, four times, ... as fast, until it is not held."""
    bias = _once(cfg, requests, settings, cores)
    span_s = requests[-1].arrival_s if requests else 0.0
    bias["rate_held"] = bias["rate"] if settings.kind == "closed" or _held(bias) else None
    factor = 2
    while faster and settings.kind == "open" and _held(bias) and factor <= MOST_FACTOR:
        if span_s / factor < MIN_S:
            break
        quick = [replace(r, arrival_s=r.arrival_s / factor) for r in requests]
        figures = _once(cfg, quick, settings, cores)
        if not _held(figures):
            bias["rate_not_held"] = figures["rate_planned"]
            break
        bias["rate_held"] = figures["rate"]
        factor *= 2
    return bias


def _held(figures: dict[str, Any]) -> bool:
    rate, planned, lag = figures["rate"], figures["rate_planned"], figures["send_lag_p99"]
    return (
        figures["completed"] > 0
        and None not in (rate, planned, lag)
        and rate >= HELD_RATE * planned
        and lag <= HELD_SEND_LAG_MS
    )


def _once(
    cfg: DictConfig, requests: Sequence[ScheduledRequest], settings: LoadSettings, cores: Cores
) -> dict[str, Any]:
    foreign = cfg.engine.kind == "openai"
    tokenizer = load_tokenizer(cfg.engine.tokenizer) if foreign else load_tokenizer("bytes")
    watch: list[NoiseWatch] = []
    with truth_server(instant=True, core=cores.server) as server:
        run: ClientRun = run_client(
            server.base_url,
            requests,
            settings,
            core=cores.client,
            seed=cfg.seed,
            api=cfg.engine.api if foreign else "completions",
            send_ids=not foreign or cfg.engine.tokenizer is not None,
            tokenizer=tokenizer,
            on_ready=lambda: watch.append(
                NoiseWatch(cores.client, cores.server, server.pid, client_first=False)
            ),
        )
        noise = watch[0].stop(run.result.cpu_s)
        truth = server.stop()
    figures = compare(run.records, truth, run.t0_ns) | cost(run)
    kept = {name: figures[name] for name in KEPT}
    return kept | {"rate_planned": figures["rate_planned"], "ran": figures["ran"], "noisy": noise.noisy}
