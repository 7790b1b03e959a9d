"""The five ratios on which the shape of a batching result depends. A shrunk experiment prints them, so that a
reader can tell what was kept and what was not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engines.config import EngineConfig
from harness.experiments.simulation import Cost
from workloads.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Ratios:
    prefill_to_decode: float  # time of a mean request's prompt over that of its answer, alone
    pool_to_request: float  # KV pool over what a mean request holds when it ends
    seats_to_ridge: (
        float  # max_num_seqs over the batch at which a decode step takes twice as long as for none
    )
    answer_cv: float  # standard deviation of the answers' lengths over their mean
    answer_cap_to_mean: float
    load_to_capacity: float | None  # asked for over the best that was reached; None: all at once

    def text(self) -> str:
        load = "all at once" if self.load_to_capacity is None else f"{self.load_to_capacity:.2f}"
        return "\n".join(
            (
                f"prefill / decode time of a mean request   {self.prefill_to_decode:.3f}",
                f"KV pool / KV of a finished mean request   {self.pool_to_request:.1f}",
                f"seats / ridge batch                       {self.seats_to_ridge:.2f}",
                f"answer lengths: CV, declared / mean       "
                f"{self.answer_cv:.2f}, {self.answer_cap_to_mean:.1f}",
                f"load / capacity                           {load}",
            )
        )


def ratios(
    schedule: Iterable[ScheduledRequest], config: EngineConfig, cost: Cost, capacity: float | None = None
) -> Ratios:
    """capacity: output tokens/s."""
    rows = list(schedule)
    prompts, answers = (
        np.array([getattr(r, name) for r in rows]) for name in ("prompt_tokens", "stop_after")
    )
    prompt, answer = float(prompts.mean()), float(answers.mean())
    span = max(r.arrival_s for r in rows)
    blocks = (config.num_kv_blocks or 0) - 1
    return Ratios(
        prefill_to_decode=cost(1, round(prompt)) / (cost(1, 1) * answer),
        pool_to_request=blocks / -(-(prompt + answer) // config.block_size),
        seats_to_ridge=config.max_num_seqs / (cost.step / cost.row),
        answer_cv=float(answers.std()) / answer,
        answer_cap_to_mean=float(np.mean([r.max_tokens for r in rows])) / answer,
        load_to_capacity=float(answers.sum()) / span / capacity if span and capacity else None,
    )
