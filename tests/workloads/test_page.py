"""`python -m workloads show ... -o page.html`: the page has the table's figures and opens from disk."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from workloads.__main__ import load_workload, main
from workloads.columns import Segments
from workloads.page import figures
from workloads.page.document import render
from workloads.page.traffic import Traffic, of_schedule, of_trace, table
from workloads.presets import draw
from workloads.readers import read_trace
from workloads.reuse import reusable_share, reused_tokens

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory) -> Path:
    """Every second prompt begins with the 512 tokens of the one before."""
    path = tmp_path_factory.mktemp("traces") / "two_blocks.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 1024, "output_length": 4 + i % 5,
         "hash_ids": [2 * (i // 2), 1000 + i]}
        for i in range(400)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def shown(mooncake) -> list[Traffic]:
    workloads = [load_workload("mixed", ["requests=600"]), load_workload("chat", CHATS)]
    drawn = [of_schedule(draw(w, seed=1), w["name"]) for w in workloads]
    return [*drawn, of_trace(read_trace(mooncake), "two_blocks")]


CHATS = [
    "requests=300",
    "sessions={turns: {dist: constant, value: 3}, history: true, "
    "think_s: {dist: lognormal, mu: 1.6, sigma: 0.8, max: 60}}",
]


def figures_of(page: str) -> dict[str, dict]:
    found = re.search(r"const FIGURES = (.*?);</script>", page, re.DOTALL)
    assert found
    return {figure["title"]: figure for figure in json.loads(found[1])}


def test_the_page_has_every_chart_and_the_figures_of_the_table(shown):
    page = render(shown)
    drawn = figures_of(page)
    assert set(drawn) == {
        "Prompt",
        "Answer",
        *(f"Prompt and answer, {t.name}" for t in shown),
        "Arrivals over time",
        "Index of dispersion",
        "Prompt tokens seen before",
        "Requests of a session",
        "Think time before a later turn",
        "When users give up",
        "Transport",
        "Classes",
        "Tenants",
    }
    rows = {(row.group, row.label): row.cells for row in table(shown)}
    for cells in rows.values():
        for cell in cells:
            assert f"<td>{cell}</td>" in page
    for k, traffic in enumerate(shown):
        for title, group in (("Prompt", "prompt tokens"), ("Answer", "answer tokens")):
            trace = drawn[title]["data"][k]
            assert trace["name"] == traffic.name
            middle = trace["x"][next(i for i, y in enumerate(trace["y"]) if y >= 50)]
            assert middle == pytest.approx(float(rows[group, "p50"][k]), rel=0.02, abs=1.5)
            assert f"{trace['x'][-1]:.0f}" == rows[group, "max"][k]
        heat = drawn[f"Prompt and answer, {traffic.name}"]["data"][0]
        assert sum(z**2 for row in heat["z"] for z in row if z is not None) == pytest.approx(100, rel=1e-3)
        assert heat["x"][0] < traffic.prompts.min() <= traffic.prompts.max() < heat["x"][-1]
        for title, group in (("When users give up", "users who give up"), ("Transport", "transport")):
            for bar in drawn[title]["data"]:
                values = dict(zip(bar["y"], bar["x"], strict=True))
                told = rows[group, bar["name"]][k]
                assert told == (f"{values[traffic.name]:.1f}%" if traffic.name in values else "–")
    sessions = drawn["Requests of a session"]["data"]
    assert [(t["name"], set(t["x"])) for t in sessions] == [("chat", {3.0})]
    assert rows["sessions", "requests of one, mean"] == ("–", "3.0", "–")
    largest = next(t for t in drawn["Tenants"]["data"] if t["name"] == "mixed")
    assert f"{largest['y'][0]:.1f}%" == rows["tenants", "requests of the largest"][0]


def test_reuse_by_length_adds_up_to_the_table(shown):
    two_blocks = shown[2]
    assert two_blocks.reusable == pytest.approx(0.25)  # one block of two, in every second prompt
    (row,) = (row for row in table(shown) if row.label == "tokens seen before")
    assert row.cells[2] == "25.0%"
    chart = figures.reuse([two_blocks])["data"][0]
    assert np.mean(chart["y"]) == pytest.approx(25.0)
    assert chart["x"] == [1024.0] * 10


def test_reused_tokens_of_each_prompt():
    prompts = Segments.of([[("a", 10), ("b", 5)], [("a", 10), ("c", 5)], [("a", 12), ("b", 5)], [("a", 11)]])
    assert reused_tokens(prompts).tolist() == [0, 10, 10, 11]
    assert reusable_share(prompts) == pytest.approx(31 / 58)


def test_counts_over_time_are_all_requests_and_unlike_spans_share_no_seconds(shown):
    alone = figures.arrivals(shown[:1])["data"][0]
    width = shown[0].span_s / len(alone["x"])
    assert sum(alone["y"]) * width == pytest.approx(len(shown[0]), rel=1e-3)
    longer = Traffic(
        **{f: getattr(shown[0], f) for f in Traffic.__slots__} | {"times_s": shown[0].times_s * 9}
    )
    both = figures.arrivals([shown[0], longer])
    assert both["layout"]["xaxis"]["title"]["text"] == "% of its span"
    for trace in both["data"]:
        assert np.mean(trace["y"]) == pytest.approx(1, rel=0.01)


def test_dispersion_in_the_chart_is_that_of_the_table(shown):
    chart = figures.dispersion(shown)["data"]
    assert [t["name"] for t in chart] == [*(t.name for t in shown), "Poisson"]
    for traffic, trace in zip(shown, chart, strict=False):
        for window, value in zip(trace["x"][:-1:8], trace["y"][:-1:8], strict=True):
            assert value == pytest.approx(traffic.dispersion(window), rel=0.05, abs=0.05)


def test_a_trace_without_times_or_blocks_is_a_page_all_the_same():
    lengths = np.arange(1, 50)
    bare = Traffic(
        name="lengths <b>alone</b>",
        times_s=None,
        prompts=lengths,
        answers=lengths[::-1].copy(),
        reused=None,
        turns=None,
        think_s=None,
        tenants=None,
        classes=None,
        endings=None,
        transports=None,
    )
    page = render([bare])
    assert set(figures_of(page)) == {"Prompt", "Answer", "Prompt and answer"}
    assert "<b>alone" not in page


def test_show_prints_traces_and_presets_side_by_side(capsys, mooncake, tmp_path):
    page = tmp_path / "page.html"
    code = main(["show", str(mooncake), "rag", "length_scale=1", "--requests", "60", "-o", str(page)])
    out, err = capsys.readouterr()
    assert (code, err) == (2, "error: length_scale=1: " + err.split(": ", 2)[2]), "a trace takes no settings"
    assert str(mooncake) in err
    code = main(["show", str(mooncake), "rag", "--requests", "60", "-o", str(page)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    for word in ("two_blocks", "rag", "tokens seen before", "dispersion in 1 s", f"page: {page}"):
        assert word in out
    assert "const FIGURES" in page.read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["requests=3"], "needs a workload or a trace before its settings"),
        (["rag", "chat", "--out", "x.parquet"], "--out=x.parquet: one file takes one schedule, not 2"),
        (["rag", "-o", "/dev/null/x.html"], "--page=/dev/null/x.html: cannot be written"),
        (["/nowhere/trace.csv"], "/nowhere/trace.csv: no such file"),
        (["rag", "rog"], "workload=rog: choose from"),
    ],
)
def test_usage_errors_are_one_line(capsys, argv, words):
    assert main(["show", "--requests", "30", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.e2e
def test_a_browser_draws_every_chart_from_disk_without_the_network(tmp_path, shown):
    if CHROMIUM is None:
        assert not os.environ.get("BATCHMARK_REQUIRE_CHROMIUM"), "chromium is not installed"
        pytest.skip("chromium is not installed: the page is not opened in a browser")
    from playwright.sync_api import sync_playwright

    out = tmp_path / "page.html"
    out.write_text(render(shown), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme="dark")
        problems: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: asked.append(r.url))
        page.goto(out.as_uri())
        page.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        drawn = page.evaluate(
            "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('path, image').length)"
        )
        assert len(drawn) == 14
        assert all(count > 0 for count in drawn)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390  # nothing is cut off
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert problems == []
        assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)
        browser.close()
