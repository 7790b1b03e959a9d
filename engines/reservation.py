"""What KV a sequence holds beyond what it has computed: an axis of its own, apart from when it may enter.

The names of the literature: Orca reserves the maximum ("Orca (Max)" of the vLLM paper), Orca's own scheduler
and TensorRT-LLM's GUARANTEED_NO_EVICT prompt plus limit, Sarathi-Serve the whole prompt, vLLM the next tokens
only. With the first two, KV cannot run out under a running sequence. `predicted_peak` holds no more than the
next tokens, but lets nobody in whose future would not fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.kv_pool import BlockPool
from engines.sequence import Sequence


class Reservation:
    """`ahead` says for how many tokens a sequence holds KV, whatever it has computed."""

    def __init__(self, name: str, ahead: Callable[[Sequence], int]) -> None:
        self.name = name
        self._ahead = ahead

    def tokens(self, seq: Sequence, computed: int) -> int:
        """Tokens that the block table must have room for, once `computed` tokens of the sequence are."""
        return max(computed, self._ahead(seq))

    def most(self, seq: Sequence) -> int:
        """The most it will ever hold. If the pool has less, the sequence can never run."""
        return self.tokens(seq, seq.prompt_len + seq.max_tokens)

    def admits(self, seq: Sequence, running: Iterable[Sequence], pool: BlockPool) -> bool:
        """Whether `seq` may join the running ones, as far as their future is concerned."""
        return True

    def ended(self, seq: Sequence) -> None:
        """An answer has ended by itself."""


class PredictedPeak(Reservation):
    """lightllm (Past-Future scheduler, arXiv 2507.10150): admit while the predicted peak of memory fits.

        left_i  how many tokens i will still produce: answers that ended lately and were longer than what i
                has produced already say how long; their `quantile` is taken; its own limit while unknown
        sort by left, longest first: when i ends, i + 1 sequences are still there, each left_i tokens longer
        peak = max over i of  left_i * (i + 1) + sum of what the first i + 1 have now

    A wrong prediction costs a preemption. The paper draws the lengths at random, here they are a quantile:
    the same requests give the same batches. lightllm's own router guesses left_i without a history, as a
    share of what i has produced. What i has is counted in whole blocks."""

    WINDOW = 1000
    QUANTILE = 0.9
    LEAST = 16  # fewer ended answers say nothing

    def __init__(self) -> None:
        super().__init__("predicted_peak", lambda seq: 0)
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def ended(self, seq: Sequence) -> None:
        length = seq.num_tokens - seq.prompt_len
        self._latest.append(length)
        insort(self._sorted, length)
        if len(self._latest) > self.WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def left(self, produced: NDArray[np.int64], limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that sequences are expected to produce yet, at least 1 each."""
        lengths = limits
        known = np.array(self._sorted, dtype=np.int64)
        if len(known) >= self.LEAST:
            first = np.searchsorted(known, produced, side="right")
            longer = len(known) - first
            pick = np.minimum(first + (self.QUANTILE * (longer - 1)).astype(np.int64), len(known) - 1)
            lengths = np.where(longer > 0, np.minimum(limits, known[pick]), limits)
        return np.maximum(1, lengths - produced)

    def admits(self, seq: Sequence, running: Iterable[Sequence], pool: BlockPool) -> bool:
        everyone = [*running, seq]
        if len(everyone) == 1:
            return True
        tokens = np.array([s.num_tokens for s in everyone])
        left = self.left(
            tokens - np.array([s.prompt_len for s in everyone]), np.array([s.max_tokens for s in everyone])
        )
        order = np.argsort(-left)
        have = np.cumsum(-(-tokens[order] // pool.block_size)) * pool.block_size
        peak = left[order] * np.arange(1, len(everyone) + 1) + have
        return int(peak.max()) <= pool.usable * pool.block_size


def build(config: EngineConfig) -> Reservation:
    if config.reservation == "predicted_peak":
        return PredictedPeak()
    ahead: dict[str, Callable[[Sequence], int]] = {
        "on_demand": lambda seq: 0,
        "prompt": lambda seq: seq.num_tokens,  # of a preempted sequence: its answer so far as well
        "prompt_plus_max_tokens": lambda seq: seq.prompt_len + seq.max_tokens,
        "max_model_len": lambda seq: config.max_model_len,
    }
    return Reservation(config.reservation, ahead[config.reservation])
