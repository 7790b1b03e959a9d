"""The step bench measures what it says it measures."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from engines import step_bench
from engines.model.random_weights import TINY
from kernels.bench import machine


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PRODUCTS", ((32, 64, 64),))


def test_the_linear_layers_are_the_models_own() -> None:
    weights = step_bench.linear_weights(TINY, torch.float32, torch.device("cpu"))
    embedding, norms = TINY.vocab * TINY.hidden, (2 * TINY.layers + 1) * TINY.hidden
    assert sum(w.numel() for w in weights) == 6_196_608 - embedding - norms
    assert len({w.data_ptr() for w in weights}) == len(weights)


def test_a_table_for_people_and_a_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        model="tiny",
        batches=[1, 3],
        rounds=1,
        threads=1,
        device="cpu",
        dtype="float32",
        rotate_mb=16,
        heads=9,
    )
    assert step_bench.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:3] == ["batch", "step", "ms"]
    result = json.loads(lines[-1])
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["step_ms"] / row["linear_ms"], rel=0.02)
        assert row["ratio"] > 0.1
        kv = row["batch"] * 257 * TINY.kv_bytes_per_token(4)
        read_ms = (result["weight_bytes"] + kv) / result["machine"]["read_gb_s"] / 1e6
        assert row["bound_ms"] == pytest.approx(read_ms, rel=0.01)
        assert row["share_of_bound"] == pytest.approx(row["bound_ms"] / row["step_ms"], abs=0.01)
        parts = row["parts"]
        assert sum(parts.values()) == pytest.approx(1.0, abs=0.01)
        assert all(0 < share < 1 for share in parts.values())
        assert parts["linear"] > parts["sampling"]
    assert (result["context"], result["threads"], result["attention"] != "") == (256, 1, True)


def test_both_dtypes_and_a_goal_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_bench, "RATIO", 0.0)
    options = ["--model", "tiny", "--batches", "1", "--rounds", "1", "--threads", "1", "--device", "cpu"]
    assert step_bench.main([*options, "--rotate-mb", "16", "--check"]) == 1
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [result["dtype"] for result in results] == ["float32", "bfloat16"]
    assert results[0]["weight_bytes"] == 2 * results[1]["weight_bytes"]


def test_a_pool_that_is_too_small_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "tiny", "--threads", "1", "--batches", "32", "--rotate-mb", "16", "--rounds", "1"]
    assert step_bench.main([*small, "--kv-memory-gb", "0.02"]) == 2
    assert "--batches 32 --context 256: needs more KV than --kv-memory-gb gives" in capsys.readouterr().err
