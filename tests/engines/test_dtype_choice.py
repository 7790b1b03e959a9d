"""dtype=fastest and engine.determinism=fast: what is measured, kept, and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.model import dtype_choice
from engines.model.dtype_choice import fastest_dtype
from engines.model.random_weights import TINY
from engines.runner import build_runner
from tests.support.passes import engine_config

MODEL = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dtype_choice, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(dtype_choice, "_ELEMENTS", 1)
    return tmp_path


def test_it_is_measured_once_and_kept_by_what_it_depends_on(own_cache: Path) -> None:
    first = fastest_dtype(TINY, threads=1)
    ratio = {n: sum(first["ms"][n][r] / first["ms"]["float32"][r] for r in ("1", "32")) for n in first["ms"]}
    assert first["dtype"] == min(ratio, key=lambda name: ratio[name])
    assert not first["cached"]
    assert fastest_dtype(TINY, threads=1) == first | {"cached": True}
    assert not fastest_dtype(TINY, threads=2)["cached"]
    assert len(list((own_cache / "dtypes").iterdir())) == 2


@pytest.mark.parametrize("damage", ["", "{}", '{"dtype": "int8", "ms": {}}', "[]", "\xff"])
def test_a_damaged_cache_is_measured_anew(own_cache: Path, damage: str) -> None:
    fastest_dtype(TINY, threads=1)
    (path,) = (own_cache / "dtypes").iterdir()
    path.write_bytes(damage.encode("latin1"))
    assert not fastest_dtype(TINY, threads=1)["cached"]
    assert fastest_dtype(TINY, threads=1)["cached"]


def test_a_cache_that_cannot_be_written_is_none(own_cache: Path) -> None:
    (own_cache / "dtypes").write_text("a file")
    assert not fastest_dtype(TINY, threads=1)["cached"]


def test_the_runner_takes_it_and_records_why() -> None:
    info = build_runner(MODEL, engine_config(), "cpu", "fastest").info()
    assert info["dtype"] == info["dtype_measured"]["dtype"]
    assert build_runner(MODEL, engine_config(), "cpu").info()["dtype_measured"] is None


def test_where_invariance_is_not_asked_for_nothing_is_checked_or_padded() -> None:
    info = build_runner(MODEL, engine_config(determinism="fast"), "cpu").info()
    assert info["determinism"] == "not checked: engine.determinism=fast"
    assert info["row_multiple"] == 1
