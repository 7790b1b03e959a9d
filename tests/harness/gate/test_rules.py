"""Rules: read strictly, and what they leave each metric of the gate's error."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.gate.rules import DEFAULT, RulesError, default_rules, load_rules

TPOT = "latency_ms.tpot.p50"


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def test_a_rule_is_what_was_written(tmp_path: Path) -> None:
    rules = load_rules(
        written(
            tmp_path,
            "false_alarms: 0.02\nmetrics:\n"
            f"  {TPOT}: {{better: lower, relative: 0.1, absolute: 2, confidence: 0.9, gate: false}}\n"
            "  throughput.goodput_rps: {better: higher, limit: 3}\n",
        )
    )
    tpot, goodput = rules.metrics
    assert (tpot.metric, tpot.better, tpot.relative, tpot.absolute) == (TPOT, "lower", 0.1, 2.0)
    assert (tpot.confidence, tpot.gate, tpot.limit) == (0.9, False, None)
    assert (tpot.allowed(10.0), tpot.allowed(100.0)) == (2.0, 10.0)
    assert (goodput.limit, goodput.gate, goodput.judges_change) == (3.0, True, False)
    assert (rules.false_alarms, rules.misses) == (0.02, 0.05)


def test_metrics_that_can_fail_the_gate_share_its_false_alarms(tmp_path: Path) -> None:
    text = "metrics:\n" + "".join(
        f"  latency_ms.tpot.p{k}: {{better: lower, relative: 0.1, gate: {str(k % 2 == 0).lower()}}}\n"
        for k in range(20)
    )
    rules = load_rules(written(tmp_path, text))
    errors = [(1 - rules.confidence(rule)) / 2 for rule in rules.metrics]  # on the side that is worse
    assert sum(e for e, rule in zip(errors, rules.metrics, strict=True) if rule.gate) == pytest.approx(0.01)


@pytest.mark.parametrize("mode", DEFAULT)
def test_the_default_rules_are_rules(mode: str) -> None:
    rules = default_rules(mode)
    assert len(rules.metrics) >= 10
    assert len({rule.metric for rule in rules.metrics}) == len(rules.metrics)
    assert rules.optional
    assert any(rule.gate for rule in rules.metrics)


BROKEN = [
    ("", "needs `metrics:`"),
    ("[1]", "needs `metrics:`"),
    ("a: [", "is not YAML"),
    ("metrics: {}", "at least one metric"),
    ("metrics: 3", "at least one metric"),
    ("rules: 3", "rules: no such key; there are schema_version"),
    ("schema_version: 2\nmetrics: {a: 1}", "schema_version=2, needs 1"),
    ("false_alarms: 2\nmetrics: {a: 1}", "false_alarms=2, needs a share between 0 and 0.5"),
    ("misses: yes\nmetrics: {a: 1}", "misses=True, needs a share"),
    ("metrics: {3: {better: lower, limit: 1}}", "metrics.3: needs a path of summary.json"),
    ("metrics: {a.b: 3}", "metrics.a.b: needs better and"),
    ("metrics: {a.b: {better: up, limit: 1}}", "metrics.a.b.better='up', needs lower or higher"),
    ("metrics: {a.b: {better: lower, limit: fast}}", "metrics.a.b.limit='fast', needs a number"),
    ("metrics: {a.b: {better: lower, limit: 1e400}}", "metrics.a.b.limit=inf, needs a number"),
    ("metrics: {a.b: {better: lower, limit: .nan}}", "metrics.a.b.limit=nan, needs a number"),
    ("metrics: {a.b: {better: lower, relative: -1}}", "metrics.a.b.relative=-1, needs a number of 0 or more"),
    ("metrics: {a.b: {better: lower, relative: true}}", "metrics.a.b.relative=True, needs a number"),
    ("metrics: {a.b: {better: lower, confidence: 95}}", "metrics.a.b.confidence=95, needs a share"),
    ("metrics: {a.b: {better: lower, limit: 1, gate: 1}}", "metrics.a.b.gate=1, needs true (can"),
    ("metrics: {a.b: {better: lower, tolerance: 1}}", "metrics.a.b.tolerance: no such key; there are better"),
    ("metrics: {a.b: {better: lower}}", "metrics.a.b: needs relative"),
    ("metrics: {a.b: {better: lower, limit: 1}, a.b: {better: lower, limit: 2}}", "a.b: stands there twice"),
    ("metrics: {? {a: 1} : 2}", "is not YAML"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_what_is_wrong_is_one_line_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(RulesError) as error:
        load_rules(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000.0), ("2.5E-2", 0.025), ("1e+3", 1000.0), ("7", 7.0)]
)
def test_powers_of_ten_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    path = written(tmp_path, f"metrics: {{a.b: {{better: lower, limit: {text}}}}}")
    assert load_rules(path).metrics[0].limit == value


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match=r"nowhere\.yaml: cannot be read"):
        load_rules(tmp_path / "nowhere.yaml")
