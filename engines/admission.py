"""What the engine will not take: requests that could never run, and more of them waiting than allowed."""

from __future__ import annotations

from engines.config import EngineConfig
from engines.request import Refused, Request
from engines.schedulers import Scheduler
from engines.sequence import Sequence


def refusal(seq: Sequence, request: Request, config: EngineConfig, scheduler: Scheduler) -> Refused | None:
    """Why `request` is refused, or None. One that needs more KV than the pool has would wait at the head of
    the queue for ever, and everyone behind it."""
    pool, limit = scheduler.pool, config.max_model_len
    if seq.prompt_len == 0:
        return Refused("empty_prompt", "the prompt has no tokens: give at least one", 400)
    if request.max_tokens < 1:
        return Refused("max_tokens", f"max_tokens={request.max_tokens}: needs at least 1", 400)
    if seq.prompt_len >= limit:
        return Refused(
            "prompt_too_long",
            f"the prompt has {seq.prompt_len} tokens: engine.max_model_len={limit} takes at most {limit - 1}",
            400,
        )
    needed = pool.blocks_for(scheduler.reservation.most(seq))
    if needed > pool.usable:
        return Refused(
            "never_fits",
            f"prompt and max_tokens ({seq.prompt_len} + {seq.max_tokens}) need {needed} KV blocks of "
            f"{pool.block_size} tokens: engine.num_kv_blocks={pool.num_blocks} leaves {pool.usable}",
            400,
        )
    bound = config.max_waiting_requests
    if bound is not None and len(scheduler.waiting) >= bound:
        return Refused("queue_full", f"{bound} requests are waiting (engine.max_waiting_requests)", 503)
    return None
