"""The gate's error rates with recorded noise, and that the slow-down to be found can still be made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from harness.conf import UsageError
from harness.gate.interleaved import Plan
from harness.gate.outcome import PASS, REGRESSION
from harness.gate.prove import PASS_LINE, SOURCE
from harness.gate.rules import default_rules
from harness.gate.simulate import NOISE, load_noise, main, record, simulate

ROOT = Path(__file__).parents[3]


def test_of_100_gates_99_of_the_same_pass_and_95_of_the_slower_fail() -> None:
    """With as many rounds as it takes, 25 at most; decided sooner as a rule."""
    noise, rules, plan = load_noise(), default_rules("base-ref"), Plan(5, 25)
    words, rounds = {}, {}
    for slow in (0.0, 0.15):
        results = simulate(noise, rules, plan, slow=slow, times=100)
        words[slow] = Counter(result.outcome for result, _ in results)
        rounds[slow] = sum(taken for _, taken in results) / 100
    assert words[0.0]["pass"] >= 99
    assert words[0.0]["regression"] == 0
    assert words[0.15]["regression"] >= 95
    assert words[0.15]["pass"] == 0
    assert max(rounds.values()) < 16


def test_too_few_rounds_are_inconclusive_and_no_error() -> None:
    noise, rules = load_noise(), default_rules("base-ref")
    for slow, wrong in ((0.0, "regression"), (0.15, "pass")):
        words = Counter(r.outcome for r, _ in simulate(noise, rules, Plan(3, 3), slow=slow, times=100))
        assert words[wrong] <= 2
        assert words["inconclusive"] > 50


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--times", "20", "--max-rounds", "25"]) == PASS
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line) == {"same", "slower", "rounds", "most"}
    assert sum(line["slower"].values()) == pytest.approx(1)
    rules = tmp_path / "rules.yaml"  # a limit beyond the slow-down: it passes, and the command says so
    rules.write_text("metrics: {latency_ms.tpot.p50: {better: lower, relative: 0.9}}")
    assert main(["--times", "20", "--rules", str(rules)]) == REGRESSION


def test_noise_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    for text in ("", "{}", '{"about": "", "metrics": {"a": {"base": [1, 2], "head": [1]}}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="is no recorded noise"):
            load_noise(path)
    data = json.loads(NOISE.read_text())
    assert data["about"]
    (tmp_path / "gate.json").write_text(
        '{"base": {"sha": "a"}, "head": {"sha": "b", "dirty": 0}, "rounds": []}'
    )
    with pytest.raises(UsageError, match="not the same commit"):
        record([tmp_path], default_rules("base-ref"), "")


def test_a_pass_can_still_be_made_slower() -> None:
    """What harness.gate.prove commits in its clone."""
    assert (ROOT / SOURCE).read_text().count(PASS_LINE) == 1
