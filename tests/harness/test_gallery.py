"""The experiments as a whole: each in virtual time to its golden outcome, the gallery, what lists them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from engines.config import EngineConfig
from harness.conf import FOLDER, compose
from harness.experiments import command, gallery
from harness.experiments.experiment import Bench, Claim, Findings, Table
from harness.experiments.outcome import fitted_cost
from harness.experiments.registry import NAMES, all_experiments, experiment
from harness.experiments.result import result, text
from harness.plan import draw_schedule

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("experiments_golden.json")
"""Made by: python -m tests.harness.test_gallery"""


@lru_cache
def findings_of(name: str) -> Findings:
    """Of a smoke run in virtual time."""
    return experiment(name).run(Bench(name, smoke=True))


def outcome(name: str) -> dict[str, Any]:
    """What it says: the same figures on every machine."""
    found = result(experiment(name), findings_of(name), real=False, smoke=True, seed=0, seconds=0.0)
    return {
        "verdict": found["verdict"],
        "measured": [claim["measured"] for claim in found["claims"]],
        "tables": [table["rows"] for table in found["tables"]],
        "ratios": found["ratios"],
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_in_virtual_time_comes_out_as_it_always_did(name: str) -> None:
    assert outcome(name) == json.loads(GOLDEN.read_text(encoding="utf-8"))[name]


def test_a_longer_slice_wastes_slots_and_a_shorter_one_computes_again() -> None:
    found = findings_of("scls_slices").outcomes["400"]
    short, middle, whole = (found[name] for name in ("S=16", "S=64", "S=inf"))
    assert short.recomputed > 2 * middle.recomputed > whole.recomputed == 0
    assert short.slot_waste < whole.slot_waste > 2 * middle.slot_waste
    assert middle.output_tokens_per_s > max(short.output_tokens_per_s, whole.output_tokens_per_s)
    assert found["continuous, incremental"].output_tokens_per_s > middle.output_tokens_per_s


def test_max_utilization_pays_where_a_bigger_batch_does_and_costs_where_it_does_not() -> None:
    for machine, part in findings_of("noevict_vs_maxutil").outcomes.items():
        calm, full = part["no_evict, no pressure"], part["max_utilization, no pressure"]
        assert replace(calm, kv_mean=0.0) == replace(full, kv_mean=0.0)
        calm, full = part["no_evict, pressure"], part["max_utilization, pressure"]
        assert calm.preemptions == calm.recomputed == 0 < full.recomputed
        assert full.tpot_p99_ms > 1.2 * calm.tpot_p99_ms
        assert (full.output_tokens_per_s > calm.output_tokens_per_s) == machine.startswith("below")


def test_every_experiment_has_a_preset_whose_requests_fit_its_engine() -> None:
    presets = {path.stem for path in (FOLDER / "experiment").glob("*.yaml")}
    assert set(NAMES) <= presets
    for name in NAMES:
        cfg = compose([f"experiment={name}", "load.requests=40"])
        longest = max(row.prompt_tokens + row.max_tokens for row in draw_schedule(cfg))
        assert longest <= EngineConfig.from_mapping(dict(cfg.engine)).max_model_len, name


def test_the_table_of_the_documentation_lists_what_there_is() -> None:
    doc = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in doc.splitlines() if line.startswith("| `")]
    assert listed == list(NAMES)
    for e in all_experiments():
        assert f"| `{e.name}` | {command.minutes(e.minutes)}, {'real' if e.real else 'virtual'} |" in doc


def test_the_list_names_every_experiment_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(NAMES) + 1]] == list(NAMES)


def test_a_name_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["anyscale"]) == 2
    assert "anyscale: no such experiment" in capsys.readouterr().err


def test_a_broken_promise_is_a_regression_and_a_published_figure_that_did_not_come_out_is_not() -> None:
    def code(**claim: Any) -> int:
        one = {"text": "t", "measured": "m", "promise": False, "held": False}
        return command.exit_code({"claims": [one | claim]})

    assert (code(), code(promise=True), code(promise=True, held=True)) == (0, 1, 0)


def arguments(*flags: str) -> argparse.Namespace:
    base = {
        "output": None,
        "virtual": True,
        "real": False,
        "smoke": True,
        "seed": 0,
        "resume": True,
        "timeout": 60.0,
    }
    return argparse.Namespace(**(base | dict.fromkeys(flags, True)))


def finding(name: str, held: bool = True) -> dict[str, Any]:
    import plotly.graph_objects as go

    chosen = experiment(name)
    claims = [Claim("a < b", "2 x & more", "3 x | less", held)]
    figure = go.Figure(layout={"title": {"text": "a title"}})
    findings = Findings(claims, "of <that>", [Table(("a", "b"), [["1", "2|3"]])], {}, figure)
    return result(chosen, findings, real=False, smoke=True, seed=0, seconds=1.0)


def test_the_gallery_goes_on_past_failures_skips_what_is_there_and_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gallery, "draw", lambda figure, path: None)
    gallery.write_result(finding("orca_latency", held=False), tmp_path)
    ran = []

    def apart(name: str, folder: Path, args: argparse.Namespace) -> int:
        ran.append(name)
        if name == "scls_slices":
            gallery.write_result(finding(name), folder)
            return 0
        return 3

    monkeypatch.setattr(gallery, "run_apart", apart)
    args = arguments()
    args.output = tmp_path
    assert gallery.gallery(args) == 3
    assert ran == [name for name in NAMES if name != "orca_latency"]
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert readme.count("| [") == 2
    assert "3 x \\| less | **not held** |" in readme
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "of &lt;that&gt;" in page
    assert "2 x &amp; more" in page
    assert "orca_latency" in capsys.readouterr().out


def test_what_was_made_in_another_form_or_cut_off_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "orca_latency.json").write_text(json.dumps(finding("orca_latency")), encoding="utf-8")
    assert gallery.finished(tmp_path, "orca_latency", arguments())
    other = arguments()
    other.smoke = False
    assert not gallery.finished(tmp_path, "orca_latency", other)
    (tmp_path / "orca_latency.json").write_text('{"schema_version": 1, "verd', encoding="utf-8")
    assert not gallery.finished(tmp_path, "orca_latency", arguments())


def test_a_child_that_takes_too_long_is_ended_and_the_run_counts_as_invalid(tmp_path: Path) -> None:
    args = arguments()
    args.timeout = 0.05
    assert gallery.run_apart("cancel_storm", tmp_path, args) == 3


@pytest.mark.e2e
def test_a_real_experiment_from_the_command_to_its_files(tmp_path: Path) -> None:
    args = arguments()
    args.virtual, args.timeout = False, 300.0
    assert gallery.run_apart("cancel_storm", tmp_path, args) == 0
    found = json.loads((tmp_path / "cancel_storm.json").read_text(encoding="utf-8"))
    assert (found["mode"], found["smoke"], found["name"]) == ("real", True, "cancel_storm")
    assert all(o["completed"] > 0 for o in found["outcomes"].values())
    assert found["claims"][0]["held"]
    assert found["machine"]["cores"] >= 1
    assert found["figure"]["data"]
    markdown = (tmp_path / "cancel_storm.md").read_text(encoding="utf-8")
    assert "five ratios" in markdown
    assert "cancel_storm.png" in markdown
    assert "verdict: smoke run" in text(found)


def test_the_cost_of_passes_is_found_again_in_their_log() -> None:
    from harness.experiments.simulation import Cost

    true = Cost(step=0.004, row=0.0002, token=0.00005)
    (played,) = Bench("cancel_storm").play("engine=continuous", cost=true)
    fitted = fitted_cost([played.log])
    assert (fitted.step, fitted.row, fitted.token) == pytest.approx((0.004, 0.0002, 0.00005), rel=1e-3)
    assert fitted.ridge == pytest.approx(20, rel=1e-2)


def test_the_ridge_is_measured_apart_where_all_batches_of_an_experiment_are_alike() -> None:
    bench = Bench("static_is_enough", real=True)
    (played,) = bench.play("engine=continuous", "load.requests=2", clients=1)
    assert {s.num_seqs for s in played.log.steps} == {1}  # from which no cost of a second row follows
    seats = bench.ratios(played).seats_to_ridge
    assert 1 / 20 < seats < 20, seats  # 16 seats of model=tiny; a row that costs nothing, or all: 1e-5, 1e6


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps({name: outcome(name) for name in NAMES}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
