"""Paired rounds: which side of its limit a change is on, and how often that is wrong."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness.formats import Figure
from harness.gate.paired import Look, judge
from harness.gate.rules import Rule, Rules
from harness.gate.show import print_result

LOWER = Rule("latency_ms.tpot.p50", "lower", relative=0.05)
HIGHER = Rule("throughput.output_tokens_per_s", "higher", relative=0.05)


def judged(rule: Rule, base: list[float], head: list[float], look: Look | None = None) -> Figure:
    return judge(rule, Rules("test", (rule,)), base, head, look=look or Look())


STEADY = [1.0, 1.01, 0.99, 1.0, 1.005]


@pytest.mark.parametrize(
    ("factor", "word"),
    [(1.0, "pass"), (1.03, "pass"), (1.15, "regression"), (0.8, "better"), (1.05, "inconclusive")],
)
def test_the_side_of_the_limit(factor: float, word: str) -> None:
    head = [10 * factor * noise for noise in STEADY]
    slower = judged(LOWER, [10.0] * 5, head)
    assert slower.verdict == word
    assert slower.change == pytest.approx(factor - 1, abs=0.005)
    assert slower.effect is not None
    assert slower.effect[0] < factor - 1 < slower.effect[1]
    fewer = judged(HIGHER, head, [10.0] * 5)  # the same change in a figure of which more is better
    assert fewer.verdict == word


def test_past_the_limit_needs_the_interval_too() -> None:
    """12 % up on average, from rounds that scatter by 10 %: no regression, and how many rounds would tell."""
    figure = judged(LOWER, [10.0] * 4, [10.0, 12.5, 10.5, 12.0])
    assert figure.verdict == "inconclusive"
    assert figure.change is not None
    assert figure.change > 0.05
    assert figure.needed is not None
    assert figure.needed > 4
    assert f"about {figure.needed} would" in (figure.reason or "")


def test_pairing_takes_out_what_both_sides_had() -> None:
    """A machine that is three times slower in one round, for both sides."""
    machine = [1.0, 3.0, 1.2, 2.0, 1.0]
    base = [10 * m for m in machine]
    assert judged(LOWER, base, [b * n for b, n in zip(base, STEADY, strict=True)]).verdict == "pass"


def test_the_larger_of_relative_and_absolute_is_allowed() -> None:
    rule = Rule("latency_ms.ttft.from_intended.p50", "lower", relative=0.05, absolute=2.0)
    figure = judged(rule, [10.0] * 5, [11.5 * noise for noise in STEADY])
    assert figure.verdict == "pass"
    assert figure.limit == pytest.approx(12.0)


def test_counts_are_differences_and_zero_is_a_figure() -> None:
    rule = Rule("counts.failed", "lower", absolute=0)
    assert judged(rule, [0.0] * 4, [0.0] * 4).verdict == "pass"
    assert judged(rule, [0.0] * 4, [3.0] * 4).verdict == "regression"
    assert judged(rule, [0.0] * 4, [0.0, 0.0, 1.0, 0.0]).verdict == "inconclusive"
    share = Rule("throughput.slo_attainment", "higher", absolute=0.02)
    assert judged(share, [1.0] * 4, [0.9, 0.91, 0.9, 0.89]).verdict == "regression"
    goodput = judged(Rule("throughput.goodput_rps", "higher", relative=0.1), [5.0] * 4, [0.0] * 4)
    assert (goodput.verdict, goodput.change) == ("regression", -1.0)


@pytest.mark.parametrize(
    ("base", "head", "reason"),
    [
        ([1.0, None, 1.0], [1.0, 1.0, 1.0], "measured in 2 of 3 rounds"),
        ([None, None], [1.0, 1.0], "measured in 0 of 2 rounds"),
        ([1.0], [1.0], "one round has no interval"),
        ([], [], "no round is valid"),
    ],
)
def test_what_was_not_measured_is_inconclusive(
    base: list[float | None], head: list[float | None], reason: str
) -> None:
    figure = judge(LOWER, Rules("test", (LOWER,)), base, head)
    assert (figure.verdict, figure.reason) == ("inconclusive", reason)


@pytest.mark.parametrize(("spread", "rounds"), [(0.01, 3), (0.05, 5), (0.3, 3)])
def test_the_errors_are_what_is_promised_whatever_the_noise(spread: float, rounds: int) -> None:
    """Of 1,000 simulated metrics at the very limit at most misses = 5 % pass; with nothing changed, at most
    1 % fail; at the limit at most 1 % fail as well, since it is not past it."""
    rng = np.random.default_rng(rounds)
    count = 1000
    words = {}
    for factor in (1.0, 1.05):
        heads = factor * rng.lognormal(0, spread, (count, rounds))
        words[factor] = [judged(LOWER, [1.0] * rounds, list(head)).verdict for head in heads]
    beyond = 3 * (0.05 * 0.95 / count) ** 0.5
    assert words[1.0].count("regression") <= 0.01 * count + 3 * (0.01 * count) ** 0.5
    assert words[1.05].count("regression") <= 0.01 * count + 3 * (0.01 * count) ** 0.5
    passed = words[1.05].count("pass") + words[1.05].count("better")
    assert passed <= (0.05 + beyond) * count


def test_each_further_look_has_to_be_surer() -> None:
    head = [11.5 * noise for noise in STEADY]
    first, second = (judged(LOWER, [10.0] * 5, head, Look(k, 2)) for k in (1, 2))
    only = judged(LOWER, [10.0] * 5, head)
    assert only.confidence == pytest.approx(0.98)
    assert first.confidence == second.confidence == pytest.approx(0.99)
    assert first.effect is not None
    assert only.effect is not None
    assert first.effect[0] < only.effect[0]


def test_a_narrow_terminal_folds_words_and_cuts_off_no_figure() -> None:
    """An interval as wide as that of five rounds beside other work."""
    wide: dict[str, Any] = {"better": "lower", "ci95": None, "limit": 10.1, "verdict": "inconclusive"}
    figure = Figure(
        "latency_ms.normalized.p50", value=1234.0, baseline=1119.0, change=0.275, gate=False,
        effect=(-0.534, 2.49), confidence=0.995, **wide,
    )  # fmt: skip
    out = Console(file=io.StringIO(), width=80, highlight=False)
    report: Any = SimpleNamespace(figures=(figure,), reasons=(), outcome="inconclusive")
    print_result(report, out)
    assert isinstance(out.file, io.StringIO)
    said = out.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
    assert all(
        word in said for word in ("1119", "1234", "+27.5 %", "-53.4", "+249.0", "10.1", "(inconclusive)")
    )
