"""Passes of known size on a real runner. An experiment whose own batches are all alike does not tell what
a row costs: its ridge has to be measured apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engines.config import EngineConfig
from engines.virtual import Log
from harness.experiments.simulation import play_real
from workloads.schedule import ScheduledRequest, Segment

if TYPE_CHECKING:
    from engines.runner import ModelRunner

PROMPT, ANSWER = 16, 16
"""Tokens of each request of a probe."""


def probe(config: EngineConfig, runner: ModelRunner) -> list[Log]:
    """Decode batches of 1, 2, 4, ... max_num_seqs, as far as the pool holds them: a log of each."""
    most = min(config.max_num_seqs, (config.num_kv_blocks or 0) * config.block_size // (PROMPT + ANSWER + 1))
    vocab = runner.loaded.config.vocab
    return [play_real(config, _requests(n), runner, vocab)[0].log for n in _doubling(most)]


def _doubling(most: int) -> Iterator[int]:
    n = 1
    while n < most:
        yield n
        n *= 2
    yield max(1, most)


def _requests(n: int) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(
            id=f"probe{i}",
            arrival_s=0.0,
            segments=(Segment(f"probe{i}", PROMPT),),
            prompt_tokens=PROMPT,
            max_tokens=ANSWER,
            stop_after=ANSWER,
        )
        for i in range(n)
    ]
