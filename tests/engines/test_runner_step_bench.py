"""The step bench measures what it says it measures."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from engines import step_bench
from engines.model.random_weights import TINY


def test_the_linear_layers_are_the_models_own() -> None:
    weights = step_bench.linear_weights(TINY, torch.float32, torch.device("cpu"))
    embedding, norms = TINY.vocab * TINY.hidden, (2 * TINY.layers + 1) * TINY.hidden
    assert sum(w.numel() for w in weights) == 6_196_608 - embedding - norms
    assert len({w.data_ptr() for w in weights}) == len(weights)


def test_a_table_for_people_and_a_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        model="tiny", batches=[1, 3], rounds=1, threads=1, device="cpu", dtype="float32", heads=9
    )
    assert step_bench.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:3] == ["batch", "step", "ms"]
    result = json.loads(lines[-1])
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["step_ms"] / row["linear_ms"], rel=0.02)
        assert row["ratio"] > 0.1
    assert (result["context"], result["threads"], result["attention"] != "") == (256, 1, True)


def test_a_pool_that_is_too_small_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_bench.main(["--model", "tiny", "--threads", "1", "--kv-memory-gb", "0.02"]) == 2
    assert "--batches 32 --context 256: needs more KV than --kv-memory-gb gives" in capsys.readouterr().err
