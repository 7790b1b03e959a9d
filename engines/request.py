"""A request as the server hands it to the engine, and what the engine hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None  # None: the engine derives one from its own seed and the internal id


@dataclass(slots=True)
class Request:
    """One generation. `stop_after` is where the answer really ends, as if the model had said EOS there: the
    engine applies it in publish, and no scheduler ever sees it."""

    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    stop_after: int | None = None
    priority: int = 0  # lower first
    tenant: str = ""
    request_class: str = ""
    deadline_ms: float | None = None
    label: dict[str, Any] = field(
        default_factory=dict
    )  # the client's {run, id, attempt}; never used as a key


class Output(NamedTuple):
    """What one iteration produced for one sequence. Exactly one Output per sequence has a finish_reason."""

    seq_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop | length | abort | queue_timeout | deadline | error
    error: str | None = None
    cached_tokens: int | None = None  # of its prompt, with its first token; None: no prefix cache


make_output = partial(tuple.__new__, Output)
"""From a tuple of all its fields, without the Python of Output(): called for every token."""


class Refused(Exception):
    """The engine will not take this request. status is the HTTP status that says so."""

    def __init__(self, reason: str, message: str, status: int, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.reason = (
            reason  # never_fits | prompt_too_long | queue_full | ...; the label of the refusal counter
        )
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s  # None: another time will not help, or nobody knows
