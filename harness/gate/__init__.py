"""`python -m harness.gate`: did it become worse? A run against a committed baseline or constants, or the
working tree against another git revision, measured in interleaved rounds (docs/gates.md).

Exit 0 pass, 1 regression, 2 usage error, 3 run invalid or another schedule or configuration, 4 inconclusive.
The last line is one JSON object for machines."""

from harness.gate.baseline import Baseline, BaselineError, Limit, assess, gate, load_baseline
from harness.gate.command import main
from harness.gate.outcome import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE, Result
from harness.gate.reading import interval
from harness.gate.rules import Rule, Rules, RulesError, load_rules

__all__ = [
    "INCONCLUSIVE",
    "INVALID",
    "PASS",
    "REGRESSION",
    "USAGE",
    "Baseline",
    "BaselineError",
    "Limit",
    "Result",
    "Rule",
    "Rules",
    "RulesError",
    "assess",
    "gate",
    "interval",
    "load_baseline",
    "load_rules",
    "main",
]
