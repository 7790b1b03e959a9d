"""What KV a sequence holds beyond what it has computed: an axis of its own, apart from when it may enter.

The names of the literature: Orca reserves the maximum ("Orca (Max)" of the vLLM paper), Orca's own scheduler
and TensorRT-LLM's GUARANTEED_NO_EVICT prompt plus limit, Sarathi-Serve the whole prompt, vLLM the next tokens
only. With the first two, KV cannot run out under a running sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Reservation:
    name: str
    ahead: Callable[[Sequence], int]

    def tokens(self, seq: Sequence, computed: int) -> int:
        """Tokens that the block table must have room for, once `computed` tokens of the sequence are."""
        return max(computed, self.ahead(seq))

    def most(self, seq: Sequence) -> int:
        """The most it will ever hold. If the pool has less, the sequence can never run."""
        return self.tokens(seq, seq.prompt_len + seq.max_tokens)


def build(config: EngineConfig) -> Reservation:
    ahead: dict[str, Callable[[Sequence], int]] = {
        "on_demand": lambda seq: 0,
        "prompt": lambda seq: seq.num_tokens,  # of a preempted sequence: its answer so far as well
        "prompt_plus_max_tokens": lambda seq: seq.prompt_len + seq.max_tokens,
        "max_model_len": lambda seq: config.max_model_len,
    }
    return Reservation(config.reservation, ahead[config.reservation])
