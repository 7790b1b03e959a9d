"""Sweeps: which points are measured again, what one that fails leaves, and who may fill a folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import harness.dashboard
import harness.run
from harness.cli import main
from harness.conf import UsageError, compose
from harness.metrics import write_summary
from harness.run import RunOutcome
from harness.sweep import cluster, points
from harness.sweep.folder import SweepFolder
from harness.sweep.points import Entry, draw_points
from harness.sweep.settings import split
from tests.support.run_factory import request, steady_requests, write_run

SWEEP = ["-m", "+experiment=smoke", "load.requests=4", "seed=1,2,3"]


class Runner:
    """In the place of harness.run.run: writes real records of a known run, or fails as it is told to."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.seeds: list[int] = []
        self.failing: dict[int, object] = {}

    def __call__(self, cfg) -> RunOutcome:
        self.seeds.append(cfg.seed)
        failure = self.failing.get(cfg.seed)
        if isinstance(failure, BaseException):
            raise failure
        if isinstance(failure, RunOutcome):
            return failure
        (point,) = draw_points([[]], [cfg])
        prints = {"schedule": point.schedule, "config": point.config, "host": "h", "device": "d"}
        rows = [request(0, outcome="failed")] if failure else steady_requests(40)
        run_dir = write_run(
            Path(cfg.output.dir) / f"run-{len(self.seeds)}", rows, seed=cfg.seed, fingerprint=prints
        )
        summary = write_summary(run_dir)
        return RunOutcome(0 if summary["valid"] else 3, run_dir, summary)


@pytest.fixture
def runner(tmp_path, monkeypatch) -> Runner:
    """The page is test_dashboard's, and tests/e2e has one of a real sweep: here it would only take time."""
    runner = Runner(tmp_path / "runs")
    monkeypatch.setattr(harness.run, "run", runner)
    monkeypatch.setattr(harness.dashboard, "write_dashboard", lambda runs, out: out.write_text(str(runs)))
    return runner


def sweep(runner: Runner, *more: str) -> tuple[int, list[int]]:
    """(exit code, seeds that were measured)."""
    runner.seeds.clear()
    return main([*SWEEP, f"output.dir={runner.output}", *more]), list(runner.seeds)


def folders(runner: Runner) -> list[Path]:
    return sorted(runner.output.glob("*-sweep-*"))


def entries(folder: Path) -> dict[str, dict]:
    return {run["overrides"][0]: run for run in json.loads((folder / "sweep.json").read_text())["runs"]}


def test_an_interrupted_sweep_is_continued_and_a_finished_one_begins_anew(runner, capsys):
    runner.failing[2] = KeyboardInterrupt()
    assert sweep(runner) == (3, [1, 2])
    assert "the same command continues it" in capsys.readouterr().err
    runner.failing.clear()
    assert sweep(runner) == (0, [2, 3])
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("sweep      1 of 3 points are finished; 2 left, about ")
    assert " finished  seed=1" in out
    (folder,) = folders(runner)
    assert set(entries(folder)) == {"seed=1", "seed=2", "seed=3"}
    assert (folder / "report.html").is_file()
    assert sweep(runner) == (0, [1, 2, 3])
    assert len(folders(runner)) == 2


def test_a_folder_by_name_never_measures_a_finished_point_twice_and_takes_in_more(runner, tmp_path, capsys):
    name = f"sweep.dir={tmp_path / 'mine'}"
    assert sweep(runner, name) == (0, [1, 2, 3])
    assert sweep(runner, name) == (0, [])
    assert sweep(runner, name, "seed=3,4") == (0, [4])
    assert set(entries(tmp_path / "mine")) == {f"seed={n}" for n in (1, 2, 3, 4)}
    assert "seed=1" in capsys.readouterr().out.split("run 4")[-1].split("results")[0]  # compared with all
    assert sweep(runner, name, "sweep.resume=false") == (0, [1, 2, 3])
    assert sweep(runner, f"sweep.resume={tmp_path / 'mine'}") == (0, [])
    assert not folders(runner)


@pytest.mark.parametrize(
    "damage", ["gone", "torn", "invalid", "incomplete", "other settings", "other program"]
)
def test_what_does_not_hold_is_measured_again(runner, tmp_path, monkeypatch, damage):
    folder = tmp_path / "mine"
    sweep(runner, f"sweep.dir={folder}")
    path = folder / entries(folder)["seed=2"]["run"] / "summary.json"
    summary = json.loads(path.read_text())
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        path.write_text(path.read_text()[:100])
    elif damage == "other program":
        monkeypatch.setattr(points, "sources", lambda: "0" * 16)
    else:
        change = {"invalid": (summary, "valid", False), "incomplete": (summary["run"], "complete", False)}
        change["other settings"] = (summary["run"]["fingerprint"], "config", "f" * 16)
        where, key, value = change[damage]
        where[key] = value
        path.write_text(json.dumps(summary))
    again = [1, 2, 3] if damage == "other program" else [2]
    assert sweep(runner, f"sweep.dir={folder}") == (0, again)


def test_failing_points_are_told_at_the_end_and_only_they_are_tried_again(runner, capsys):
    runner.failing = {1: UsageError("the server refuses"), 2: RuntimeError("a bug"), 3: None}
    assert sweep(runner) == (2, [1, 2, 3])
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert told == [
        "failed: run 1 of 3, seed=1: the server refuses",
        "failed: run 2 of 3, seed=2: RuntimeError: a bug",
    ]
    (folder,) = folders(runner)
    assert [run["exit_code"] for run in entries(folder).values()] == [2, 3, 0]
    runner.failing = {1: "invalid"}
    assert sweep(runner) == (3, [1, 2])
    assert entries(folder)["seed=1"]["error"].startswith("not valid: ")
    assert sweep(runner)[1] == [1]


def test_a_point_whose_server_crashed_is_told_with_its_last_words(runner, tmp_path, capsys):
    """As harness.run gives it: a folder with server.log, no summary, and the reason."""
    log = tmp_path / "runs" / "crashed"
    runner.failing = {2: RunOutcome(3, log, error=f"the server was ended by SIGKILL; see {log}/server.log")}
    assert sweep(runner) == (3, [1, 2, 3])
    told = f"failed: run 2 of 3, seed=2: the server was ended by SIGKILL; see {log}/server.log"
    assert told in capsys.readouterr().err.splitlines()
    runner.failing = {}
    assert sweep(runner) == (0, [2])


def test_a_sweep_of_which_nothing_was_measured_leaves_no_folder(runner):
    runner.failing = {n: UsageError("no") for n in (1, 2, 3)}
    assert sweep(runner) == (2, [1, 2, 3])
    assert not folders(runner)


def test_two_at_once_in_one_folder_are_refused(runner, tmp_path, capsys):
    with SweepFolder(tmp_path / "mine", "plan"):
        assert sweep(runner, f"sweep.dir={tmp_path / 'mine'}") == (2, [])
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "process " in err
    assert sweep(runner, f"sweep.dir={tmp_path / 'mine'}")[0] == 0


def test_every_point_is_on_disk_before_the_next_begins(runner, tmp_path):
    class Killed(BaseException):
        """Nothing of ours catches it: what is on disk then is what kill -9 would leave."""

    runner.failing[3] = Killed()
    with pytest.raises(Killed):
        sweep(runner, f"sweep.dir={tmp_path / 'mine'}")
    assert set(entries(tmp_path / "mine")) == {"seed=1", "seed=2"}


@pytest.mark.parametrize(
    ("args", "needles"),
    [
        (["sweep.dir=x"], ["needs -m"]),
        (["-m", "sweep.die=x"], ["sweep.dir", "sweep.resume"]),
        (["-m", "sweep.dir="], ["needs a folder"]),
        (["-m", "sweep.resume={tmp}/none"], ["holds no sweep.json"]),
        (["-m", "sweep.dir={tmp}/full"], ["something else"]),
        (["-m", "hydra.launcher.ray.init.address=auto"], ["hydra/launcher=ray"]),
        (["-m", "hydra/launcher=nosuch"], ["hydra/launcher=nosuch"]),
    ],
)
def test_what_a_sweep_cannot_be_told(args, needles, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    assert main([arg.format(tmp=tmp_path) for arg in args] + [f"output.dir={tmp_path / 'runs'}"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert all(needle in err for needle in needles)


def test_settings_of_the_sweep_do_not_reach_its_runs():
    settings, rest = split(["seed=1", "+sweep.dir=~/x", "hydra/launcher=ray", "hydra.launcher.ray.x=1"])
    assert rest == ["seed=1"]
    assert settings.folder == Path.home() / "x"
    assert settings.launcher == ("hydra/launcher=ray", "hydra.launcher.ray.x=1")


def test_a_worker_elsewhere_sends_its_run_directory_back(runner, tmp_path):
    """As on a Ray cluster whose hosts share no disk: the worker finds no sweep where it should be."""
    combination = ["+experiment=smoke", "load.requests=4", f"output.dir={tmp_path / 'home'}"]
    (point,) = draw_points([combination], [compose(combination)])
    far = cluster.Job(
        [], combination, point.id, tmp_path / "nowhere", tmp_path / "home", "p", points.sources()
    )
    done = cluster.work(far)
    assert not (tmp_path / "home").exists()
    with SweepFolder(tmp_path / "mine", "p") as folder:
        entry = cluster._entry(point, SimpleNamespace(return_value=done), folder)
        folder.add(entry, [point])
        assert folder.finished(point) == entry
    assert (tmp_path / "home" / "run-1" / "requests.jsonl").is_file()


def test_a_worker_with_another_version_of_the_program_measures_nothing(runner, tmp_path):
    job = cluster.Job([], ["seed=1"], "id", tmp_path, tmp_path, "p", "another")
    assert "other sources" in (cluster.work(job).entry.error or "")
    assert runner.seeds == []


def test_entries_that_workers_left_behind_are_taken_over(runner, tmp_path):
    (point,) = draw_points([[]], [compose(["+experiment=smoke"])])
    entry = Entry([], 0, "../run", point.id, points.sources(), 1.0)
    parts = tmp_path / "mine" / "points"
    parts.mkdir(parents=True)
    (parts / "a.json").write_text(json.dumps(entry.as_json()))
    (parts / "b.json").write_text('{"torn')
    with SweepFolder(tmp_path / "mine", "p") as folder:
        folder.take_parts([point])
        assert folder.entries == {point.id: entry}
    assert not list(parts.iterdir())
