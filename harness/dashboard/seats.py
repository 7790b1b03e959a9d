"""Who held which seat of the batch in which iteration, from the step log alone.

The engine has no numbered seats: a sequence takes the lowest free one when a pass first computes it and holds
it until it leaves the batch, so the picture is the tightest that the records allow. It gives the seat up when
it finishes (its blocks are free), is preempted, or its slice is over."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.metrics.attribution import FINISHED, is_sliced
from harness.metrics.run import Run
from harness.metrics.timeline import ENDED, PREFILL, RECOMPUTE, Ints, step_rows

LEFT_OUT, HELD = 4, 5
"""Kinds of blocks beside the four of the step log: it has a seat, but the pass computes nothing for it; its
answer has ended, no pass computes it, and its seat is still taken."""
KINDS = ("prefill", "decode", "recomputed", "ended row", "left out", "held")


@dataclass(frozen=True)
class Seats:
    """Blocks in order of their first step. A block is a stretch of passes in which one request had one seat
    and was in one state. Every chunk of a prompt is a block of its own."""

    count: int  # seats that were ever taken at once
    seat: Ints  # [blocks] from 0
    seq: Ints  # [blocks] seq_id
    kind: Ints  # [blocks] an index of KINDS
    first: Ints  # [blocks] positions in passes(run.steps) ...
    last: Ints  # [blocks] ... both included
    tokens: Ints  # [blocks] computed in it
    pad: Ints  # [blocks] tokens of left padding before its prompt (static batches)


def passes(steps: pd.DataFrame) -> pd.DataFrame:
    """The passes that ended in the run: those of the warm-up end before it."""
    end = steps["start_ns"].to_numpy(np.float64) + steps["duration_ns"].fillna(0).to_numpy(np.float64)
    return steps[end > 0].reset_index(drop=True)


def seats(run: Run) -> Seats:
    """The blocks of a run; none without a step log."""
    steps = passes(run.steps)
    step, (seq, tokens, kind) = step_rows(steps, ("ids", "tokens", "kind"))
    lost_step, (lost_seq,) = step_rows(steps, ("preempted",))
    pad = _left_pads(steps, step, tokens, kind)
    order = np.lexsort((step, seq))
    step, seq, tokens, kind, pad = step[order], seq[order], tokens[order], kind[order], pad[order]
    if not step.size:
        none = np.empty(0, np.int64)
        return Seats(0, none, none, none, none, none, none, none)
    prompt = (kind == PREFILL) | (kind == RECOMPUTE)
    other = np.append(True, seq[1:] != seq[:-1])
    apart = np.append(0, np.diff(step))
    changed = np.append(True, kind[1:] != kind[:-1])
    begins = np.flatnonzero(other | (apart > 1) | ((apart == 1) & (changed | prompt)))
    ends = np.append(begins[1:], step.size) - 1
    table = np.column_stack(
        [
            *(seq[begins], kind[begins], step[begins], step[ends]),
            *(np.add.reduceat(tokens, begins), np.maximum.reduceat(pad, begins)),
        ]
    )
    start = steps["start_ns"].to_numpy(np.float64)
    table, fresh = _with_waits(table, start, run, np.sort(lost_seq * (len(start) + 1) + lost_step))
    seat = _assign(table, fresh)
    order = np.lexsort((seat, table[:, 2]))
    columns = table[order].T
    return Seats(int(seat.max()) + 1, seat[order], *columns)


def _left_pads(steps: pd.DataFrame, step: Ints, tokens: Ints, kind: Ints) -> Ints:
    """Left padding of each row: up to the longest prompt of its pass, where the pass was padded at all."""
    prompt = (kind == PREFILL) | (kind == RECOMPUTE)
    longest = np.zeros(len(steps), np.int64)
    np.maximum.at(longest, step, np.where(prompt, tokens, 0))
    padded = steps["left_pad_tokens"].fillna(0).to_numpy(np.float64) > 0
    return np.where(prompt & padded[step], longest[step] - tokens, 0)


def _with_waits(table: Ints, start: np.ndarray, run: Run, losses: Ints) -> tuple[Ints, Ints]:
    """The table with blocks for the passes that left a seated request out, in order of (sequence, step), and
    which blocks begin a new stay in the batch."""
    width, sliced = len(start) + 1, is_sliced(run)
    seq, last = table[:, 0], table[:, 3]
    again = np.append(seq[1:] == seq[:-1], False)
    back = np.append(table[1:, 2], 0)
    # Until when a sequence that does not come back holds its seat: the last pass that begins before its end.
    known = run.engine.dropna(subset=["seq_id", "finish_ns"])
    finish = dict(zip(known["seq_id"].astype(np.int64), known["finish_ns"], strict=True))
    whole = set(known.loc[known["finish_reason"].isin(FINISHED), "seq_id"].astype(np.int64))
    left = np.array([finish.get(int(s), -np.inf) for s in seq])
    until = np.where(again, back - 1, np.searchsorted(start, left, side="left") - 1)
    losses = np.append(losses, np.iinfo(np.int64).max)
    next_loss = losses[np.searchsorted(losses, seq * width + last, side="right")]
    lost = (next_loss // width == seq) & (next_loss % width <= np.where(again, back, width))
    gap = until > last
    waits = np.flatnonzero(gap & ~lost & ~(again & sliced))
    extra = np.zeros((waits.size, table.shape[1]), np.int64)
    extra[:, 0], extra[:, 2], extra[:, 3] = seq[waits], last[waits] + 1, until[waits]
    ended = np.array([int(s) in whole for s in seq[waits]], bool) & ~again[waits]
    extra[:, 1] = np.where(ended, HELD, LEFT_OUT)
    left_seat = np.append(True, (~again | (gap & (lost | sliced)))[:-1])
    joined = np.concatenate([table, extra])
    fresh = np.concatenate([left_seat, np.zeros(waits.size, bool)])
    order = np.lexsort((joined[:, 2], joined[:, 0]))
    return joined[order], fresh[order]


def _assign(table: Ints, fresh: Ints) -> Ints:
    """The seat of each block: a stay takes the lowest seat that is free when it begins."""
    begins = np.flatnonzero(fresh)
    ends = np.append(begins[1:], len(table)) - 1
    stays = np.column_stack([table[begins, 2], table[begins, 0], table[ends, 3], begins, ends])
    seat = np.zeros(len(table), np.int64)
    busy: list[tuple[int, int]] = []  # (last step, seat)
    free: list[int] = []
    count = 0
    for first, _, last, begin, end in stays[np.lexsort((stays[:, 1], stays[:, 0]))].tolist():
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(count)
            count += 1
        taken = heapq.heappop(free)
        seat[begin : end + 1] = taken
        heapq.heappush(busy, (last, taken))
    return seat


def ended_share(found: Seats, start: np.ndarray, end: np.ndarray) -> float | None:
    """Of the seat time that was taken, the share whose answer had already ended. None without a block."""
    spent = end[found.last] - start[found.first]
    whole = float(spent.sum())
    dead = (found.kind == ENDED) | (found.kind == HELD)
    return float(spent[dead].sum()) / whole if whole > 0 else None
