"""Stalls of a run, and whose prompts were computed while a user waited in the middle of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.dashboard.shown import Shown
from harness.metrics.latency import gap_table

MOST_STALLS = 1000
"""A run's longest ones: only for these the culprits are looked up."""
MOST_CULPRITS = 4


@dataclass(frozen=True)
class Stall:
    """A gap at the client over the run's threshold. culprits: (request id, class, prompt tokens) of those
    whose prompts the passes in it computed, the longest first; all_tokens: of all of them."""

    row: int  # position in requests
    chunk: int  # the one that came late, from 1
    at_s: float  # when the gap began
    gap_ms: float
    passes: tuple[int, int] | None  # positions in Shown.steps, both included; None: none lay in it
    culprits: tuple[tuple[str, str, int], ...]
    all_tokens: int

    @property
    def cause(self) -> str:
        """The class of the longest of those prompts."""
        return self.culprits[0][1] or "(no class)" if self.culprits else "no prompt in it"


def find_stalls(run: Shown) -> tuple[list[Stall], int]:
    """(the longest, longest first; how many there are in all)."""
    story, requests = run.story, run.run.requests
    limit = run.summary.get("stalls", {}).get("threshold_ms") or story.threshold_ms
    gaps = gap_table(requests)
    if limit is None or gaps.empty:
        return [], 0
    over = gaps[gaps["gap_ms"] > limit].sort_values("gap_ms", ascending=False, kind="stable")
    engine = run.run.engine.dropna(subset=["seq_id"])
    seq_of = dict(zip(engine["id"], engine["seq_id"].astype(np.int64), strict=True))
    who = {
        int(seq): (str(name), str(kind))
        for seq, name, kind in zip(engine["seq_id"], engine["id"], engine["request_class"], strict=True)
    }
    found = []
    for row, k, gap in over[["row", "k", "gap_ms"]].head(MOST_STALLS).itertuples(index=False):
        stamps = requests["chunk_ns"].iloc[int(row)]
        before, after = float(stamps[int(k) - 1]), float(stamps[int(k)])
        span, prompts = _passes_in(run, seq_of.get(requests["id"].iloc[int(row)]), before, after)
        longest = sorted(prompts.items(), key=lambda item: -item[1])
        culprits = tuple((*who.get(s, (f"sequence {s}", "")), n) for s, n in longest[:MOST_CULPRITS])
        found.append(
            Stall(int(row), int(k) + 1, before * 1e-9, float(gap), span, culprits, sum(prompts.values()))
        )
    return found, len(over)


def _passes_in(
    run: Shown, seq: int | None, before: float, after: float
) -> tuple[tuple[int, int] | None, dict[int, int]]:
    """The passes between its own last ones before the two stamps, and the prompts of others in them."""
    line = run.story.line
    own = line.step[line.rows_of(seq)] if seq is not None else np.empty(0, np.int64)
    if seq is None or not own.size:
        return None, {}
    passed = np.searchsorted(line.end[own], [before, after], side="right") - 1
    first, last = int(own[max(0, passed[0])]) + 1, int(own[max(0, passed[1])])
    if last < first:
        return None, {}
    prompts, _ = run.story.others(first, last, seq)
    return (first, last), prompts
