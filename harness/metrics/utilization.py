"""How busy the machine was inside the load window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.engine import NO_STEPS
from harness.metrics.run import Run
from harness.metrics.server_metrics import summarise_server_metrics

NAMES = (
    *(
        "device_busy",
        "gpu_util_pct",
        "gpu_memory_gb",
        "mfu",
        "mbu",
        "cpu_pct",
        "power_w",
        "energy_j",
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
    said = recorded_reasons(run)
    for name, column, how, reason in (
        ("cpu_pct", "server_cpu_pct", "mean", "no CPU reading of the server"),
        ("gpu_util_pct", "gpu_util_pct", "mean", no_gpu),
        ("gpu_memory_gb", "gpu_memory_gb", "max", no_gpu),
        ("power_w", "gpu_power_w", "mean", no_gpu),
    ):
        value = (
            float(rows[column].max()) if how == "max" else mean_over_time(run.telemetry, column, start, end)
        )
        if value is not None and np.isfinite(value):
            figures[name] = value
        else:
            reasons[name] = said.get(column, reason) if len(rows) else "no telemetry inside the load window"
    used = counter_increase(run.telemetry, "gpu_energy_j", start, end)
    figures["energy_j"] = used
    if used is None and figures["power_w"] is not None:
        used = figures["power_w"] * (end - start)
    if figures["energy_j"] is None:
        reasons["energy_j"] = said.get("gpu_energy_j", reasons.get("power_w", "no energy counter"))
    if used is None:
        reasons["energy_j_per_token"] = reasons["power_w"]
    elif not output_tokens_per_s:
        reasons["energy_j_per_token"] = "no output token"
    else:
        figures["energy_j_per_token"] = used / (output_tokens_per_s * (end - start))
    return figures, reasons


def mean_over_time(frame: pd.DataFrame, column: str, start_s: float, end_s: float) -> float | None:
    """Mean of the readings inside [start_s, end_s], each weighing as long as the time since the one before:
    a long run is sampled less often later on."""
    known = frame[np.isfinite(frame[column].to_numpy(dtype=np.float64))]
    t = known["t_ns"].to_numpy() * 1e-9
    inside = (t >= start_s) & (t <= end_s)
    weights = np.diff(np.clip(t, start_s, end_s), prepend=start_s)[inside]
    if not inside.any():
        return None
    values = known[column].to_numpy(dtype=np.float64)[inside]
    return float(np.average(values, weights=weights)) if weights.sum() > 0 else float(values.mean())


def counter_increase(frame: pd.DataFrame, column: str, start_s: float, end_s: float) -> float | None:
    """By how much a counter that only grows grew inside [start_s, end_s], linear between readings and beyond
    the outermost ones at the rate between them; None with fewer than two inside, or after a reset."""
    if column not in frame:
        return None
    known = frame[np.isfinite(frame[column].to_numpy(dtype=np.float64))]
    t, value = known["t_ns"].to_numpy() * 1e-9, known[column].to_numpy(dtype=np.float64)
    inside = (t >= start_s) & (t <= end_s)
    if inside.sum() < 2 or (np.diff(value) < 0).any() or t[inside][-1] <= t[inside][0]:
        return None
    rise = float(np.interp(end_s, t, value) - np.interp(start_s, t, value))
    seen = min(end_s, float(t[-1])) - max(start_s, float(t[0]))
    return rise * (end_s - start_s) / seen


def recorded_reasons(run: Run) -> dict[str, str]:
    """Why a source of telemetry had nothing to say, by column, as the run recorded it."""
    part = run.meta.get("telemetry")
    found = part.get("reasons") if isinstance(part, dict) else None
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def server_metrics(run: Run, window: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the server's own /metrics said inside the load window."""
    found = summarise_server_metrics(run.server_metrics, window["start_s"], window["end_s"])
    reasons = found.pop("null_reasons")
    said = run.meta.get("server_metrics")
    recorded = said.get("reasons") if isinstance(said, dict) else None
    if not found["scrapes"] and isinstance(recorded, dict) and recorded:
        reasons = dict.fromkeys(reasons, str(next(iter(recorded.values()))))
    return found, reasons


def busy_share(steps: pd.DataFrame, start_s: float, end_s: float) -> float:
    """Share of [start_s, end_s] inside steps, each cut at the edges."""
    begin = np.clip(steps["start_ns"].to_numpy() * 1e-9, start_s, end_s)
    stop = np.clip((steps["start_ns"] + steps["duration_ns"].fillna(0)).to_numpy() * 1e-9, start_s, end_s)
    return float(np.sum(stop - begin) / (end_s - start_s))
