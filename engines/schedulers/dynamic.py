"""Dynamic batching over whole generations (Triton Inference Server's dynamic batcher).

    when the batch has ended:
    1. n = the largest preferred batch size that the queue can fill, else all that fit a batch
    2. start if n is preferred or the most that a batch takes
    3. otherwise wait until the oldest has waited max_queue_delay_ms, then start with what there is;
       an arrival that completes a preferred or a full batch starts it at once

It is static batching with a rule for when to stop waiting for company: nobody joins a batch that runs.
Triton's priority levels are queue=priority, its queue policy is queue_timeout_ms and max_waiting_requests."""

from __future__ import annotations

from dataclasses import dataclass

from engines.config import EngineConfig
from engines.schedulers.static import StaticScheduler
from engines.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DynamicSettings:
    preferred_batch_sizes: tuple[int, ...] | None = ()  # None: a quarter and a half of the seats

    def __post_init__(self) -> None:
        sizes = self.preferred_batch_sizes or ()
        if any(size < 1 for size in sizes):
            raise ValueError(f"preferred_batch_sizes={list(sizes)}: needs sizes above 0")

    def check(self, config: EngineConfig) -> None:
        """As Triton does when it loads a model: no preferred size is larger than a batch can be."""
        sizes = self.preferred_batch_sizes or ()
        if any(size > config.max_num_seqs for size in sizes):
            raise ValueError(
                f"preferred_batch_sizes={list(sizes)}: no batch has more than engine.max_num_seqs="
                f"{config.max_num_seqs}; needs sizes of at most that, or null (a quarter and a half of it)"
            )


class DynamicScheduler(StaticScheduler):
    whole_prompts = True
    Settings = DynamicSettings

    @property
    def preferred(self) -> tuple[int, ...]:
        sizes: tuple[int, ...] | None = self.settings.preferred_batch_sizes
        seats = self.config.max_num_seqs
        return tuple(n for n in (seats // 4, seats // 2) if n > 1) if sizes is None else sizes

    def _next_batch(self) -> list[Sequence]:
        batch = super()._next_batch()
        preferred = [size for size in self.preferred if size <= len(batch)]
        return batch[: max(preferred)] if preferred else batch

    def _is_full(self, batch: list[Sequence]) -> bool:
        return len(batch) in self.preferred or super()._is_full(batch)
