"""A request while the engine has it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engines.request import Request
from engines.sequence import Sequence, Status
from engines.step_log import RequestRecord


@dataclass(slots=True, eq=False)
class Live:
    """A request beside its sequence: all that the scheduler may not know."""

    request: Request
    seq: Sequence
    tokens: array[int]  # prompt and answer so far
    seed: int
    record: RequestRecord
    longest: int  # prompt and answer: with so many tokens it ends
    ends: frozenset[int]  # tokens that end it
    answered: bool = False  # its last Output is out
    pending: int = 0  # of its tokens the last ones, which are being computed and not known yet (overlap)
    found: int | None = None  # of its prompt, in the prefix cache

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.seq.prompt_len :])

    @property
    def state(self) -> str:
        """Where it is, in the words of abort_state."""
        if self.seq.status is Status.WAITING:
            return "queued"
        if self.seq.status is Status.RUNNING:
            return "decode" if self.seq.decoding else "prefill"
        if self.pending and self.seq.status is Status.FINISHED:  # its last token is under way
            return "decode"
        return "preempted" if self.seq.status is Status.PREEMPTED else "held"
