"""The generator held against its own files, and a check that fails where it should."""

from __future__ import annotations

import pytest

from tests.support.workload_configs import PRESETS, workload
from workloads.__main__ import main
from workloads.arrivals import read_arrivals
from workloads.check import check, full_size, theory
from workloads.settings import Settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_draws_what_its_file_and_its_source_say(name):
    checks = check(workload(name), requests=20_000 if name == "agent" else 4_000, replicas=20)
    assert checks
    assert [one for one in checks if not one.ok] == []


def test_the_sources_are_among_the_checks():
    figures = [
        one.figure for name in ("chat", "rag") for one in check(workload(name), requests=500, replicas=3)
    ]
    assert "dispersion in 60 s at 5.53/s, Azure 2023 conversations" in figures
    assert "reuse, RAGPulse" in figures
    assert "rank correlation of retrieval" in figures
    assert "KS of plain: answers" in figures
    assert any(figure.startswith("share of chat-") for figure in figures)


def test_a_preset_that_draws_something_else_fails(monkeypatch):
    from workloads import check as module

    rag = workload("rag")
    wrong = workload("rag", cache_friendly=True, arrivals__factor={"sigma": 0.6, "tau_s": 60})
    wrong["classes"]["plain"]["output"]["correlation"] = 0.0
    wrong["classes"]["retrieval"]["weight"] = 0.4
    drawn = module.draw
    monkeypatch.setattr(module, "draw", lambda node, **kwargs: drawn(full_size(wrong), **kwargs))
    failed = {one.figure for one in check(rag, requests=4_000, replicas=3) if not one.ok}
    assert {"reuse, RAGPulse", "rank correlation of plain", "share of retrieval"} <= failed


def test_the_theory_of_dispersion():
    node = Settings(workload("chat")["arrivals"], "arrivals")
    assert theory(read_arrivals(node), 5.53, 60.0) == pytest.approx(1.07**2 + 5.53 * 60 * 0.21**2, rel=0.05)


def test_the_command(capsys):
    assert main(["check", "summarize", "--requests", "3000"]) == 0
    assert "every check holds" in capsys.readouterr().out
    assert main(["check", "trace"]) == 2
