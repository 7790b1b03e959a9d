"""The prompts of a recorded trace as segments: what the trace says that they have in common becomes equal
tokens.

    blocks          one segment a block, by its id
    parts           one segment a part, by its kind and id (RAGPulse)
    reused_tokens   that many tokens of the prompt before in the same session, then new ones
    none of these   one segment of the row's own
"""

from __future__ import annotations

import numpy as np

from workloads.columns import Segments
from workloads.lengths import scaled
from workloads.sessions import Writer
from workloads.trace import Trace

CACHE_BLOCK = 128
"""Recorded hits end at whole blocks of a cache, of up to so many tokens: a prompt that repeats all but such a
rest of the one before goes on from it."""


def segments(trace: Trace, name: str, length_scale: float) -> Segments:
    """The prompts of all rows, in their order; names begin with `name`/."""
    if trace.parts is not None:
        parts = trace.parts
        some = parts.tokens > 0
        start = np.concatenate([[0], np.cumsum(some)])[parts.start]
        return Segments(
            start,
            parts.code[some],
            parts.number[some],
            scaled(parts.tokens[some], length_scale),
            tuple(f"{name}/{part}" for part in parts.names),
        )
    if trace.blocks is not None:
        return _of_blocks(trace, name, length_scale)
    if trace.reused_tokens is not None:
        return _grown(trace, name, length_scale)
    n = len(trace)
    lengths = scaled(trace.input_tokens, length_scale)
    return Segments(np.arange(n + 1), np.zeros(n, dtype=np.int64), np.arange(n), lengths, (f"{name}/row",))


def _of_blocks(trace: Trace, name: str, length_scale: float) -> Segments:
    assert trace.blocks is not None
    blocks, prompts, names = trace.blocks, trace.input_tokens, (f"{name}/row", f"{name}/block")
    counts = np.diff(blocks.start)
    # Every full block has one length, so that what was shared block by block stays so.
    block = int(scaled(blocks.tokens, length_scale))
    tokens = np.full(len(blocks.ids), block)
    some = counts > 0
    last = scaled(prompts - blocks.tokens * (counts - 1), length_scale)
    tokens[blocks.start[1:][some] - 1] = np.minimum(block, last[some])
    if some.all():
        return Segments(blocks.start, np.ones_like(blocks.ids), blocks.ids, tokens, names)
    # A row without blocks among rows with: one segment of its own.
    start = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))]).astype(np.int64)
    code, number, lengths = (np.zeros(start[-1], dtype=np.int64) for _ in range(3))
    bare = start[:-1][~some]
    number[bare], lengths[bare] = np.flatnonzero(~some), scaled(prompts[~some], length_scale)
    full = np.ones(start[-1], dtype=bool)
    full[bare] = False
    code[full], number[full], lengths[full] = 1, blocks.ids, tokens
    return Segments(start, code, number, lengths, names)


def _grown(trace: Trace, name: str, length_scale: float) -> Segments:
    """A session's own segments grow as its prompts do. What a session's first request, or one outside of
    sessions, found in a cache is one beginning that all such share."""
    assert trace.reused_tokens is not None
    out = Writer()
    before: dict[int, list[list[int]]] = {}  # of each session, the last prompt: [code, number, tokens]
    fresh = 0  # number of the next new segment
    sessions = [-1] * len(trace) if trace.session is None else trace.session.codes.tolist()
    for session, prompt, reused in zip(
        sessions,
        trace.input_tokens.tolist(),
        np.minimum(trace.reused_tokens, trace.input_tokens).tolist(),
        strict=True,
    ):
        pieces = before.get(session)
        held = sum(piece[2] for piece in pieces or ())
        if pieces is None:
            pieces, held = ([[0, -1, reused]], reused) if reused else ([], 0)
        elif held - reused < CACHE_BLOCK and prompt > held and pieces[-1][0] == 1:
            pieces = [*pieces[:-1], [1, pieces[-1][1], pieces[-1][2] + prompt - held]]
            held = prompt
        else:
            pieces, held = _first(pieces, reused), min(held, reused)
        if prompt > held:
            pieces = [*pieces, [1, fresh, prompt - held]]
            fresh += 1
        out.add(pieces)
        if session >= 0:
            before[session] = pieces
    made = out.segments((f"{name}/shared", f"{name}/own"))
    return Segments(made.start, made.code, made.number, scaled(made.tokens, length_scale), made.names)


def _first(pieces: list[list[int]], tokens: int) -> list[list[int]]:
    """The first `tokens` of a prompt."""
    kept = []
    for code, number, length in pieces:
        if tokens <= 0:
            break
        kept.append([code, number, min(length, tokens)])
        tokens -= length
    return kept
