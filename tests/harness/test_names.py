"""Every figure that a page, a table or a gate can show has a name that people say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import comparison, names
from harness.capacity.prober import LATENCIES, PERCENTILES, RATES, path_of
from harness.compare.metric import DEFAULTS, metric
from harness.dashboard import table, verdict
from harness.gate.baseline import load_baseline

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "tests" / "conformance" / "summary_schema.txt"
TEXTS = re.compile(
    r".*(_ids|\.rule|dialect|backend|stamps|calibration)$|(run|setup|null_reasons|failures)\..*|(by_tenant|refusals)\.\*"
)


def figures() -> list[str]:
    """The paths of summary.json that a metric may name: every block with its percentiles."""
    found = []
    for line in SCHEMA.read_text().splitlines()[1:]:
        path, _, block = line.replace(".*.", ".chat.").partition(" [")
        if ("." not in path and path not in ("fluidity", "deadline_misses")) or TEXTS.fullmatch(path):
            continue
        leaves = ("n", "mean", "p50", "p99", "max", *(("zero_share",) if "zero_share" in block else ()))
        found += [f"{path}.{leaf}" for leaf in leaves] if block else [path]
    return found


def test_every_figure_of_the_schema_has_a_name_and_no_two_the_same() -> None:
    paths = figures()
    assert len(paths) > 400
    tail = re.compile(r"by_class\.chat\.|steady\.(?!window)")
    assert [path for path in paths if names.known(tail.sub("", path, count=1)) is None] == []
    said = [names.label(path) for path in paths]
    assert [text for text in said if re.search(r"[a-z]_[a-z]|\w\.[a-z]|latency ms", text)] == []
    assert sorted({text for text in said if said.count(text) > 1}) == []


def test_what_is_compared_and_gated_is_in_the_table() -> None:
    rows = [*comparison.ROWS, *(row for _, group in table.GROUPS for row in group)]
    compared = [
        *DEFAULTS,
        *(row.path for row in rows),
        *(one.path for one in (*verdict.METRICS, *verdict.TILES)),
    ]
    compared += [path_of(f"{family}_{leaf}") for family in LATENCIES for leaf in PERCENTILES]
    compared += [path_of(rate) for rate in RATES]
    gated = list(load_baseline(ROOT / "results" / "baselines" / "rag.json").metrics)
    steady = [path.removeprefix("steady.") if "window" not in path else path for path in compared]
    assert [path for path in (*steady, *gated) if names.known(path) is None] == []


@pytest.mark.parametrize(
    ("path", "label", "name"),
    [
        ("latency_ms.normalized.p50", "normalized latency p50, ms/token", "normalized latency p50"),
        ("by_class.rag.v2.latency_ms.itl.max", "ITL most of class rag.v2, ms", "ITL most of class rag.v2"),
        ("steady.throughput.goodput_rps", "goodput in the steady window, requests/s", None),
        ("latency_ms.new_block.p50", "latency ms new block p50", None),
    ],
)
def test_a_class_a_tenant_and_what_nobody_knows(path: str, label: str, name: str | None) -> None:
    assert names.label(path) == label
    assert names.name(path) == (name or label.partition(",")[0])
    if names.known(path):
        assert metric(path).label == label
