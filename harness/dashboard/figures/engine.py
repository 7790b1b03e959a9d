"""What the engine did: its batch, its KV cache, its iterations, and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.dashboard.figures import phases
from harness.dashboard.figures.plot import (
    Bins,
    binned,
    bins,
    chosen,
    figure,
    floats,
    line,
    markers,
    plain,
    shown_of,
    spread,
    steady_band,
)
from harness.dashboard.shown import Floats, Shown

TOKENS = (
    ("prompts", "prefill_tokens", phases.PREFILL),
    ("answers", "decode_tokens", phases.DECODE),
    ("computed again", "recomputed_tokens", phases.RECOMPUTED),
    ("ended rows", "ended_rows", phases.ENDED),
    ("left padding", "left_pad_tokens", phases.PAD),
    ("backend padding", "backend_pad_rows", phases.BACKEND_PAD),
)
BLOCKS = (
    ("live", "kv_live", phases.DECODE),
    ("cached", "kv_cached", phases.CACHED),
    ("free", "kv_free", phases.FREE),
)
WEIGHTED = "Means, weighted by the iterations' time,"


def occupancy(runs: Sequence[Shown]) -> Any:
    """Sequences in the batch, time-weighted. One run alone also shows who waits and what ended."""
    traces, all_bins = [], []
    for run in runs:
        found = bins(run)
        if found is not None:
            mean = found.mean(run.step("num_seqs"))
            traces.append(line(run, found.left, mean, "%{x:.1f} s: %{y:.3g} sequences"))
            all_bins.append(found)
    if len(runs) == 1 and traces:
        found = bins(runs[0])
        for label, column, colour in (
            ("waiting", "waiting", "#E69F00"),
            ("ended rows", "ended_rows", phases.ENDED),
        ):
            values = runs[0].step(column)
            if found is not None and np.nan_to_num(values).max() > 0:
                hover = f"%{{x:.1f}} s: %{{y:.3g}} {label}"
                traces.append(
                    line(runs[0], found.left, found.mean(values), hover, name=label, color=colour, dash="dot")
                )
        traces[0]["name"] = "in the batch"
    notes = [binned(all_bins, WEIGHTED)]
    return figure("Batch occupancy", traces, x=("time, s", "linear"), y=("sequences", "linear"), notes=notes)


def composition(run: Shown) -> Any:
    """Tokens of the mean iteration by what they are computed for, and the most in one iteration."""
    found = bins(run, 200)
    if found is None:
        return None
    traces = _stack(run, found, TOKENS, "tokens")
    if not traces:
        return None
    whole = np.sum([np.nan_to_num(run.step(column)) for _, column, _ in TOKENS], axis=0)
    most = line(run, found.left, found.most(whole), "%{x:.1f} s: at most %{y} tokens in one iteration")
    most |= {"name": "most in one", "line": {"color": "#7F8B9C", "width": 1, "dash": "dot", "shape": "hv"}}
    notes = [found.note("Areas: the mean iteration, dotted: the largest, in each"), _totals(run)]
    return figure(
        f"Batch composition, {run.name}",
        [*traces, most] if found.note() else traces,
        x=("time, s", "linear"),
        y=("tokens in an iteration", "linear"),
        notes=notes,
    )


def _totals(run: Shown) -> str:
    """The whole run in words: the areas above do not show what is rare."""
    sums = {label: float(np.nansum(run.step(column))) for label, column, _ in TOKENS}
    whole = sum(sums.values())
    told = [f"{label} {100 * value / whole:.1f} %" for label, value in sums.items() if value > 0]
    return f"Of all computed rows: {', '.join(told)}." if whole > 0 else ""


def kv_blocks(run: Shown) -> Any:
    """Blocks of the KV pool: live, cached and free."""
    found = bins(run, 200)
    if found is None:
        return None
    live, cached, free = (np.nan_to_num(run.step(column)) for _, column, _ in BLOCKS)
    pool = float((live + cached + free).max())
    if pool <= 0:
        return None
    small = float((live + cached).max()) < 0.3 * pool  # a free pool would hide what is in use
    traces = _stack(run, found, BLOCKS[: 2 if small else 3], "blocks")
    most = line(run, found.left, found.most(run.step("kv_live")), "%{x:.1f} s: at most %{y} blocks live")
    most |= {"name": "most live", "line": {"color": "#7F8B9C", "width": 1, "dash": "dot", "shape": "hv"}}
    return figure(
        f"KV blocks, {run.name}",
        [*traces, most] if found.note() else traces,
        x=("time, s", "linear"),
        y=("blocks", "linear"),
        notes=[
            found.note("Areas: means weighted by time, dotted: the most live, in each"),
            f"The pool has {pool:,.0f} blocks" + ("; the free ones are not drawn." if small else "."),
        ],
    )


def kv_use(runs: Sequence[Shown]) -> Any:
    """Live KV blocks as a share of the pool, time-weighted."""
    traces, all_bins = [], []
    for run in runs:
        found, live = bins(run), run.step("kv_live")
        total = live + run.step("kv_cached") + run.step("kv_free")
        if found is not None and (total > 0).any():
            share = found.mean(100.0 * live / np.where(total > 0, total, np.nan))
            traces.append(line(run, found.left, share, "%{x:.1f} s: %{y:.3g} %"))
            all_bins.append(found)
    notes = [binned(all_bins, WEIGHTED)]
    return figure(
        "KV cache in use", traces, x=("time, s", "linear"), y=("% of blocks", "linear"), notes=notes
    )


def step_times(runs: Sequence[Shown]) -> Any:
    """How long an iteration took over how many tokens it computed: where stalls come from."""
    traces, kept = [], []
    for run in runs:
        ms = run.step("duration_ns") / 1e6
        tokens = run.step("prefill_tokens") + run.step("decode_tokens")
        rows = np.flatnonzero(np.isfinite(ms) & (tokens > 0) & (ms > 0))
        if not len(rows):
            continue
        keep = rows[chosen(tokens[rows], ms[rows], max(400, 3000 // len(runs)))]
        traces.append(markers(run, tokens[keep], ms[keep], "%{x} tokens: %{y:.3g} ms", size=4, opacity=0.45))
        kept.append((run, len(keep), len(rows)))
    how = "the longest and the shortest of each stretch of sizes, and every k-th of the others"
    notes = [shown_of(kept, "iterations", how)]
    return figure(
        "Iteration time", traces, x=("tokens in the iteration", "log"), y=("ms", "log"), notes=notes
    )


def device_busy(runs: Sequence[Shown]) -> Any:
    """Share of the time that lies inside a pass."""
    traces, widths = [], []
    for run in runs:
        found = bins(run, 200)
        if found is None:
            continue
        busy = _overlap(run, found)
        traces.append(line(run, found.left, 100 * busy, "%{x:.1f} s: %{y:.3g} % busy", shape="hv"))
        widths.append(found.width)
    notes = [f"Time inside passes, in bins of {spread(widths, '.3g')} s."] if widths else []
    return figure(
        "Device busy", traces, x=("time, s", "linear"), y=("%", "linear"), y_range=[0, 101], notes=notes
    )


def _overlap(run: Shown, found: Bins) -> Floats:
    """[bins] the share of each bin that passes cover."""
    start = np.maximum(run.step("start_ns") * 1e-9, 0.0)
    end = start + found.weight
    inside = np.concatenate([[0.0], np.cumsum(found.weight)])
    times = np.column_stack([start, end]).ravel()
    values = np.column_stack([inside[:-1], inside[1:]]).ravel()
    edges = np.append(found.left, found.left[-1] + found.width)
    share: Floats = np.diff(np.interp(edges, np.maximum.accumulate(times), values)) / found.width
    return np.clip(share, 0.0, 1.0)


TELEMETRY = (
    ("server_cpu_pct", "Server CPU", "% of one core"),
    ("client_cpu_pct", "Client CPU", "% of one core"),
    ("server_rss_mb", "Server memory", "MB"),
    ("gpu_util_pct", "GPU utilization", "%"),
    ("gpu_memory_gb", "GPU memory", "GB"),
    ("gpu_power_w", "GPU power", "W"),
)


def telemetry(runs: Sequence[Shown], column: str, title: str, unit: str) -> Any:
    """Readings over the run: the mean of each bin."""
    traces, counts = [], []
    for run in runs:
        if column not in run.run.telemetry:
            continue
        at = run.run.telemetry["t_ns"].to_numpy(np.float64) * 1e-9
        values = run.run.telemetry[column].to_numpy(np.float64)
        known = np.isfinite(at) & np.isfinite(values)
        at, values = at[known], values[known]
        if not len(at):
            continue
        parts = min(150, max(1, len(at) // 5))
        edges = np.linspace(at.min(), at.max() + 1e-9, parts + 1)
        which = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, parts - 1)
        count = np.bincount(which, minlength=parts)
        mean = np.bincount(which, values, parts)[count > 0] / count[count > 0]
        traces.append(line(run, edges[:-1][count > 0], mean, f"%{{x:.1f}} s: %{{y:.4g}} {unit}"))
        counts.append(parts)
    notes = [f"Means of {spread(counts)} bins."] if counts else []
    return steady_band(runs, figure(title, traces, x=("time, s", "linear"), y=(unit, "linear"), notes=notes))


def _stack(run: Shown, found: Bins, parts: Any, unit: str) -> list[dict[str, Any]]:
    """Areas on top of each other; what never occurs is left out."""
    traces = []
    for label, column, colour in parts:
        values = run.step(column)
        if np.nan_to_num(values).max(initial=0) <= 0:
            continue
        look = {"color": colour, "width": 0.5, "shape": "hv"}
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "stackgroup": "all",
                "line": look,
                "x": floats(found.left),
                "y": floats(found.mean(values)),
                "fillcolor": colour,
                "hovertemplate": f"%{{x:.1f}} s: %{{y:.4g}} {unit}<extra>{plain(label)}</extra>",
            }
        )
    return traces
