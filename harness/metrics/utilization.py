"""How busy the machine was inside the load window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.engine import NO_STEPS
from harness.metrics.run import Run

NAMES = (
    *(
        "device_busy",
        "gpu_util_pct",
        "gpu_memory_gb",
        "mfu",
        "mbu",
        "cpu_pct",
        "power_w",
        "energy_j_per_token",
    ),
)


def utilization(
    run: Run, steps: pd.DataFrame, window: dict[str, Any], output_tokens_per_s: float | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """device_busy: share of the load window inside steps. cpu_pct: the server's, 100 is one core. gpu_*:
    NVML."""
    figures: dict[str, Any] = dict.fromkeys(NAMES)
    why = "needs the model's operations and the device's peak, which this version does not know"
    reasons: dict[str, str] = {"mfu": why, "mbu": why}
    start, end = window["start_s"], window["end_s"]
    if start is None:
        return figures, dict.fromkeys(NAMES, "no load window: nothing was sent and ended")
    if steps.empty:
        reasons["device_busy"] = NO_STEPS
    else:
        figures["device_busy"] = busy_share(steps, start, end)
    t = run.telemetry["t_ns"] * 1e-9
    rows = run.telemetry[(t >= start) & (t <= end)]
    no_gpu = "no GPU reading" if run.meta.get("device") != "cpu" else "the device is a CPU"
    for name, column, how, reason in (
        ("cpu_pct", "server_cpu_pct", "mean", "no CPU reading of the server"),
        ("gpu_util_pct", "gpu_util_pct", "mean", no_gpu),
        ("gpu_memory_gb", "gpu_memory_gb", "max", no_gpu),
        ("power_w", "gpu_power_w", "mean", no_gpu),
    ):
        value = float(rows[column].agg(how)) if rows[column].notna().any() else float("nan")
        if np.isfinite(value):
            figures[name] = value
        else:
            reasons[name] = reason if len(rows) else "no telemetry inside the load window"
    if figures["power_w"] is None:
        reasons["energy_j_per_token"] = reasons["power_w"]
    elif not output_tokens_per_s:
        reasons["energy_j_per_token"] = "no output token"
    else:
        figures["energy_j_per_token"] = figures["power_w"] / output_tokens_per_s
    return figures, reasons


def busy_share(steps: pd.DataFrame, start_s: float, end_s: float) -> float:
    """Share of [start_s, end_s] inside steps, each cut at the edges."""
    begin = np.clip(steps["start_ns"].to_numpy() * 1e-9, start_s, end_s)
    stop = np.clip((steps["start_ns"] + steps["duration_ns"].fillna(0)).to_numpy() * 1e-9, start_s, end_s)
    return float(np.sum(stop - begin) / (end_s - start_s))
