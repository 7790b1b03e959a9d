"""What prompts are made of: parts in order, each a few lines of configuration under
`classes.<class>.input`.

- `shared`: the same tokens in every request (a system prompt). A part of the same name is shared between
  classes.
- `unique`: tokens of one request only; with `repeat`, that share of requests sends an earlier request's
  again.
- `history`: the earlier turns of a conversation, as one piece of this request.
- `passages`: what a retriever found: distinct documents of a pool, popular ones more often
  (Zipf-Mandelbrot: weight (rank + shift)^-zipf). A document has one length and one text in all requests,
  also of other classes whose part has the same name.
- `editing`: a file that one of `users` is writing: the share `keep` of it is as in that user's request
  before, the rest is new; after `edits` requests the user opens another file.
- `continued`: a prompt that goes on from, or begins like, an earlier one (`workloads.continued`).

`in_turns: first | later` limits a part to the first turn of a session, or to those after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from workloads import exact
from workloads.continued import draw_lengths, read_continued, resume
from workloads.lengths import distribution_at
from workloads.settings import Settings
from workloads.streams import stream

MOST_DOCUMENTS = 1_000_000
MOST_ZIPF = 20  # so that no weight underflows
MOST_TURNS = 10_000
MOST_PASSAGES = 1_000  # of one request
KINDS = ("shared", "unique", "history", "passages", "editing", "continued")
IN_TURNS = ("all", "first", "later")
_SPARE_DRAWS = 12  # of passages, for those that were drawn already
_FILES_OF_A_USER = 1_000_000


@dataclass(frozen=True, slots=True)
class Pieces:
    """One part of the prompts of some requests, before scaling; arrays of one length, ordered by row."""

    part: str  # its segments are called <workload>/<part>, or <workload>/<part>/<number>
    row: np.ndarray  # int64, which of the requests
    number: np.ndarray  # int64, -1: none
    tokens: np.ndarray  # float64, above 0
    whole: bool = False  # never shortened to make a prompt fit
    kind: str = ""

    def only(self, keep: np.ndarray) -> Pieces:
        """Those of the requests where keep is true. keep: bool, one per request."""
        kept = keep[self.row]
        return Pieces(self.part, self.row[kept], self.number[kept], self.tokens[kept], self.whole, self.kind)


@dataclass(frozen=True, slots=True)
class PartContext:
    """Where a part is drawn: for `indices` of `n` requests, of one class of a workload."""

    seed: int
    request_class: str
    part: str
    n: int
    indices: np.ndarray
    session: np.ndarray | None = None  # int, of all n; None where there are no sessions

    def uniform(self, *names: str) -> np.ndarray:
        """One share in (0, 1) per request of the class. All n are drawn, so that other class weights leave
        a request's own draws alone."""
        return self.rng(*names).random(self.n)[self.indices]

    def rng(self, *names: str) -> np.random.Generator:
        return stream(self.seed, "input", self.request_class, self.part, *names)

    def one_each(self, number: np.ndarray | None, tokens: np.ndarray, whole: bool = False) -> Pieces:
        """A piece for every request."""
        rows = np.arange(len(self.indices))
        numbers = np.full(len(rows), -1) if number is None else number
        return Pieces(self.part, rows, numbers, np.broadcast_to(tokens, rows.shape), whole)


def draw_parts(
    seed: int,
    request_class: str,
    node: Settings,
    n: int,
    indices: np.ndarray,
    has_part: Callable[[str, str], np.ndarray] | None = None,
    session: np.ndarray | None = None,
) -> list[Pieces]:
    """The parts of the prompts of the requests `indices`, in the order of the configuration. has_part says
    for a kind of part and its `in_turns` which of them have it, bool; None: all have all."""
    drawn = []
    for part in node:
        part_node = node.node(part)
        kind = part_node.choice("kind", KINDS)
        turns = part_node.choice("in_turns", IN_TURNS) if "in_turns" in part_node else "all"
        pieces = _PARTS[kind](PartContext(seed, request_class, part, n, indices, session), part_node)
        if has_part is not None:
            pieces = pieces.only(has_part(kind, turns))
        drawn.append(Pieces(part, pieces.row, pieces.number, pieces.tokens, pieces.whole, kind))
    return drawn


def cache_friendly(parts: list[Pieces]) -> list[Pieces]:
    """The parts in the order that lets prefix caches reuse most: what all share, what many share (documents,
    the most popular first), then what is one request's own."""
    order = {"shared": 0, "passages": 1}
    ranked = sorted(parts, key=lambda pieces: order.get(pieces.kind, 2))
    return [
        replace(p, number=p.number[i], tokens=p.tokens[i])
        for p in ranked
        for i in [np.lexsort((p.number, p.row)) if p.kind == "passages" else slice(None)]
    ]


def _shared(context: PartContext, node: Settings) -> Pieces:
    node.only("kind", "tokens", "in_turns")
    return context.one_each(None, np.array(node.number("tokens", above=0)), whole=True)


def _unique(context: PartContext, node: Settings) -> Pieces:
    node.only("kind", "length", "repeat", "in_turns")
    lengths = distribution_at(node, "length")(context.uniform("length"))
    source = np.arange(len(lengths))
    share = node.share("repeat") if "repeat" in node else 0.0
    if share:
        again = context.uniform("repeat") < share
        earlier = (context.uniform("earlier") * source).astype(np.int64)
        for i in np.flatnonzero(again[1:]) + 1:
            source[i] = source[earlier[i]]
    return context.one_each(context.indices[source], lengths[source])


def _history(context: PartContext, node: Settings) -> Pieces:
    node.only("kind", "turns", "message", "answer", "in_turns")
    turns = distribution_at(node, "turns")(context.uniform("turns"))
    message, answer = (distribution_at(node, key) for key in ("message", "answer"))
    if turns.size and turns.max() > MOST_TURNS:
        raise node.error("turns", f"makes {turns.max():.3g} turns, needs {MOST_TURNS} at most")
    counts = turns.astype(np.int64)
    u = context.rng("lengths").random((int(counts.sum()), 2))
    pairs = np.concatenate([[0.0], np.cumsum(np.rint(message(u[:, 0]) + answer(u[:, 1])))])
    ends = counts.cumsum()
    some = np.flatnonzero(counts)
    return Pieces(context.part, some, context.indices[some], (pairs[ends] - pairs[ends - counts])[some])


def _passages(context: PartContext, node: Settings) -> Pieces:
    node.only("kind", "count", "pool", "zipf", "zipf_shift", "length", "in_turns")
    pool = node.whole("pool", most=MOST_DOCUMENTS)
    zipf = node.number("zipf", least=0)
    if zipf > MOST_ZIPF:
        raise node.error("zipf", f"needs {MOST_ZIPF} at most; beyond it one document takes all")
    shift = node.number("zipf_shift", least=0)
    # Ranks are scaled to 1 at the first, so that no weight over- or underflows.
    weights = exact.power((1.0 + shift) / (np.arange(1, pool + 1) + shift), zipf) if zipf else np.ones(pool)
    lengths = distribution_at(node, "length")(stream(context.seed, "documents", context.part).random(pool))
    wanted = distribution_at(node, "count")(context.uniform("count"))
    if wanted.size and wanted.max() > pool:
        raise node.error("pool", f"needs at least as many documents as a request takes ({wanted.max():g})")
    if wanted.size and wanted.max() > MOST_PASSAGES:
        raise node.error("count", f"makes {wanted.max():.3g} passages, needs {MOST_PASSAGES} at most")
    counts = wanted.astype(np.int64)
    chosen = _distinct(context.rng("choice"), context.n, context.indices, counts, weights)
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    documents = chosen[row, column]
    return Pieces(context.part, row, documents, lengths[documents])


def _distinct(
    rng: np.random.Generator, n: int, indices: np.ndarray, counts: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """For each request counts[i] different documents, drawn one after the other by weight among those that
    are left: [len(counts), max count], -1 behind them. Draws that meet a document again are passed over,
    which comes to the same; whoever runs out of draws takes the heaviest that are left. Every request has as
    many random numbers as the others."""
    most = int(counts.max(initial=0))
    edges = np.cumsum(weights)
    edges /= edges[-1]
    draws = most + _SPARE_DRAWS
    chosen = np.full((len(counts), most), -1, dtype=np.int64)
    if most == 0:
        return chosen
    filled = np.zeros(len(counts), dtype=np.int64)
    block = max(1, (1 << 22) // draws)
    taken = 0
    for begin in range(0, n, block):
        u = rng.random((min(block, n - begin), draws))
        mine = slice(taken, int(np.searchsorted(indices, begin + len(u))))
        taken = mine.stop
        found = np.minimum(np.searchsorted(edges, u[indices[mine] - begin], side="right"), len(weights) - 1)
        here, full = chosen[mine], filled[mine]
        for draw in range(draws):
            open_ = np.flatnonzero(full < counts[mine])
            if not len(open_):
                break
            candidate = found[open_, draw]
            new = (here[open_] != candidate[:, None]).all(axis=1)
            here[open_[new], full[open_[new]]] = candidate[new]
            full[open_[new]] += 1
    for i in np.flatnonzero(filled < counts):
        left = np.setdiff1d(np.arange(len(weights)), chosen[i, : filled[i]])  # ranks, the heaviest first
        chosen[i, filled[i] : counts[i]] = left[: counts[i] - filled[i]]
    return chosen


def _editing(context: PartContext, node: Settings) -> Pieces:
    node.only("kind", "users", "edits", "keep", "length", "in_turns")
    users, edits = node.whole("users", most=_FILES_OF_A_USER), node.whole("edits", most=_FILES_OF_A_USER)
    keep = node.share("keep")
    user = (context.uniform("user") * users).astype(np.int64)
    order = np.argsort(user, kind="stable")
    before = np.arange(len(user)) - np.searchsorted(user[order], user[order])
    nth = np.empty(len(user), dtype=np.int64)
    nth[order] = before  # how many requests this user has sent before
    file = user * _FILES_OF_A_USER + nth // edits
    # A file's length is one draw, named by its first request: a user's prompts are as long as each other.
    first = np.empty(len(user), dtype=np.int64)
    opened = before % edits == 0
    first[order] = order[np.maximum.accumulate(np.where(opened, np.arange(len(user)), 0))]
    length = distribution_at(node, "length")(context.uniform("length"))[first]
    kept = np.maximum(1.0, np.rint(length * keep))
    rest = np.maximum(length - kept, 0.0)
    rows = np.repeat(np.arange(len(user)), 2)
    number = np.stack([file, users * _FILES_OF_A_USER + context.indices], axis=1).ravel()
    tokens = np.stack([kept, rest], axis=1).ravel()
    some = tokens > 0
    return Pieces(context.part, rows[some], number[some], tokens[some])


def _continued(context: PartContext, node: Settings) -> Pieces:
    part = read_continued(node)
    session = None if context.session is None else context.session[context.indices]
    of_session = np.zeros(len(context.indices))
    if session is not None and len(session):
        of_session = context.rng("session").random(int(session.max()) + 1)[session]
    tokens = np.maximum(1, draw_lengths(part, context.uniform("length"), of_session, session))
    share = np.clip(part.reused.draw(context.uniform("reused"), tokens), 0.0, 1.0)
    ago = np.maximum(1, np.rint(part.lag(context.uniform("lag"))))
    row, owner, counts = resume(tokens, np.rint(share * tokens), ago)
    return Pieces(context.part, row, context.indices[owner], counts)


_PARTS: dict[str, Callable[[PartContext, Settings], Pieces]] = {
    "shared": _shared,
    "unique": _unique,
    "history": _history,
    "passages": _passages,
    "editing": _editing,
    "continued": _continued,
}
