"""The bench measures what it says it measures."""

from __future__ import annotations

import json

import pytest

from engines import bench_scheduler, busy


@pytest.mark.parametrize("preset", busy.presets())
def test_the_engine_is_as_busy_as_the_bench_says(preset: str) -> None:
    engine = busy.busy_engine(preset, running=8, waiting=20)
    busiest = 0
    for _ in range(40):
        busy.top_up(engine, 20)
        engine.step()
        busiest = max(busiest, len(engine.scheduler.running) + len(engine.scheduler.ended))
        assert len(engine.scheduler.waiting) >= 12
    assert busiest >= 6
    assert engine.stats().preemptions == 0


def test_a_table_for_people_and_a_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--presets", "continuous", "static", "--running", "2", "4", "--waiting", "3", "--steps", "5"]
    assert bench_scheduler.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        *("preset", "running", "schedule", "publish", "sum", "assemble", "records", "growth"),
    ]
    result = json.loads(lines[-1])
    assert [(row["preset"], row["running"]) for row in result["rows"]] == [
        ("continuous", 2),
        ("continuous", 4),
        ("static", 2),
        ("static", 4),
    ]
    for row in result["rows"]:
        assert row["sum"] == pytest.approx(row["schedule"] + row["publish"], abs=0.3)
        assert min(row["schedule"], row["publish"], row["assemble"], row["records"]) > 0
    assert (result["waiting"], result["steps"], result["unit"]) == (3, 5, "us")


def test_an_unknown_preset_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_scheduler.main(["--presets", "magic"]) == 2
    assert capsys.readouterr().err.startswith("--presets magic: choose from chunked, continuous,")
