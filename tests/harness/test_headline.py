"""The line over a comparison fits on a phone, and is no kinder than the table below it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.compare.metric import DEFAULTS
from harness.dashboard.headline import headline, leads

LONGEST = 130
"""One line at 1280 pixels, three on a phone."""


def compared(words: dict[str, str], valid: int = 5) -> dict[str, Any]:
    """words: by arm, a letter for each of the default figures."""
    meaning = {"b": "better", "w": "worse", "s": "same", "?": "inconclusive", "-": None}
    effect = {"ratio": 0.12, "low": 0.1, "high": 0.14}
    metrics = {
        path: {"arms": {arm: {**effect, "verdict": meaning[word[i]]} for arm, word in words.items()}}
        for i, path in enumerate(DEFAULTS)
    }
    arms = [{"name": name} for name in ("static", *words)]
    rounds = [{"valid": i < valid} for i in range(5)]
    return {"reference": "static", "arms": arms, "metrics": metrics, "rounds": rounds}


@pytest.mark.parametrize(
    ("words", "valid", "told"),
    [
        (
            {"chunked": "bbwbbb?b"},
            5,
            "chunked better on 6 of 8 (output tokens/s 0.12x, 0.10 to 0.14), worse on TPOT p50, undecided "
            "on 1 · 5 valid rounds",
        ),
        ({"chunked": "ssssssss"}, 3, "chunked the same on all 8 · 3 of 5 rounds valid"),
        ({"chunked": "???----?"}, 5, "chunked undecided on 4 of 4 · 5 valid rounds"),
        ({"chunked": "--------"}, 5, "chunked has no figures to compare · 5 valid rounds"),
        (
            {"max_utilization": "wwbbssbb", "continuous": "bbbbbbbs"},
            5,
            "continuous better on 7 of 8; max_utilization better on 4 of 8, worse on 2 · 5 valid rounds",
        ),
        (
            {"orca": "wwwwwwww", "continuous": "bbbbbbbb", "chunked": "bbbbbbbw", "tgi": "s" * 8},
            5,
            "continuous better on 8 of 8; chunked better on 7 of 8, worse on 1; 2 more "
            "below · 5 valid rounds",
        ),
    ],
)
def test_who_wins_on_what(words: dict[str, str], valid: int, told: str) -> None:
    found = headline(compared(words, valid))
    assert found == f"Against static: {told}"
    assert len(found) <= LONGEST


def test_arms_that_share_a_line_have_their_intervals_below() -> None:
    found = leads(compared({"orca": "wwwwwwsw", "tgi": "s" * 8}))
    assert found == ["orca: output tokens/s 0.12x, 0.10 to 0.14."]
    assert leads(compared({"orca": "bbbbbbbb"})) == []
