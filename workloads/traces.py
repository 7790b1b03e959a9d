"""`kind: trace`: replay a recorded trace, with its own timestamps or stretched to a rate.

Traces record how long answers were, not what clients had declared: `workload.max_tokens` says what they
declare here. Rows without block ids get prompts of their own; equal Mooncake block ids become equal tokens.
"""

from __future__ import annotations

import math

import numpy as np

from workloads.assembly import COMMON_KEYS, Draft, Piece, assemble, class_cap, read_common
from workloads.lengths import scaled
from workloads.rates import RateProfile
from workloads.schedule import Schedule, planned_rate
from workloads.settings import Settings
from workloads.tracefile import BLOCK_TOKENS, FORMATS, TraceRow, read_trace

TRACE_KEYS = ("path", "format", "speed", "limit", "on_bad_row")


def draw_trace(
    node: Settings, *, seed: int, requests: int | None = None, duration_s: float | None = None
) -> Schedule:
    """The schedule of a trace; see `workloads.presets.draw`. Times count from the first row."""
    node.only(*COMMON_KEYS, *TRACE_KEYS)
    common = read_common(node)
    speed = node.number("speed", above=0)
    if node.get("path") is None:
        raise node.error("path", "workload=trace needs a file, Azure CSV or Mooncake JSONL")
    trace = read_trace(
        node.text("path"),
        format=node.choice("format", FORMATS),
        limit=node.optional_whole("limit"),
        on_bad_row=node.choice("on_bad_row", ("error", "skip")),
    )
    times = np.array([row.time_ns - trace.rows[0].time_ns for row in trace.rows], dtype=float) / 1e9
    if isinstance(common.rate, RateProfile):
        raise node.error("rate", "a trace brings its own times; give a number, or null and workload.speed")
    if common.rate is not None:
        if speed != 1:
            raise node.error("rate", f"workload.speed={speed:g} is set as well; set one of them")
        recorded = planned_rate(times)
        if recorded is None:
            raise node.error("rate", "the rows of this trace have one time, which cannot be stretched")
        speed = common.rate / recorded
    times = times / speed
    if duration_s is not None:
        times = times[times <= duration_s]
    count = requests if requests is not None else common.requests
    if count is not None:
        times = times[:count]

    rows = trace.rows[: len(times)]
    outputs = scaled(np.array([row.output_tokens for row in rows]), common.length_scale)
    drafts = [
        Draft(float(t), common.name, _pieces(row, i, common.name, common.length_scale), int(n))
        for i, (t, row, n) in enumerate(zip(times, rows, outputs, strict=True))
    ]
    return assemble(
        drafts,
        common,
        seed=seed,
        planned_rate=planned_rate(times),
        class_caps={common.name: class_cap(math.ceil(np.percentile(outputs, 99)))},
        cut_from_end=True,
        skipped_rows=trace.skipped,
        notes=trace.notes,
    )


def _pieces(row: TraceRow, index: int, name: str, length_scale: float) -> tuple[Piece, ...]:
    if row.hash_ids is None:
        return (Piece(f"{name}/row/{index}", int(scaled(row.input_tokens, length_scale))),)
    # Every full block has one length, so that what was shared block by block stays so.
    block = int(scaled(BLOCK_TOKENS, length_scale))
    last = min(block, int(scaled(row.input_tokens - BLOCK_TOKENS * (len(row.hash_ids) - 1), length_scale)))
    lengths = [block] * (len(row.hash_ids) - 1) + [last]
    return tuple(Piece(f"{name}/block/{i}", n) for i, n in zip(row.hash_ids, lengths, strict=True))
