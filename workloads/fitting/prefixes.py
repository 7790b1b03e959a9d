"""What prompts share: of each request, how much of its beginning an earlier one had, and how long ago that
was.

From block ids, where the trace has them (a prefix cache without limits, whose blocks are the trace's), else
from what it recorded as reused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.columns import Segments
from workloads.fitting.lengths import OF_ANSWERS, RANGES, points
from workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of each request, in the order of the trace."""

    tokens: np.ndarray  # int64: how much of its prompt was there
    lag: np.ndarray  # int64: how many requests ago, 0: nothing was
    source: str  # blocks | parts | recorded


@dataclass(frozen=True, slots=True)
class PrefixFit:
    hit_rate: float  # tokens found over all prompt tokens, with a cache without limits
    source: str
    edges: list[float]
    shares: list[list[list[float]]]  # a table of shares of the prompt for each range of prompts
    lag: list[list[float]]


def measure_reuse(trace: Trace) -> Reuse | None:
    """None where the trace does not tell."""
    if trace.blocks is not None:
        return _from_blocks(trace)
    if trace.parts is not None:
        return _from_parts(trace.parts)
    if trace.reused_tokens is not None:
        reused = np.minimum(trace.reused_tokens, trace.input_tokens)
        return Reuse(reused, _lags_in_sessions(trace, reused), "recorded")
    return None


def fit_prefixes(trace: Trace, reuse: Reuse) -> PrefixFit:
    prompts = trace.input_tokens
    share = reuse.tokens / prompts
    edges = sorted({float(e) for e in np.percentile(prompts, np.arange(1, RANGES) * 100 / RANGES)})
    edges = [e for e in edges if prompts.min() < e <= prompts.max()]
    which = np.searchsorted(edges, prompts, side="right")
    tables = [[[p, round(v, 5)] for p, v in _points(share[which == k])] for k in range(len(edges) + 1)]
    some = reuse.lag[reuse.lag > 0]
    lag = points(some if len(some) else np.ones(1), OF_ANSWERS)
    return PrefixFit(float(reuse.tokens.sum() / prompts.sum()), reuse.source, edges, tables, lag)


def _points(share: np.ndarray) -> list[tuple[float, float]]:
    found = np.percentile(share, np.arange(0, 101, 2)) if len(share) else np.zeros(51)
    return [(int(p), float(v)) for p, v in zip(np.arange(0, 101, 2), found, strict=True)]


def _from_blocks(trace: Trace) -> Reuse:
    """Ids are chained: whoever has one has all before it. In columns, since a trace may have 10^8 of them."""
    blocks = trace.blocks
    assert blocks is not None
    counts = np.diff(blocks.start)
    row = np.repeat(np.arange(len(trace), dtype=np.int32), counts)
    before = _row_before(blocks.ids, row)
    some = counts > 0
    first = blocks.start[:-1][some]
    at = np.arange(len(row))
    at[before >= 0] = len(row)
    found = np.zeros(len(trace), dtype=np.int64)
    if len(first):
        found[some] = np.minimum(np.minimum.reduceat(at, first) - first, counts[some])
    lag = np.zeros(len(trace), dtype=np.int64)
    hit = np.flatnonzero(found)
    lag[hit] = hit - before[blocks.start[hit] + found[hit] - 1]
    return Reuse(np.minimum(found * blocks.tokens, trace.input_tokens), lag, "blocks")


def _row_before(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Of each id, the last earlier row that had it, -1: none; int32. row: of each id, int32, not falling."""
    order = np.argsort(ids, kind="stable")  # by id, and of one id by row
    rows = row[order]
    new_id, new_row = np.ones(len(ids), dtype=bool), np.ones(len(ids), dtype=bool)
    new_id[1:] = np.diff(ids[order]) != 0
    new_row[1:] = new_id[1:] | (rows[1:] != rows[:-1])
    begins = np.flatnonzero(new_row)  # of an id in a row
    value = np.where(new_id[begins], -1, rows[begins - 1])
    before = np.empty(len(ids), dtype=np.int32)
    before[order] = np.repeat(value, np.diff(begins, append=len(ids)))
    return before


def _from_parts(prompts: Segments) -> Reuse:
    """Part by part, as far as an earlier prompt had the same ones in the same order."""
    last: dict[tuple[int, int, int], tuple[int, int]] = {}  # (node before, name, number): (node, row)
    tokens = np.zeros(len(prompts), dtype=np.int64)
    lag = np.zeros(len(prompts), dtype=np.int64)
    start, code, number, counts = (
        column.tolist() for column in (prompts.start, prompts.code, prompts.number, prompts.tokens)
    )
    for i in range(len(prompts)):
        node, found, holder, alike = 0, 0, -1, True
        for k in range(start[i], start[i + 1]):
            step = (node, code[k], number[k])
            known = last.get(step)
            alike = alike and known is not None
            if alike and known is not None:
                found += counts[k]
                holder = known[1]
            node = known[0] if known is not None else len(last) + 1
            last[step] = (node, i)
        tokens[i] = found
        lag[i] = i - holder if found else 0
    return Reuse(tokens, lag, "parts")


def _lags_in_sessions(trace: Trace, reused: np.ndarray) -> np.ndarray:
    """As rows are drawn: session after session, so the request before is one ago."""
    return np.where(reused > 0, 1, 0)
