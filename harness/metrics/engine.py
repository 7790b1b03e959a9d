"""What the engine's own records say: waiting, prefill, decode, and what each step was spent on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.percentiles import describe, empty_block
from harness.metrics.run import Run

MS = 1e-6
THRASH_LIMIT = 0.5
"""Recomputed tokens for each useful one, above which a run is said to thrash."""
FINISHED = ("stop", "length")
STEP_NAMES = (
    *("count", "useful_token_fraction", "padded_token_fraction", "recomputed_tokens", "backend_pad_rows"),
    *("preemptions", "batch_size_mean", "kv_live_mean", "kv_live_max"),
)
NO_STEPS = "no step records: the server is not one of the reference engines"
NO_ENGINE = "no engine records: the server is not one of the reference engines"


def engine_latency(engine: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """queue_delay (arrival to first scheduled), prefill (to the first token), decode (to the last), of
    finished requests; ms."""
    done = engine[engine["finish_reason"].isin(FINISHED)]
    reason = NO_ENGINE if engine.empty else "no request finished in the engine"
    spans = {
        "queue_delay": ("arrival_ns", "admitted_ns"),
        "prefill": ("admitted_ns", "first_token_ns"),
        "decode": ("first_token_ns", "finish_ns"),
    }
    blocks: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, (start, end) in spans.items():
        blocks[name] = describe((done[end] - done[start]).to_numpy() * MS)
        if blocks[name]["n"] == 0:
            reasons[name] = reason
    return blocks, reasons


def load_steps(run: Run, window: dict[str, Any]) -> pd.DataFrame:
    """The steps that started inside the load window: warm-up and shutdown are left out."""
    if window["start_s"] is None:
        return run.steps.iloc[0:0]
    start = run.steps["start_ns"] * 1e-9
    return run.steps[(start >= window["start_s"] - 1e-9) & (start <= window["end_s"] + 1e-9)].reset_index(
        drop=True
    )


def step_figures(steps: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.steps. Token fractions are of all rows that the model computed; backend padding is counted
    apart."""
    figures: dict[str, Any] = {**dict.fromkeys(STEP_NAMES), "host_gap_ms": empty_block()}
    if steps.empty:
        return figures, dict.fromkeys((*STEP_NAMES, "host_gap_ms"), NO_STEPS)
    reasons: dict[str, str] = {}
    total = steps[
        ["prefill_tokens", "decode_tokens", "ended_rows", "left_pad_tokens", "recomputed_tokens"]
    ].sum()
    useful = float(total["prefill_tokens"] + total["decode_tokens"])
    padded = float(total["ended_rows"] + total["left_pad_tokens"])
    computed = useful + padded + float(total["recomputed_tokens"])
    figures["count"] = len(steps)
    for name in ("recomputed_tokens", "backend_pad_rows", "preemptions"):
        figures[name] = int(steps[name].sum())
    if computed > 0:
        figures["useful_token_fraction"] = useful / computed
        figures["padded_token_fraction"] = padded / computed
    else:
        reasons.update(
            dict.fromkeys(("useful_token_fraction", "padded_token_fraction"), "no step computed a token")
        )
    weights = steps["duration_ns"].fillna(0).to_numpy()
    for name, column in (("batch_size_mean", "num_seqs"), ("kv_live_mean", "kv_live")):
        values = steps[column].to_numpy()
        known = np.isfinite(values) & (weights > 0)
        if known.any():
            figures[name] = float(np.average(values[known], weights=weights[known]))
        else:
            reasons[name] = f"the steps name no {column}"
    peak = steps["kv_live"].max()
    if np.isfinite(peak):
        figures["kv_live_max"] = int(peak)
    else:
        reasons["kv_live_max"] = "the steps name no kv_live"
    figures["host_gap_ms"] = describe(steps["host_gap_ns"].to_numpy() * MS)
    if figures["host_gap_ms"]["n"] == 0:
        reasons["host_gap_ms"] = "no step followed another"
    return figures, reasons


def prefix_cache(run: Run, steps: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.prefix_cache: of the prompt tokens that were due, the share that the cache had."""
    found, computed = steps["cached_tokens"].sum(), steps["prefill_tokens"].sum()
    reason = None
    if steps.empty:
        reason = NO_STEPS
    elif not (run.config.get("engine") or {}).get("prefix_cache"):
        reason = "engine.prefix_cache is off"
    elif not found + computed > 0:
        reason = "no step computed or found a prompt token"
    if reason is not None:
        return {"hit_rate_tokens": None}, {"hit_rate_tokens": reason}
    return {"hit_rate_tokens": float(found / (found + computed))}, {}


def thrashing(steps: pd.DataFrame) -> str | None:
    """A warning when the engine mostly computes again what it has thrown away, else None."""
    useful = float(steps["prefill_tokens"].sum() + steps["decode_tokens"].sum())
    again = float(steps["recomputed_tokens"].sum())
    if not again > THRASH_LIMIT * useful or not steps["preemptions"].sum():
        return None  # slices compute their prompts again by design
    return (
        f"thrashing: {again:.0f} tokens were computed again for {useful:.0f} useful ones (limit "
        f"{THRASH_LIMIT:g} for each): fewer engine.max_num_seqs, more KV, or engine.preemption=swap"
    )


def joined(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """per_request rows with the engine's record of the same (id, attempt); suffix _engine where names
    collide."""
    left = frame.assign(attempt=run.requests["attempt"].to_numpy(), end_ns=run.requests["end_ns"].to_numpy())
    right = run.engine.drop_duplicates(["id", "attempt"], keep="last")
    return left.merge(right, on=["id", "attempt"], how="inner", suffixes=("", "_engine"))
