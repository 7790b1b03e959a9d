"""Where the time of a request went: its whole E2E, from the intended arrival to the last token at the client,
as parts that add up to it.

    client_wait    intended arrival to send
    transport_in   send to arrival in the engine
    queue          arrival to the first plan that it is in; between slices too (queue_reasons says for what)
    prefill        passes that compute its prompt: what they would take without the prompts of others
    decode         passes that compute its answer, likewise
    stalled        by others' prefill: what their prompts cost in its passes, and passes with prompts that
                   left it out although it had a seat
    skipped        passes without prompts that left it out: it was not its turn
    preempted      from the loss of its seat until it is computed again
    recompute      passes that compute what it had lost
    held           its answer has ended, and leaves when the batch does (static)
    host           between the passes while it had a seat
    transport_out  the rest: its last token was out in the engine, and then at the client

The whole is cut at the client's last stamp, so that a pass which went on beyond it is not counted. A request
that no step names is split by its own stamps alone: prefill is then admission to first token, decode the rest
in the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.engine import NO_ENGINE, joined
from harness.metrics.percentiles import Floats
from harness.metrics.run import Run
from harness.metrics.timeline import DECODE, PREFILL, REASONS, RECOMPUTE, Ints, Timeline, timeline

PARTS = (
    *("client_wait", "transport_in", "queue", "prefill", "decode", "stalled", "skipped"),
    *("preempted", "recompute", "held", "host", "transport_out"),
)
QUEUE = tuple(f"queue_{reason}" for reason in REASONS)
OUTCOMES = ("completed", "cancelled", "timed_out")
FINISHED = ("stop", "length")
TOLERANCE_NS = 1e6  # between a request's own stamps and those of its steps, for both to be of one life


def run_timeline(run: Run) -> Timeline:
    """The steps of a run, as its engine's settings say that they are to be read."""
    engine = run.config.get("engine")
    delay = engine.get("max_queue_delay_ms") if isinstance(engine, dict) else None
    return timeline(run.steps, float(delay) if isinstance(delay, (int, float)) else 0.0)


def is_sliced(run: Run) -> bool:
    """Whether sequences leave the batch at the borders of slices, which is no preemption."""
    engine = run.config.get("engine")
    named = [run.meta.get("server", {}).get("scheduler"), run.meta.get("engine")]
    named += [engine.get("scheduler")] if isinstance(engine, dict) else []
    return "sliced" in named


def lives(run: Run, frame: pd.DataFrame, line: Timeline | None = None) -> pd.DataFrame:
    """A row for each request that reached the engine and ended by itself, by its user or by a timeout: id,
    seq_id, outcome, e2e_ms (the user's hang-up is its end, if there was one), the PARTS and the QUEUE, all in
    ms. The parts add up to e2e_ms, and QUEUE to the part `queue`. `frame`: per_request(run.requests)."""
    line = run_timeline(run) if line is None else line
    both = joined(run, frame[["id", "outcome", "request_class", "tenant", "intended_s", "send_s", "last_s"]])
    finish = both["finish_reason"].isin(FINISHED) | (both["outcome"] != "completed")
    both = both[both["outcome"].isin(OUTCOMES) & finish].reset_index(drop=True)
    done = (both["outcome"] == "completed").to_numpy()
    last = np.where(done, both["last_s"].to_numpy() * 1e9, both["end_ns"].to_numpy())
    known = np.isfinite(last) & both[["intended_s", "send_s", "arrival_ns", "seq_id"]].notna().all(axis=1)
    known &= ~done | both[["admitted_ns", "first_token_ns", "finish_ns"]].notna().all(axis=1)
    both, last = both[known].reset_index(drop=True), last[known]
    parts = _split(both, last, _first_stamps(run, both, last), line, is_sliced(run))
    ids = {name: both[name] for name in ("id", "seq_id", "outcome", "request_class", "tenant")}
    whole = last - both["intended_s"].to_numpy() * 1e9
    return pd.DataFrame({**ids, "e2e_ms": whole * 1e-6, **{k: v * 1e-6 for k, v in parts.items()}})


def attribution(rows: pd.DataFrame, run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.attribution: each part's share of the E2E of completed requests, summed. The shares add up to
    1. rows: lives(run)."""
    return _shares(rows, run, PARTS, PARTS)


def queue_reasons(rows: pd.DataFrame, run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """summary.queue_reasons: attribution.queue by what was waited for."""
    return _shares(rows, run, QUEUE, REASONS)


def _shares(
    rows: pd.DataFrame, run: Run, columns: tuple[str, ...], names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, str]]:
    rows = rows[rows["outcome"] == "completed"]
    whole = float(rows["e2e_ms"].sum())
    if rows.empty or whole <= 0:
        reason = NO_ENGINE if run.engine.empty else "no completed request has an engine record"
        return dict.fromkeys(names), dict.fromkeys(names, reason)
    return {n: float(rows[c].sum() / whole) for n, c in zip(names, columns, strict=True)}, {}


def _first_stamps(run: Run, both: pd.DataFrame, last: Floats) -> Floats:
    """When the client had the first token of each, else the last."""
    first = {
        key: stamps[0]
        for key, stamps in zip(run.requests["id"], run.requests["chunk_ns"], strict=True)
        if len(stamps)
    }
    return np.array([first.get(key, end) for key, end in zip(both["id"], last, strict=True)], np.float64)


def _split(
    both: pd.DataFrame, last: Floats, first: Floats, line: Timeline, sliced: bool
) -> dict[str, Floats]:
    """The parts in ns, by name. last: the end of each E2E; first: when the client had the first token."""

    def mark(name: str) -> Floats:
        """A stamp of the engine, not beyond the end; the end where there is none."""
        return np.fmin(both[name].to_numpy(np.float64), last)

    intended, sent = both["intended_s"].to_numpy() * 1e9, both["send_s"].to_numpy() * 1e9
    arrived, admitted, token, finished = map(
        mark, ("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns")
    )
    seq = both["seq_id"].to_numpy().astype(np.int64)
    served, begin, end, last_step = _served(seq, last, line, sliced)
    by_steps = (begin >= admitted - TOLERANCE_NS) & (end <= finished + TOLERANCE_NS)
    parts = {name: np.where(by_steps, served[name], 0.0) for name in served}
    parts["prefill"] = np.where(by_steps, parts["prefill"], token - admitted)
    parts["decode"] = np.where(by_steps, parts["decode"], finished - token)
    end = np.where(by_steps, end, finished)

    done = (both["outcome"] == "completed").to_numpy()
    ended = both["finish_reason"].isin(FINISHED).to_numpy()
    held_to = np.fmin(finished, np.where(done, first, last))
    parts["held"] = np.where(ended & by_steps, np.maximum(0.0, held_to - end), 0.0)
    tail = by_steps & ~done & ~ended  # it had a seat, or had lost one, when its user left
    _wait(parts, line, end, finished, tail, seq, last_step)
    inside = np.where(tail, finished, end) - admitted
    among = ("prefill", "decode", "stalled", "skipped", "preempted", "recompute", "between")
    parts["host"] = np.where(by_steps, inside - sum(parts[name] for name in among), 0.0)

    for i, name in enumerate(QUEUE):
        parts[name] = parts[name] + line.waiting_for(i, admitted) - line.waiting_for(i, arrived)
    parts |= {"client_wait": sent - intended, "transport_in": arrived - sent}
    parts["queue"] = admitted - arrived + parts["between"]
    others = [parts[name] for name in PARTS if name != "transport_out"]
    parts["transport_out"] = last - intended - np.sum(others, axis=0)
    return {name: parts[name] for name in (*PARTS, *QUEUE)}


def _wait(
    parts: dict[str, Floats],
    line: Timeline,
    start: Floats,
    end: Floats,
    where: Any,
    seq: Ints,
    step: Ints,
) -> None:
    """Time without being served, from `start` (the end of pass `step`) to `end`: with a seat, then, from its
    loss on, without. Adds to the parts; `where`: the rows that count."""
    cut = np.fmin(_lost_at(line, seq, step, end), end)
    for name, with_prefill in (("stalled", True), ("skipped", False)):
        spent = line.in_steps(cut, with_prefill) - line.in_steps(np.fmin(start, cut), with_prefill)
        parts[name] = parts[name] + np.where(where, spent, 0.0)
    parts["preempted"] = parts["preempted"] + np.where(where, np.maximum(0.0, end - np.fmax(cut, start)), 0.0)


def _lost_at(line: Timeline, seq: Ints, step: Ints, default: Floats) -> Floats:
    """When each of `seq` lost its seat after having been served in `step`: the end of the pass before the one
    that was planned without it. `default` where it did not before the last step that begins by then."""
    if not line.lost_seq.size or not seq.size:
        return default
    width = line.start.size + 1
    keys = np.sort(line.lost_seq * width + line.lost_step)
    at = np.searchsorted(keys, seq * width + step, side="right")
    found = keys[np.minimum(at, keys.size - 1)]
    lost = found % width
    before = line.end[np.maximum(lost - 1, 0)]
    ours = (at < keys.size) & (found // width == seq) & (line.start[lost] <= default + 1.0)
    return np.where(ours, before, default)


def _served(
    seq: Ints, last: Floats, line: Timeline, sliced: bool
) -> tuple[dict[str, Floats], Floats, Floats, Ints]:
    """What the steps say of each sequence up to `last`: its parts from its first pass to its last one, the
    begin of the one and the end of the other (NaN where no step names it), and the last one's number."""
    names = ("prefill", "decode", "recompute", "stalled", "skipped", "preempted", "between", *QUEUE)
    parts: dict[str, Floats] = {name: np.zeros(seq.size) for name in names}
    first_ns, last_ns = np.full(seq.size, np.nan), np.full(seq.size, np.nan)
    last_step = np.zeros(seq.size, np.int64)
    if not seq.size or not line.seq.size:
        return parts, first_ns, last_ns, last_step
    order = np.argsort(seq, kind="stable")
    place = np.minimum(np.searchsorted(seq[order], line.seq), seq.size - 1)
    owner = order[place]
    ours = (seq[owner] == line.seq) & (line.start[line.step] < last[owner])
    owner, step, tokens, kind = owner[ours], line.step[ours], line.tokens[ours], line.kind[ours]
    if not owner.size:
        return parts, first_ns, last_ns, last_step
    again = np.zeros(owner.size, bool)  # a second piece in the same pass: its time counts once
    again[1:] = (owner[1:] == owner[:-1]) & (step[1:] == step[:-1])

    start, end = line.start[step], np.fmin(line.end[step], last[owner])
    length = np.where(again, 0.0, end - start)
    whole = line.end[step] - line.start[step]
    own = np.where((kind == PREFILL) | (kind == RECOMPUTE), tokens, 0.0)
    others = np.maximum(0.0, line.prefill[step] - own) / np.maximum(line.prefill[step], 1.0)
    stalled = np.where(whole > 0, length / np.maximum(whole, 1.0), 0.0) * line.extra[step] * others
    for name, which in (("prefill", PREFILL), ("decode", DECODE), ("recompute", RECOMPUTE)):
        parts[name] += np.bincount(owner, np.where(kind == which, length - stalled, 0.0), seq.size)
    parts["stalled"] += np.bincount(owner, stalled, seq.size)

    begins = np.append(True, owner[1:] != owner[:-1])
    ends = np.append(begins[1:], True)
    first_ns[owner[begins]], last_ns[owner[ends]] = start[begins], end[ends]
    last_step[owner[ends]] = step[ends]

    gap = np.flatnonzero(~begins[1:] & (step[1:] > step[:-1] + 1))  # rows after which passes left it out
    who, left, back = owner[gap], end[gap], start[gap + 1]
    gone = _lost_at(line, seq[who], step[gap], back) < back
    recomputed = (kind[gap + 1] == RECOMPUTE) & (kind[gap] != RECOMPUTE)
    border = ~gone & sliced
    unseated = border | (~gone & recomputed)
    spans = {name: np.zeros(gap.size) for name in ("stalled", "skipped", "preempted")}
    _wait(spans, line, left, back, ~unseated, seq[who], step[gap])
    spans["preempted"] += np.where(unseated & ~border, back - left, 0.0)
    spans["between"] = np.where(border, back - left, 0.0)
    for i, name in enumerate(QUEUE):
        spent = line.waiting_for(i, back) - line.waiting_for(i, left)
        spans[name] = np.where(border, spent, 0.0)
    for name, values in spans.items():
        parts[name] = parts[name] + np.bincount(who, values, seq.size)
    return parts, first_ns, last_ns, last_step
