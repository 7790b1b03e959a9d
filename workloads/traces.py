"""`kind: trace`: replay a recorded trace, with its own timestamps or stretched to a rate.

Traces record how long answers were, not what clients had declared: `workload.max_tokens` says what they
declare here. Rows without block ids get prompts of their own; equal Mooncake block ids become equal tokens.
"""

from __future__ import annotations

import math

import numpy as np

from workloads.assembly import COMMON_KEYS, Common, Drafts, Prompts, assemble, class_cap, read_common
from workloads.columns import Segments, Texts
from workloads.lengths import scaled
from workloads.rates import RateProfile
from workloads.schedule import Schedule, planned_rate
from workloads.settings import Settings
from workloads.tenants import NOBODY
from workloads.trace import Trace
from workloads.tracefile import FORMATS, read_trace

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
    times = trace.times_s()
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

    n = len(times)
    segments = _segments(trace, n, common)
    outputs = scaled(trace.output_tokens[:n], common.length_scale)
    drafts = Drafts(
        arrival_s=times,
        member=np.zeros(n, dtype=np.int64),
        prompts=Prompts(segments, np.zeros(len(segments.code), dtype=bool)),
        answer_tokens=outputs,
        tenant=Texts.all(NOBODY, n),
        priority=np.zeros(n, dtype=np.int64),
        deadline_ms=np.full(n, np.nan),
        session=Texts(np.full(n, -1), ()),
        turn=np.zeros(n, dtype=np.int64),
        think_s=np.full(n, np.nan),
    )
    return assemble(
        drafts,
        common,
        seed=seed,
        planned_rate=planned_rate(times),
        class_names=[common.name],
        class_caps=[class_cap(math.ceil(np.percentile(outputs, 99)))],
        habits=[common.habits],
        cut_from_end=True,
        skipped_rows=trace.skipped,
        notes=trace.notes,
    )


def _segments(trace: Trace, n: int, common: Common) -> Segments:
    """The prompts of the first n rows: their blocks, or one segment of their own where there are none."""
    prompts = trace.input_tokens[:n]
    names = (f"{common.name}/row", f"{common.name}/block")
    if trace.blocks is None:
        own = np.zeros(n, dtype=np.int64)
        return Segments(np.arange(n + 1), own, np.arange(n), scaled(prompts, common.length_scale), names)
    blocks = trace.blocks.take(np.arange(n))
    counts = np.diff(blocks.start)
    # Every full block has one length, so that what was shared block by block stays so.
    block = int(scaled(blocks.tokens, common.length_scale))
    tokens = np.full(len(blocks.ids), block)
    some = counts > 0
    last = scaled(prompts - blocks.tokens * (counts - 1), common.length_scale)
    tokens[blocks.start[1:][some] - 1] = np.minimum(block, last[some])
    if some.all():
        return Segments(blocks.start, np.ones_like(blocks.ids), blocks.ids, tokens, names)
    # A row without blocks among rows with: one segment of its own.
    start = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))]).astype(np.int64)
    code, number, lengths = (np.zeros(start[-1], dtype=np.int64) for _ in range(3))
    bare = start[:-1][~some]
    number[bare], lengths[bare] = np.flatnonzero(~some), scaled(prompts[~some], common.length_scale)
    full = np.ones(start[-1], dtype=bool)
    full[bare] = False
    code[full], number[full], lengths[full] = 1, blocks.ids, tokens
    return Segments(start, code, number, lengths, names)
