"""Other systems' schedulers beside ours: the same requests, and so the same batches."""

from __future__ import annotations

import json

import pytest

from engines import bench_peers, bench_scheduler


def test_transformers_makes_the_same_batches() -> None:
    rows = bench_peers.compare("chunked", ["transformers"], running=6, waiting=9, steps=40)
    assert [row["side"] for row in rows] == ["chunked", "transformers"]
    for row in rows:
        assert row["same"] == 1.0
        assert min(row["schedule"], row["update"]) > 0
        assert row["sum"] == pytest.approx(row["schedule"] + row["update"], abs=0.2)
    assert rows[0]["times_ours"] == 1.0


def test_another_policy_is_seen_as_one() -> None:
    """static computes ended rows and lets nobody in meanwhile: its batches are not those of transformers."""
    _, peer = bench_peers.compare("static", ["transformers"], running=6, waiting=9, steps=40)
    assert peer["same"] < 1.0


def test_what_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_peers, "version", {"transformers": "5.0"}.get)
    command = ["--peer", "vllm", "transformers", "--running", "2", "--waiting", "3", "--steps", "3"]
    assert bench_scheduler.main(command) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["--peer vllm: skipped, vllm is not installed in this environment"]
    result = json.loads(out.splitlines()[-1])
    assert result["versions"] == {"transformers": "5.0"}
    assert [row["side"] for row in result["rows"]] == ["chunked", "transformers"]
    assert bench_scheduler.main(["--peer", "vllm"]) == 2
