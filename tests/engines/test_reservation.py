from __future__ import annotations

import pytest

from engines.config import RESERVATIONS
from engines.reservation import build
from engines.sequence import Sequence
from tests.support.engine_driver import config


@pytest.mark.parametrize(
    ("name", "entering", "answering", "most"),
    [
        ("on_demand", 4, 12, 18),
        ("prompt", 10, 12, 18),
        ("prompt_plus_max_tokens", 18, 18, 18),
        ("max_model_len", 40, 40, 40),
    ],
)
def test_tokens_held(name: str, entering: int, answering: int, most: int) -> None:
    """A prompt of 10 with up to 8 tokens of answer, in a model of 40: after its first 4, and with 2
    answered."""
    reservation = build(config("chunked", reservation=name, max_model_len=40))
    seq = Sequence(0, prompt_len=10, max_tokens=8)
    assert reservation.tokens(seq, 4) == entering
    seq.num_tokens = 12
    assert reservation.tokens(seq, 12) == answering
    assert reservation.most(seq) == most


def test_a_preempted_sequence_brings_its_answer() -> None:
    reservation = build(config("chunked", reservation="prompt"))
    seq = Sequence(0, prompt_len=3, max_tokens=8)
    seq.num_tokens = 7
    assert reservation.tokens(seq, 2) == 7


@pytest.mark.parametrize("name", RESERVATIONS)
def test_no_sequence_ever_holds_more_than_its_most(name: str) -> None:
    reservation = build(config("chunked", reservation=name))
    seq = Sequence(0, prompt_len=5, max_tokens=6)
    for length in range(5, 12):
        seq.num_tokens = length
        assert all(reservation.tokens(seq, done) <= reservation.most(seq) for done in range(1, length + 1)), (
            length
        )
