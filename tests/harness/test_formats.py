"""What the gate leaves for CI: each form as its readers document it, and no number where none is known."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from harness.formats import (
    Figure,
    Report,
    bencher,
    bigger_is_better,
    junit,
    markdown,
    pytorch,
    smaller_is_better,
)
from harness.formats.files import FORMATS
from harness.gate import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE, main
from harness.names import label
from tests.support.gated import METRICS, PRINTS, UNKNOWN, gated, of_another
from tests.support.run_factory import default_meta
from workloads import output

TTFT, TPOT, TOKENS = METRICS
DOCS = Path(__file__).parents[2] / "docs" / "gates.md"
CI = {
    "GITHUB_REPOSITORY": "you/engine",
    "GITHUB_HEAD_REF": "",
    "GITHUB_REF_NAME": "main",
    "GITHUB_SHA": "0f1e2d",
    "GITHUB_RUN_ID": "1234567890123",
    "GITHUB_RUN_ATTEMPT": "1",
}


def write_all(run: Path, baseline: Path, out: Path) -> int:
    """The gate's exit code; a file a format in out."""
    options = [word for name in FORMATS for word in (f"--{name}", str(out / name))]
    return main([str(run), "--baseline", str(baseline), *options])


def numbers(out: Path) -> dict[str, dict[str, float]]:
    """What each tracker would take for a measured value, by metric."""
    gab = [*load(out / "gab-smaller"), *load(out / "gab-bigger")]
    return {
        "gab": {entry["name"].split()[-1]: entry["value"] for entry in gab},
        "bencher": {
            measure: metric["value"]
            for measures in load(out / "bencher").values()
            for measure, metric in measures.items()
        },
        "pytorch": {r["metric"]["name"]: r["metric"]["benchmark_values"][0] for r in load(out / "pytorch")},
        "junit": {
            p.attrib["name"].removesuffix(".measured"): float(p.attrib["value"])
            for p in ET.parse(out / "junit").iter("property")
            if p.attrib["name"].endswith(".measured")
        },
    }


def load(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}, which is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def cases(path: Path) -> dict[str, list[str]]:
    """The verdict elements of each JUnit test case, after a check that the counts add up."""
    root = ET.parse(path).getroot()
    suites = root.findall("testsuite")
    found = [case for suite in suites for case in suite.findall("testcase")]
    tags = ("failure", "error", "skipped")
    kinds = {case.attrib["name"]: [child.tag for child in case if child.tag in tags] for case in found}
    assert len(kinds) == len(found)  # names are unique
    assert root.tag == "testsuites"
    for element in (root, *suites):
        counted = [int(element.attrib[key]) for key in ("tests", "failures", "errors", "skipped")]
        assert counted == [len(found), *(sum(tag in k for k in kinds.values()) for tag in tags)]
        assert float(element.attrib["time"]) == sum(float(case.attrib["time"]) for case in found)
    assert all(len(kind) <= 1 for kind in kinds.values())
    return kinds


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run that is slower than its baseline and knows one figure less."""
    folder = tmp_path_factory.mktemp("gated")
    before = dict(os.environ)
    os.environ.update(CI)
    try:
        assert write_all(*gated(folder), folder / "made" / "out") == REGRESSION
    finally:
        os.environ.clear()
        os.environ.update(before)
    return folder / "made" / "out"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a baseline that it meets."""
    folder = tmp_path_factory.mktemp("held")
    gated(folder, gap=0.02, unknown=False)
    return folder


@pytest.fixture
def steady(held: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(run, baseline), both free to be changed."""
    run, baseline = shutil.copytree(held / "run", tmp_path / "run"), tmp_path / "chat.json"
    return run, Path(shutil.copy(held / "chat.json", baseline))


def test_every_form_holds_the_known_figures_and_no_other(slower: Path) -> None:
    known = {TTFT: 200.0, TPOT: 25.9675, TOKENS: 104.945}
    assert numbers(slower) == dict.fromkeys(("gab", "bencher", "pytorch", "junit"), known)
    assert not list(slower.glob("*.partial"))


def test_junit_fails_the_regression_and_skips_the_unknown(slower: Path) -> None:
    assert cases(slower / "junit") == {
        "run": [],
        TTFT: [],
        TPOT: ["failure"],
        TOKENS: [],
        UNKNOWN: ["skipped"],
    }
    root = ET.parse(slower / "junit").getroot()
    failure, skipped = root.find(".//failure"), root.find(".//skipped")
    assert failure is not None
    assert skipped is not None
    assert failure.attrib["type"] == "regression"
    assert failure.attrib["message"] == (
        "regression: 26.0 ms, baseline 20.0 (+30.0 %), limit 23.0 (lower is better), "
        "95 % interval 25.4 to 26.6"
    )
    assert skipped.attrib["message"].startswith("inconclusive: no step records")


def test_github_benchmark_has_one_direction_a_file(slower: Path) -> None:
    smaller, bigger = load(slower / "gab-smaller"), load(slower / "gab-bigger")
    assert [entry["name"].split()[-1] for entry in smaller] == [TTFT, TPOT]
    assert [entry["name"].split()[-1] for entry in bigger] == [TOKENS]
    for entry in smaller + bigger:
        assert {"name", "unit", "value"} <= set(entry) <= {"name", "unit", "value", "range", "extra"}
        assert all(isinstance(value, str) for key, value in entry.items() if key != "value")
    assert (smaller[1]["unit"], smaller[1]["range"]) == ("ms", "25.35 to 26.585")
    assert bigger[0]["unit"] == "tokens/s"
    assert "range" not in bigger[0]


def test_bencher_takes_the_interval_as_bounds(slower: Path) -> None:
    [(benchmark, measures)] = load(slower / "bencher").items()
    assert benchmark == "chat/continuous/tiny"
    assert measures[TPOT] == {"value": 25.9675, "lower_value": 25.35, "upper_value": 26.585}
    assert set(measures[TOKENS]) == {"value"}


def test_pytorch_records_have_the_columns_of_the_database(slower: Path) -> None:
    records = load(slower / "pytorch")
    for record in records:
        assert {type(record[key]) for key in ("timestamp", "workflow_id", "run_attempt")} == {int}
        assert (record["schema_version"], record["head_branch"]) == ("v3", "main")
        assert (record["repo"], record["head_sha"]) == ("you/engine", "0f1e2d")
        assert "job_id" not in record  # GitHub tells no number: left out, not zero
        about = [record["benchmark"], record["metric"], *record["runners"]]
        infos = [text for part in about for text in part["extra_info"].values()]
        assert all(isinstance(text, str) for text in infos)
        assert set(record["metric"]) == {"name", "benchmark_values", "target_value", "extra_info"}
    assert records[1]["metric"]["target_value"] == 22.9713
    assert records[1]["metric"]["extra_info"]["ci95_high"] == "26.585"


def test_markdown_is_a_table_that_says_what_is_unknown(slower: Path) -> None:
    text = (slower / "markdown").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert text.startswith("### Gate: regression, chat/continuous/tiny\n")
    assert {line.count("|") for line in table} == {8}
    name = label(UNKNOWN)
    row = next(line for line in table if name in line)
    assert row == f"| {name} | 0.90 | - | - | - | 0.88 | **inconclusive** |"
    assert f"- {name}: no step records" in text


def test_markdown_is_appended_and_the_others_replaced(tmp_path: Path, steady: tuple[Path, Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in FORMATS:
        (out / name).write_text("# before\n\n")
    assert write_all(*steady, out) == PASS
    assert write_all(*steady, out) == PASS
    text = (out / "markdown").read_text()
    assert text.startswith("# before\n\n### Gate: pass")
    assert text.count("### Gate: pass") == 2
    assert cases(out / "junit") == {"run": [], TTFT: [], TPOT: [], TOKENS: []}


def test_another_machine_is_skipped_and_joins_no_history(slower: Path, tmp_path: Path) -> None:
    run, baseline = slower.parents[1] / "run", Path(shutil.copy(slower.parents[1] / "chat.json", tmp_path))
    assert write_all(run, of_another(baseline, "host"), tmp_path) == INCONCLUSIVE
    assert set(map(tuple, cases(tmp_path / "junit").values())) == {("skipped",)}
    found = numbers(tmp_path)
    assert (found["gab"], found["bencher"]) == ({}, {})
    assert set(found["pytorch"]) == set(METRICS)  # these records say which machine it was
    record = load(tmp_path / "pytorch")[1]
    assert record["runners"][0]["extra_info"]["host_fingerprint"] == PRINTS["host"]
    assert record["metric"]["extra_info"]["verdict"] == "not judged"
    text = (tmp_path / "markdown").read_text()
    assert "another machine" in text
    assert "**regression**" not in text


@pytest.mark.parametrize("why", ["the run", "another test"])
def test_an_invalid_run_is_an_error_without_numbers(
    tmp_path: Path, steady: tuple[Path, Path], why: str
) -> None:
    run, baseline = steady
    if why == "the run":
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(
            json.dumps({**summary, "valid": False, "invalid_reasons": ["died"]})
        )
    else:
        of_another(baseline, "config")
    assert write_all(run, baseline, tmp_path) == INVALID
    assert cases(tmp_path / "junit") == {"run": ["error"]}
    assert not any(numbers(tmp_path).values())
    assert (tmp_path / "markdown").read_text().startswith("### Gate: invalid")


def made(reason: str = "", **changes: Any) -> Report:
    fields: dict[str, Any] = {
        "metric": TPOT,
        "better": "lower",
        "value": 20.0,
        "ci95": (19.0, 21.0),
        "baseline": 20.0,
        "change": 0.0,
        "limit": 23.0,
        "verdict": "pass",
        **changes,
    }
    summary = {"run": {**default_meta(), "id": "r"}, "engine": "a|b", "workload": "<c>", "model": "*d*"}
    return Report("pass", (), "base.json", (Figure(**fields, reason=reason or None),), summary)


def test_an_unreliable_figure_is_shown_with_a_mark_and_exported_nowhere() -> None:
    report = made("too few samples for a 95 % interval", verdict="inconclusive", ci95=None, reliable=False)
    assert "| ~20.0 | - |" in markdown(report)
    assert (bencher(report), smaller_is_better(report), bigger_is_better(report)) == ("{}\n", "[]\n", "[]\n")
    assert pytorch(report, {}) == "[]\n"
    assert "measured" not in junit(report)


def test_text_of_others_breaks_no_form() -> None:
    report = made("a|b\n<i>\x00\ud800 & ]]>", verdict="inconclusive", value=None)
    text = markdown(report)
    assert {line.count("|") - line.count("\\|") for line in text.splitlines() if line[:1] == "|"} == {8}
    assert "<i>" not in text
    assert "\\*d\\*" in text
    skipped = ET.fromstring(junit(report).encode()).find(".//skipped")
    assert skipped is not None
    assert "<i>?? & ]]>" in skipped.attrib["message"]


def test_long_names_fit_bencher_and_stay_apart() -> None:
    first, second = (made(metric="latency_ms." + 70 * "x" + end) for end in "ab")
    measures = [name for report in (first, second) for name in json.loads(bencher(report))["<c>/a|b/*d*"]]
    assert [len(name) for name in measures] == [64, 64]
    assert measures[0] != measures[1]


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("latency_ms.itl.p99", "ms"),
        ("counts.failed", "requests"),
        ("throughput.goodput_rps", "requests/s"),
        ("throughput.slo_attainment", "ratio"),
        ("steps.useful_token_fraction", "ratio"),
        ("steps.batch_size_mean", ""),
    ],
)
def test_units(metric: str, unit: str) -> None:
    assert made(metric=metric).figures[0].unit == unit


Breaks = Callable[[Path], list[str]]
BAD: list[tuple[Breaks, str]] = [
    (lambda folder: ["--junit", str(folder)], "--junit {0}: cannot be written (not a regular file)"),
    (lambda folder: ["--bencher", str(folder / "run/meta.json/x")], "--bencher {0}/run/meta.json/x: cannot"),
    (lambda folder: ["--markdown", str(folder)], "--markdown {0}: cannot be written (Is a directory)"),
    (lambda folder: ["--pytorch", str(folder / "chat.json")], "is the file of --baseline too; name another"),
    (lambda folder: ["--junit", "x", "--gab-bigger", "./x"], "--gab-bigger x: is the file of --junit too"),
    (lambda folder: ["--write-baseline", "--junit", "x"], "--junit: nothing is judged with --write-baseline"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_what_cannot_be_written_is_one_line(
    tmp_path: Path,
    steady: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    options: Breaks,
    message: str,
) -> None:
    run, baseline = steady
    before = baseline.read_bytes()
    capsys.readouterr()
    good = [] if "--write-baseline" in options(tmp_path) else ["--gab-smaller", str(tmp_path / "good.json")]
    assert main([str(run), "--baseline", str(baseline), *options(tmp_path), *good]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: --")
    assert message.format(tmp_path) in error
    assert error.count("\n") == 1
    assert baseline.read_bytes() == before
    if "cannot" in message:
        assert load(tmp_path / "good.json")  # the others are written all the same


def test_a_full_disk_leaves_the_old_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file-size limit stands for the full disk: each write stops in its middle."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    from harness.formats.files import append

    whole = b"x" * 5000
    path = tmp_path / "summary.md"
    path.write_bytes(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for write in (append, output.whole):
            with pytest.raises(OSError):
                write(path, whole)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.md"]


def test_the_examples_of_the_docs_are_what_the_gate_writes(
    slower: Path,
) -> None:
    """docs/gates.md shows the files of this very run; of the PyTorch records the second."""
    text = DOCS.read_text()
    for name in ("markdown", "junit", "gab-smaller", "gab-bigger", "bencher", "pytorch"):
        after = text.partition(f"`--{name} FILE`\n")[2]
        shown = after.partition("```")[2].partition("\n")[2].partition("```")[0]
        made = (slower / name).read_text()
        if name == "pytorch":
            made = json.dumps(load(slower / name)[1], indent=2) + "\n"
        assert shown.strip() == made.replace(str(slower.parents[1]) + "/", "").strip(), name
