"""The engine's state and counters, for gauges and tests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Since the engine started."""

    steps: int = 0
    received: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0  # of prompts, for the first time
    decode_tokens: int = 0  # of answers, for the first time
    recomputed_tokens: int = 0  # had been computed before a preemption
    prefix_cache_queries: int = 0  # prompt tokens looked up in the prefix cache, when first scheduled
    prefix_cache_hits: int = 0  # and found: they are never computed
    ended_rows: int = 0  # rows of a static batch whose answer had ended
    left_pad_tokens: int = 0
    preemptions: int = 0
    swapped_out: int = 0  # blocks copied to host memory, of preempted sequences
    swapped_in: int = 0  # and back
    refusals: dict[str, int] = field(default_factory=dict)  # by reason
    finished: dict[str, int] = field(default_factory=dict)  # by finish_reason
    waits: dict[str, int] = field(default_factory=dict)  # why accepted requests had to queue, at arrival
    aborted: dict[str, int] = field(default_factory=dict)  # finish_reason abort, by abort_state
    released_blocks: int = 0  # KV blocks that nobody holds any more
    kv_exhausted: int = 0  # iterations in which somebody lost KV since there was none left
    out_of_memory: int = 0  # passes that failed for want of memory


@dataclass(kw_only=True)
class Occupancy:
    """At one moment."""

    running: int  # sequences with a seat, ended rows of a static batch included
    waiting: int
    kv_live: int  # blocks
    kv_cached: int
    kv_free: int


@dataclass(kw_only=True)
class Stats(Occupancy, Counters):
    """A snapshot. received = running + waiting + sum(refusals) + sum(finished), whenever no drained answer
    waits to leave."""


@dataclass(kw_only=True)
class QueueState:
    """One engine's queue at one moment, for people: sums that nobody wants after every pass."""

    running: int
    waiting: int
    waiting_tokens: int
    kv_live: int  # blocks
    kv_usable: int
    admissible: int  # how many more sequences could get a seat now, by estimate
    wait_s: float | None  # until what waits has got its seats, by recent throughput
    by_class: dict[str, int] = field(default_factory=dict)  # waiting
    by_tenant: dict[str, int] = field(default_factory=dict)  # waiting
