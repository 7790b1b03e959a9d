"""Sessions: how many requests, how long between the end of one and the next, how alike their lengths are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workloads.exact import normal_quantile
from workloads.fitting.lengths import OF_ANSWERS, points
from workloads.trace import Trace

_MOST_VALUES = 400
_FEWEST = 20  # sessions of more than one request


@dataclass(frozen=True, slots=True)
class SessionFit:
    sessions: int
    turns: dict[str, Any]  # a distribution: how often each count was
    think_s: list[list[float]]
    alike: float  # correlation of the lengths of a session's prompts, in normal scores
    growing: bool  # prompts rise within a session as a rule
    starts_s: np.ndarray | None  # when each session begins; None: times count from its own start


def fit_sessions(trace: Trace) -> SessionFit | None:
    """None where the trace has no sessions, or hardly one of more than one request."""
    if trace.session is None:
        return None
    code = trace.session.codes
    known = code >= 0
    if known.mean() < 0.5:
        return None
    order = np.lexsort((np.arange(len(code)), code))
    order = order[known[order]]
    session = code[order]
    first = np.concatenate([[True], session[1:] != session[:-1]])
    counts = np.diff(np.concatenate([np.flatnonzero(first), [len(session)]]))
    if (counts > 1).sum() < _FEWEST:
        return None
    times = trace.times_s()[order]
    if trace.think_s is not None and np.isfinite(trace.think_s[order][~first]).any():
        gaps = trace.think_s[order][~first]
        gaps = gaps[np.isfinite(gaps)]
    elif trace.time_ns is None:
        return None
    else:  # from the arrival of the one before: with its answer
        gaps = np.diff(times)[~first[1:]]
    prompts = trace.input_tokens[order].astype(float)
    return SessionFit(
        sessions=len(counts),
        turns=_counted(counts),
        think_s=[[p, round(max(v, 0.0), 3)] for p, v in points(gaps, OF_ANSWERS)],
        alike=_alike(prompts, session),
        growing=bool((np.diff(prompts)[~first[1:]] >= 0).mean() > 0.75),
        starts_s=None if trace.time_ns is None else np.sort(times[first]),
    )


def _counted(counts: np.ndarray) -> dict[str, Any]:
    values, times = np.unique(counts, return_counts=True)
    if len(values) > _MOST_VALUES:
        return {"dist": "quantiles", "points": points(counts), "min": 1}
    return {"dist": "discrete", "values": values.tolist(), "weights": times.tolist()}


def _alike(prompts: np.ndarray, session: np.ndarray) -> float:
    """The intraclass correlation of the normal scores (one-way analysis of variance)."""
    ranks = np.empty(len(prompts))
    ranks[np.argsort(prompts, kind="stable")] = np.arange(len(prompts))
    score = normal_quantile((ranks + 0.5) / len(prompts))
    _, group, counts = np.unique(session, return_inverse=True, return_counts=True)
    means = np.bincount(group, weights=score) / counts
    within = float(((score - means[group]) ** 2).sum() / max(1, len(score) - len(counts)))
    size = (len(score) - (counts**2).sum() / len(score)) / max(1, len(counts) - 1)
    between = float((counts * means**2).sum() / max(1, len(counts) - 1))
    spread = (between - within) / size
    return round(float(np.clip(spread / (spread + within), 0.0, 0.99)), 3) if spread + within > 0 else 0.0
