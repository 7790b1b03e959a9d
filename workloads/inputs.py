"""What prompts are made of: parts in order, each a few lines of configuration under
`classes.<class>.input`.

- `shared`: the same tokens in every request (a system prompt). A part of the same name is shared between
classes. - `unique`: tokens of one request only; with `repeat`, that share of requests sends an earlier
request's again. - `history`: the earlier turns of a conversation, as one piece of this request. -
`passages`: what a retriever found: distinct documents of a pool, popular ones more often (Zipf-Mandelbrot:
weight (rank + shift)^-zipf). A document has one length and one text in all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workloads.lengths import distribution_at, scaled
from workloads.settings import Settings
from workloads.streams import stream

MOST_DOCUMENTS = 1_000_000  # every request draws from all of them
MOST_ZIPF = 20  # so that no weight underflows
MOST_TURNS = 10_000
KINDS = ("shared", "unique", "history", "passages")


@dataclass(frozen=True, slots=True)
class RawPiece:
    """A piece before scaling: tokens is a real number above 0."""

    segment_id: str
    tokens: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class PartContext:
    """Where a part is drawn: for `indices` of `n` requests, of one class of a named workload."""

    seed: int
    workload: str
    request_class: str
    part: str
    n: int
    indices: np.ndarray

    def uniform(self, *names: str) -> np.ndarray:
        """One share in (0, 1) per request of the class. All n are drawn, so that other class weights leave
        a request's own draws alone."""
        return self.rng(*names).random(self.n)[self.indices]

    def rng(self, *names: str) -> np.random.Generator:
        return stream(self.seed, "input", self.request_class, self.part, *names)

    def id(self, *names: object) -> str:
        return "/".join([self.workload, self.part, *map(str, names)])


def draw_prompts(
    seed: int,
    workload: str,
    request_class: str,
    node: Settings,
    n: int,
    indices: np.ndarray,
    has_part: Callable[[str], np.ndarray] | None = None,
) -> list[list[RawPiece]]:
    """The pieces of the prompts of the requests `indices`, in the order of the configuration. has_part says
    for a kind of part which of them have such a part, bool; None: all have all."""
    prompts: list[list[RawPiece]] = [[] for _ in indices]
    for part in node:
        part_node = node.node(part)
        kind = part_node.choice("kind", KINDS)
        context = PartContext(seed, workload, request_class, part, n, indices)
        drawn = _PARTS[kind](context, part_node)
        wanted = [True] * len(indices) if has_part is None else has_part(kind)
        for prompt, pieces, wants in zip(prompts, drawn, wanted, strict=True):
            prompt.extend(pieces if wants else [])
    return prompts


def scale_pieces(pieces: list[RawPiece], length_scale: float) -> list[tuple[str, int, bool]]:
    """(segment_id, whole tokens, kept whole) of each piece, at least 1 token."""
    tokens = scaled(np.array([p.tokens for p in pieces]), length_scale)
    return [(p.segment_id, int(n), p.whole) for p, n in zip(pieces, tokens, strict=True)]


def _shared(context: PartContext, node: Settings) -> list[list[RawPiece]]:
    node.only("kind", "tokens")
    tokens = node.number("tokens", above=0)
    return [[RawPiece(context.id(), tokens, whole=True)] for _ in context.indices]


def _unique(context: PartContext, node: Settings) -> list[list[RawPiece]]:
    node.only("kind", "length", "repeat")
    lengths = distribution_at(node, "length")(context.uniform("length"))
    again = context.uniform("repeat") < (node.share("repeat") if "repeat" in node else 0.0)
    earlier = context.uniform("earlier")
    source = np.arange(len(lengths))
    for i in range(1, len(source)):
        if again[i]:
            source[i] = source[int(earlier[i] * i)]
    return [[RawPiece(context.id(int(context.indices[j])), float(lengths[j]))] for j in source]


def _history(context: PartContext, node: Settings) -> list[list[RawPiece]]:
    node.only("kind", "turns", "message", "answer")
    turns = distribution_at(node, "turns")(context.uniform("turns"))
    message, answer = (distribution_at(node, key) for key in ("message", "answer"))
    if turns.size and turns.max() > MOST_TURNS:
        raise node.error("turns", f"makes {turns.max():.3g} turns, needs {MOST_TURNS} at most")
    counts = turns.astype(int)
    u = context.rng("lengths").random((int(counts.sum()), 2))
    pairs = np.append(message(u[:, 0]) + answer(u[:, 1]), 0.0).cumsum()
    ends = counts.cumsum() - 1
    totals = np.diff(np.where(ends < 0, 0.0, pairs[ends]), prepend=0.0)
    return [
        [RawPiece(context.id(int(i)), float(tokens))] if count else []
        for i, count, tokens in zip(context.indices, counts, totals, strict=True)
    ]


def _passages(context: PartContext, node: Settings) -> list[list[RawPiece]]:
    node.only("kind", "count", "pool", "zipf", "zipf_shift", "length")
    pool = node.whole("pool", most=MOST_DOCUMENTS)
    ranks = np.arange(1, pool + 1, dtype=float)
    zipf = node.number("zipf", least=0)
    if zipf > MOST_ZIPF:
        raise node.error("zipf", f"needs {MOST_ZIPF} at most; beyond it one document takes all")
    popularity = (ranks + node.number("zipf_shift", least=0)) ** -zipf
    popularity /= popularity.sum()
    lengths = distribution_at(node, "length")(context.rng("pool").random(pool))
    wanted = distribution_at(node, "count")(context.uniform("count"))
    if wanted.size and wanted.max() > pool:
        raise node.error("pool", f"needs at least as many documents as a request takes ({wanted.max():g})")
    counts = wanted.astype(int)
    rng = context.rng("choice")
    prompts = []
    for count in counts:
        # The first `count` to ring of exponential clocks with these rates: a weighted draw without
        # replacement that takes as many random numbers whatever the count is.
        rings = rng.standard_exponential(pool) / popularity
        first = np.argpartition(rings, count - 1)[:count] if count else np.empty(0, dtype=int)
        found = first[np.argsort(rings[first])]
        prompts.append([RawPiece(context.id(int(d)), float(lengths[d])) for d in found])
    return prompts


_PARTS: dict[str, Callable[[PartContext, Settings], list[list[RawPiece]]]] = {
    "shared": _shared,
    "unique": _unique,
    "history": _history,
    "passages": _passages,
}
