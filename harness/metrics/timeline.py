"""The engine's iterations as one line of time: when each ran, whom it served, what its prefill cost.

A pass that carries prompts takes longer than the decodes in it would alone. What they would take alone is the
median of the run's passes of decodes only with as many rows (between known numbers of rows a straight line);
the rest is the cost of the prefill, shared among its prompts by their tokens. A run without a single pass of
decodes only has nothing to compare with: there a pass is split by tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.metrics.percentiles import Floats

Ints = NDArray[np.int64]
PREFILL, DECODE, RECOMPUTE, ENDED = range(4)
REASONS = ("seat", "kv", "budget", "batch", "order", "iteration", "unknown")
"""What a waiting request waits for: see `reason_codes`."""
REASON_OF = {
    "seats": "seat",
    "kv": "kv",
    "kv_high_watermark": "kv",
    "budget": "budget",
    "batch": "batch",
    "company": "batch",
    "order": "order",
}


@dataclass(frozen=True)
class Timeline:
    """Steps in order of time, and their rows in order of (sequence, step). Times in ns from the run's
    start."""

    number: Ints  # [steps] as the engine counts them
    start: Floats  # [steps]
    end: Floats  # [steps]
    prefill: Floats  # [steps] tokens of prompts, recomputed ones too
    extra: Floats  # [steps] ns that its prefill cost
    seq: Ints  # [rows]
    step: Ints  # [rows]
    tokens: Floats  # [rows]
    kind: Ints  # [rows]
    lost_seq: Ints  # [losses] who lost its seat
    lost_step: Ints  # [losses] when this step was planned
    edges: Floats  # [spans] from here on ...
    reasons: Ints  # [spans] ... the queue waited for this: an index of REASONS

    def in_steps(self, at: Floats, with_prefill: bool) -> Floats:
        """ns of passes (with prefill: or of those without) before each moment."""
        if not self.start.size:
            return np.zeros_like(at)
        length = np.where((self.prefill > 0) == with_prefill, self.end - self.start, 0.0)
        before = np.concatenate([[0.0], np.cumsum(length)])
        times = np.column_stack([self.start, self.end]).ravel()
        values = np.column_stack([before[:-1], before[1:]]).ravel()
        return np.interp(at, times, values)

    def waiting_for(self, reason: int, at: Floats) -> Floats:
        """ns before each moment, from the first one, in which the queue waited for it."""
        edges = np.concatenate([self.edges, [max(self.edges[-1], np.max(at, initial=0.0)) + 1.0]])
        spans = np.where(self.reasons == reason, np.diff(edges), 0.0)
        return np.interp(at, edges, np.concatenate([[0.0], np.cumsum(spans)]))

    def rows_of(self, seq: int) -> slice:
        """Its rows, without those after its answer had ended."""
        return slice(int(np.searchsorted(self.seq, seq)), int(np.searchsorted(self.seq, seq, "right")))

    def losses_of(self, seq: int) -> Ints:
        """The steps whose plan cost it its seat."""
        return np.sort(self.lost_step[self.lost_seq == seq])


def timeline(steps: pd.DataFrame, company_ms: float = 0.0) -> Timeline:
    """The passes of Run.steps that ended in the run (not those of its warm-up). company_ms: how long an
    incomplete batch waits for more (engine.max_queue_delay_ms)."""
    start = steps["start_ns"].to_numpy(np.float64)
    end = start + steps["duration_ns"].fillna(0).to_numpy(np.float64)
    steps = steps[end > 0]
    start, end = start[end > 0], end[end > 0]
    step, (seq, tokens, kind) = step_rows(steps, ("ids", "tokens", "kind"))
    prompts = (kind == PREFILL) | (kind == RECOMPUTE)
    count = len(steps)
    prefill = np.bincount(step, weights=np.where(prompts, tokens, 0), minlength=count).astype(np.float64)
    decodes = np.bincount(step[~prompts], minlength=count).astype(np.float64)
    served = kind != ENDED
    step, seq, tokens, kind = step[served], seq[served], tokens[served], kind[served]
    order = np.lexsort((step, seq))
    lost_step, (lost_seq,) = step_rows(steps, ("preempted",))
    edges, reasons = reason_codes(steps, start, end, company_ms)
    return Timeline(
        number=steps["step"].fillna(-1).to_numpy(np.int64),
        start=start,
        end=end,
        prefill=prefill,
        extra=prefill_cost(end - start, prefill, decodes),
        seq=seq[order],
        step=step[order],
        tokens=tokens[order].astype(np.float64),
        kind=kind[order],
        lost_seq=lost_seq,
        lost_step=lost_step,
        edges=edges,
        reasons=reasons,
    )


def prefill_cost(duration: Floats, prefill: Floats, decodes: Floats) -> Floats:
    """What each pass took beyond what its decodes would take alone. Arrays of one value a step."""
    alone = (prefill == 0) & (decodes > 0)
    if not alone.any():
        return duration * prefill / np.maximum(prefill + decodes, 1)
    sizes = np.unique(decodes[alone])
    medians = [float(np.median(duration[alone & (decodes == size)])) for size in sizes]
    usual = np.where(decodes > 0, np.interp(decodes, sizes, medians), 0.0)
    cost: Floats = np.where(prefill > 0, np.maximum(0.0, duration - usual), 0.0)
    return cost


def reason_codes(steps: pd.DataFrame, start: Floats, end: Floats, company_ms: float) -> tuple[Floats, Ints]:
    """Moments, and what the queue waited for from each of them on.

    What a step says of the head of the queue holds from its start to the next one's. A step that left nobody
    behind says nothing: who comes while it runs waits for the iteration to end. While the engine does nothing
    a request waits for company, if the strategy waits for that, or to be taken up."""
    idle = REASONS.index("batch" if company_ms > 0 else "iteration")
    index = {name: REASONS.index(reason) for name, reason in REASON_OF.items()}
    waiting = steps["waiting"].fillna(0).to_numpy(np.float64)
    blank = np.where(waiting > 0, REASONS.index("unknown"), REASONS.index("iteration"))
    said = [
        index.get(name, REASONS.index("unknown")) if isinstance(name, str) else int(other)
        for name, other in zip(steps["blocked"], blank, strict=True)
    ]
    rests = np.append(~np.isfinite(steps["host_gap_ns"].to_numpy(np.float64))[1:], True)[: len(start)]
    edges = np.concatenate([[-np.inf], start, end[rests]])
    codes = np.concatenate([[idle], np.array(said, np.int64), np.full(int(rests.sum()), idle)])
    edges[0] = min(0.0, np.min(start, initial=0.0)) - 1e9
    order = np.argsort(edges, kind="stable")
    return edges[order], codes[order].astype(np.int64)


def step_rows(steps: pd.DataFrame, names: tuple[str, ...]) -> tuple[Ints, list[Ints]]:
    """List columns, one after the other, and the step of each item."""
    columns: list[list[Any]] = [
        [items if isinstance(items, (list, np.ndarray)) else () for items in steps[name]] for name in names
    ]
    length = np.array([[len(items) for items in column] for column in columns], np.int64).reshape(
        len(names), -1
    )
    if (length != length[0]).any():  # a damaged row says nothing of anyone
        whole = (length == length[0]).all(axis=0)
        columns = [[i if ok else () for i, ok in zip(c, whole, strict=True)] for c in columns]
        length[:, ~whole] = 0
    flat = [np.concatenate([np.empty(0, np.int64), *c]).astype(np.int64) for c in columns]
    return np.repeat(np.arange(len(steps)), length[0]), flat
