"""What every side is asked for: prompts of random tokens and how long each answer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_ID, LAST_ID = 32, 126
"""Of random prompts when the vocabulary is that of bytes: printable ones."""
FIRST_TEXT_ID = 1000
"""Of random prompts else: past the special tokens and the single bytes that vocabularies begin with."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. output: tokens that the answer has, whatever the model would say."""

    prompt: tuple[int, ...]
    output: int


def draw(
    requests: int, prompts: tuple[int, int], outputs: tuple[int, int], vocab: int, seed: int
) -> list[Ask]:
    """Lengths uniform over both ends of prompts and outputs, ids uniform over the vocabulary."""
    random = np.random.default_rng(seed)
    low, high = (FIRST_TEXT_ID, vocab) if vocab > 2 * FIRST_TEXT_ID else (FIRST_ID, LAST_ID + 1)
    lengths = random.integers(prompts[0], prompts[1] + 1, requests)
    answers = random.integers(outputs[0], outputs[1] + 1, requests)
    return [
        Ask(tuple(random.integers(low, high, int(n)).tolist()), int(k))
        for n, k in zip(lengths, answers, strict=True)
    ]


def shortened(asks: Sequence[Ask], tokens: int) -> list[Ask]:
    """The same prompts with answers of at most `tokens`: what warms a side up."""
    return [Ask(ask.prompt, min(ask.output, tokens)) for ask in asks]


def tokens_of(asks: Sequence[Ask]) -> int:
    return sum(ask.output for ask in asks)
