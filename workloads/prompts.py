"""Prompts: token ids for the segments of a request, cut from a text that the project ships.

A request names its prompt as segments, (segment_id, tokens). A segment is a slice of the corpus at an
offset that hashes from (seed, segment_id). So two requests that share a segment share its tokens, in every
process and on every machine, and a schedule needs no room for prompts. The corpus wraps around, so that any
length is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.resources import files

import numpy as np

from workloads.errors import WorkloadError


def load_text() -> str:
    """The text that prompts are cut from: plain English prose, ASCII, written for this project."""
    folder = files("workloads") / "text"
    parts = sorted((item.name, item) for item in folder.iterdir() if item.name.endswith(".txt"))
    return "\n\n".join(item.read_text(encoding="ascii").strip() for _, item in parts) + "\n"


class PromptBook:
    """Token ids by segment. `corpus_tokens` is `load_text()` as flat token ids of the served model."""

    def __init__(self, corpus_tokens: np.ndarray, seed: int) -> None:
        corpus = np.asarray(corpus_tokens)
        if corpus.ndim != 1 or corpus.size == 0 or not np.issubdtype(corpus.dtype, np.integer):
            raise WorkloadError(
                f"corpus_tokens has shape {corpus.shape} and type {corpus.dtype}: "
                "needs a flat, non-empty array of token ids"
            )
        self._corpus = corpus.astype(np.int64)
        self._seed = int(seed)

    def offset(self, segment_id: str) -> int:
        """Where in the corpus a segment begins."""
        digest = hashlib.blake2b(f"{self._seed}\0{segment_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self._corpus.size

    def segment_tokens(self, segment_id: str, tokens: int) -> np.ndarray:
        """The ids of one segment, int64, shape (tokens,). A longer one of the same id begins with it."""
        if tokens < 0:
            raise WorkloadError(f"segment {segment_id}: tokens={tokens}, needs 0 or more")
        start = self.offset(segment_id)
        return np.take(self._corpus, np.arange(start, start + tokens), mode="wrap")

    def tokens(self, segments: Iterable[tuple[str, int]]) -> list[int]:
        """The ids of a whole prompt, as plain ints, as many as its segments say: ready for a request
        body."""
        ids: list[int] = []
        for segment_id, count in segments:
            ids.extend(self.segment_tokens(segment_id, count).tolist())
        return ids
