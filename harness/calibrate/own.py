"""The client's own bias under a given configuration: its very schedule and load settings, against a server
that answers at once. What is left of every figure is the client's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.calibrate.client import run_client
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


def measure_bias(
    cfg: DictConfig,
    requests: Sequence[ScheduledRequest],
    settings: LoadSettings,
    cores: Cores,
    *,
    faster: bool,
    tries: int,
) -> dict[str, Any]:
    """The client's bias, as store.save_calibration keeps it. Times in ms as {p50, p99}:

    send_lag_ms    from a request's planned time to its write
    ttft_bias_ms   reported minus true TTFT
    stamp_bias_ms  from a token's write by the server to the client's stamp of it
    read_lag_ms    from the arrival of bytes in the kernel to their reading; null without kernel stamps
    rate_held      1/s: the highest rate that was tried and held; null: not even the schedule's own. faster:
                   an open schedule is also sent twice, four times, ... as fast, until it is not held

    A disturbed measurement is repeated, `tries` in all; the quietest counts."""
    best = _once(cfg, requests, settings, cores)
    for _ in range(tries - 1):
        if not best["noisy"]:
            break
        best = min(best, _once(cfg, requests, settings, cores), key=lambda figures: figures["noise_total"])
    rate_held = best["rate"] if settings.kind == "closed" or _held(best) else None
    span_s = requests[-1].arrival_s if requests else 0.0
    factor = 2
    while (
        faster and settings.kind == "open" and rate_held and factor <= MOST_FACTOR and span_s / factor > MIN_S
    ):
        quick = _once(cfg, [replace(r, arrival_s=r.arrival_s / factor) for r in requests], settings, cores)
        if not _held(quick):
            break
        rate_held = quick["rate"]
        factor *= 2
    return {
        **{name: best[name] for name in ("requests", "completed", "tokens", "rate")},
        "rate_held": rate_held,
        "tokens_per_s": best["tokens_per_s"],
        "send_lag_ms": _pair(best, "send_lag_p{}"),
        "ttft_bias_ms": _pair(best, "ttft_p{}_error"),
        "stamp_bias_ms": _pair(best, "stamp_error_p{}"),
        "read_lag_ms": _pair(best, "read_lag_p{}"),
        "loop_lag_p99_ms": best["loop_lag_p99"],
        "cpu_s_per_1k_tokens": best["cpu_s_per_1k_tokens"],
        "backend": best["ran"],
        "stamps": best["stamps"],
        "noisy": best["noisy"],
    }


def _pair(figures: dict[str, Any], name: str) -> dict[str, float] | None:
    values = {f"p{level}": figures[name.format(level)] for level in (50, 99)}
    return None if None in values.values() else values


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
        run = run_client(
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
    return figures | {"noisy": noise.noisy, "noise_total": noise.total}
