from __future__ import annotations

import pytest

from engines.plan import Kind, Plan
from engines.sequence import Sequence


def seq(prompt_len: int, num_tokens: int, computed: int, max_computed: int = 0) -> Sequence:
    return Sequence(
        0,
        prompt_len,
        max_tokens=50,
        num_tokens=num_tokens,
        num_computed=computed,
        max_computed=max(computed, max_computed),
    )


@pytest.mark.parametrize(
    ("sequence", "tokens", "kind", "split"),
    [
        (seq(10, 10, 0), 10, Kind.PREFILL, (10, 0, 0)),
        (seq(10, 10, 4), 3, Kind.PREFILL, (3, 0, 0)),
        (seq(1, 1, 0), 1, Kind.PREFILL, (1, 0, 0)),  # one token, but of the prompt
        (seq(10, 11, 10), 1, Kind.DECODE, (0, 1, 0)),
        (seq(10, 13, 0, 12), 13, Kind.RECOMPUTE, (0, 1, 12)),  # its newest token had never been computed
        (seq(10, 13, 0, 12), 5, Kind.RECOMPUTE, (0, 0, 5)),
        (seq(10, 13, 12, 12), 1, Kind.DECODE, (0, 1, 0)),
        (seq(10, 10, 0, 6), 10, Kind.RECOMPUTE, (4, 0, 6)),  # preempted in the middle of its prompt
        (seq(10, 10, 4, 6), 4, Kind.RECOMPUTE, (2, 0, 2)),
        (seq(10, 10, 6, 6), 4, Kind.PREFILL, (4, 0, 0)),
    ],
)
def test_every_token_of_an_entry_has_one_use(
    sequence: Sequence, tokens: int, kind: Kind, split: tuple[int, int, int]
) -> None:
    plan = Plan()
    plan.add(sequence, tokens)
    (entry,) = plan.entries
    assert entry.kind is kind
    assert entry.split() == split
    assert sum(split) == tokens


def test_what_is_dropped_returns_to_the_budget() -> None:
    plan, first, second = Plan(), seq(10, 10, 0), seq(3, 4, 3)
    plan.add(first, 8, left_pad=2)
    plan.add(second, 1)
    plan.add_ended(seq(3, 4, 3))
    assert plan.num_tokens == 12
    plan.drop(first)
    assert plan.num_tokens == 2
    assert [entry.kind for entry in plan.entries] == [Kind.DECODE, Kind.ENDED]
    plan.drop(first)
    assert plan.num_tokens == 2
