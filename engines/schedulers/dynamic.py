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

from engines.schedulers.static import StaticScheduler
from engines.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DynamicSettings:
    preferred_batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.preferred_batch_sizes):
            raise ValueError(f"preferred_batch_sizes={list(self.preferred_batch_sizes)}: needs sizes above 0")


class DynamicScheduler(StaticScheduler):
    whole_prompts = True
    Settings = DynamicSettings

    def _next_batch(self) -> list[Sequence]:
        batch = super()._next_batch()
        preferred = [size for size in self.settings.preferred_batch_sizes if size <= len(batch)]
        return batch[: max(preferred)] if preferred else batch

    def _is_full(self, batch: list[Sequence]) -> bool:
        return len(batch) in self.settings.preferred_batch_sizes or super()._is_full(batch)
