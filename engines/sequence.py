"""What a scheduler may know about a request: no text, no sampling, and not where its answer will end."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    WAITING = "waiting"  # in the queue, never scheduled
    RUNNING = "running"  # holds a seat of the batch, and KV
    PREEMPTED = "preempted"  # back in the queue, KV given up, will be computed again
    ENDED = "ended"  # its answer has ended, but a static batch still computes its row
    FINISHED = "finished"  # gone: no seat, no KV


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` chases `num_tokens` (vLLM V1): a prompt has many tokens to compute, a decode has one,
    and a scheduler needs no phases. Token i is computed when its key and value are in the cache; the pass
    that computes the last one yields the next token.

    `seq_id` numbers arrivals: a smaller one came earlier."""

    seq_id: int
    prompt_len: int
    max_tokens: int  # what the client declared; where the answer really ends is not for schedulers to know
    arrival: float = 0.0  # seconds on the engine's clock
    priority: int = 0  # lower first
    tenant: str = ""
    request_class: str = ""
    deadline: float | None = None  # on the engine's clock: when its last token is due
    status: Status = Status.WAITING
    seat: int = -1  # numbers the seats that were ever given: its last one
    num_tokens: int = -1  # prompt and answer so far
    num_computed: int = 0  # without a seat: what a seat would give it, from the cache or the host
    max_computed: int = 0  # the furthest that num_computed ever was: what lies below is recomputation
    num_cached: int = 0  # prompt tokens that the prefix cache had, so that it never computed them
    num_published: int = 0  # blocks of its table that others can find
    num_padded: int = 0  # positions computed for nobody, after the answer had ended
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens computed again after preemptions
    num_swaps: int = 0  # preemptions after which its KV was put away in host memory
    block_table: array[int] = field(
        default_factory=lambda: array("i")
    )  # int32: numpy copies it without a loop
    host_table: array[int] = field(default_factory=lambda: array("i"))  # blocks of the host
    block_keys: list[Hashable] = field(default_factory=list)  # what its full blocks hold; only compared

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            self.num_tokens = self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; at least 1 while the answer goes on."""
        return self.num_tokens - self.num_computed

    @property
    def swapped(self) -> bool:
        """Its KV, up to num_computed, is in host memory."""
        return bool(self.host_table)

    @property
    def decoding(self) -> bool:
        """The prompt is computed and only the newest token is not."""
        return self.num_tokens - self.num_computed == 1 and self.num_computed >= self.prompt_len

    def start(self, num_published: int) -> None:
        """It has got a seat, and its table begins with blocks of the prefix cache that hold the tokens up to
        num_computed. Those that it had computed before are no news; the others it never has to compute."""
        self.num_published = num_published
        self.num_cached += max(0, self.num_computed - self.max_computed)
        self.max_computed = max(self.max_computed, self.num_computed)
