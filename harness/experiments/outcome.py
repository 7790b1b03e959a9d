"""What came out of one pass over a schedule: the figures of every experiment, virtual or real."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from engines.virtual import Log
from harness.experiments.simulation import Cost, Played, Seen


@dataclass(frozen=True, slots=True)
class Outcome:
    """Latency is of completed requests, from the intended arrival, as the user saw it; NaN where nothing
    was measured, as the TPOT of an answer that came in one piece. seconds: from the first arrival to the
    last end."""

    completed: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts as well
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    gap_p99_ms: float  # of all gaps between two pieces of an answer: TBT
    gap_max_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    normalized_p50_ms: float  # E2E over tokens of the answer
    normalized_p99_ms: float
    normalized_mean_ms: float
    queue_p50_ms: float  # until it was first scheduled
    batch_mean: float  # sequences computed for someone, weighted by time
    kv_mean: float  # live blocks, weighted by time
    useful: float  # share of what was computed
    slot_waste: float  # ended rows and pads, for each token of an answer
    recomputed: int
    preemptions: int


def outcome(played: Played, only: Callable[[Seen], bool] = lambda seen: True) -> Outcome:
    """`only`: whose latency and throughput; batches and KV are always everybody's."""
    log, everybody = played.log, [s for s in played.seen if s.end_s is not None]
    done = [s for s in everybody if not s.hung_up and s.count and only(s)]
    seconds = max(s.end_s or 0.0 for s in everybody) - min(s.intended_s for s in everybody)
    tokens = sum(s.count for s in done)
    e2e = np.array([(s.end_s or 0.0) - s.intended_s for s in done]) * 1e3
    per_token = e2e / np.array([s.count for s in done])
    ttft = [(s.tokens[0][0] - s.intended_s) * 1e3 for s in done]
    tpot = [
        (s.tokens[-1][0] - s.tokens[0][0]) * 1e3 / (s.count - s.tokens[0][1])
        for s in done
        if s.count > s.tokens[0][1]
    ]
    gaps = [(b - a) * 1e3 for s in done for (a, _), (b, _) in pairwise(s.tokens)]
    waits = [(r.admitted_ns - r.arrival_ns) / 1e6 for r in log.requests if r.admitted_ns is not None]
    spans = np.array([s.duration_ns for s in log.steps], dtype=float)
    wasted = sum(s.ended_rows + s.left_pad_tokens for s in log.steps)
    again = sum(s.recomputed_tokens for s in log.steps)
    useful = sum(s.prefill_tokens + s.decode_tokens for s in log.steps)
    return Outcome(
        completed=len(done),
        seconds=seconds,
        output_tokens_per_s=tokens / seconds,
        total_tokens_per_s=(tokens + sum(s.planned.prompt_tokens for s in done)) / seconds,
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        tpot_p50_ms=_percentile(tpot, 50),
        tpot_p99_ms=_percentile(tpot, 99),
        gap_p99_ms=_percentile(gaps, 99),
        gap_max_ms=max(gaps, default=float("nan")),
        e2e_p50_ms=_percentile(e2e, 50),
        e2e_p99_ms=_percentile(e2e, 99),
        normalized_p50_ms=_percentile(per_token, 50),
        normalized_p99_ms=_percentile(per_token, 99),
        normalized_mean_ms=float(per_token.mean()) if len(per_token) else float("nan"),
        queue_p50_ms=_percentile(waits, 50),
        batch_mean=float(np.average([s.num_seqs for s in log.steps], weights=spans)),
        kv_mean=float(np.average([s.kv_live for s in log.steps], weights=spans)),
        useful=useful / (useful + wasted + again),
        slot_waste=wasted / max(1, sum(s.count for s in everybody)),
        recomputed=again,
        preemptions=sum(s.preemptions for s in log.steps),
    )


def median(outcomes: Sequence[Outcome]) -> Outcome:
    """Figure by figure, over rounds."""
    return Outcome(
        **{f.name: statistics.median(getattr(o, f.name) for o in outcomes) for f in fields(Outcome)}
    )


def fitted_cost(logs: Sequence[Log]) -> Cost:
    """What a pass costs by the step logs of real runs: non-negative least squares over relative errors.
    Chunks of prompts attend to what lies before them, so a token is dearer in a long prompt."""
    steps = [s for log in logs for s in log.steps]
    rows = np.array([s.num_seqs + s.ended_rows for s in steps], dtype=float)
    tokens = np.array([sum(s.tokens) + s.left_pad_tokens for s in steps], dtype=float)
    seconds = np.array([s.duration_ns / 1e9 for s in steps])
    design = np.column_stack([np.ones_like(rows), rows, np.maximum(0.0, tokens - rows)]) / seconds[:, None]
    found, _ = nnls(design, np.ones_like(seconds))
    return Cost(*(max(float(x), 1e-9) for x in found))


def _percentile(values: Sequence[float] | np.ndarray, share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else float("nan")
