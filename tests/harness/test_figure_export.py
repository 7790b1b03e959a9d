"""Figures as files: the size asked for, the title and every name in it, both themes; and clear refusals."""

from __future__ import annotations

import os
import shutil
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from harness.dashboard import export
from harness.dashboard.__main__ import main
from harness.dashboard.export import ExportError, export_figure, slug
from tests.harness.test_dashboard import make_run

LINES = {
    "title": "TTFT & <throughput> of a very long name that would not fit into one line of a narrow picture",
    "data": [
        {"type": "scatter", "mode": "lines", "name": name, "x": [1, 10, 100], "y": [k, 2 * k, 3 * k]}
        | {"line": {"color": colour}}
        for k, (name, colour) in enumerate((("static", "#0072B2"), ("chunked", "#D55E00")), 1)
    ],
    "layout": {"xaxis": {"type": "log", "title": {"text": "ms"}}, "yaxis": {"type": "linear"}},
}


@pytest.fixture(scope="module")
def chromium() -> None:
    if not any(map(shutil.which, export.BROWSERS)):
        assert not os.environ.get("BATCHMARK_REQUIRE_CHROMIUM"), "chromium is not installed"
        pytest.skip("chromium is not installed: no figure is exported")


@pytest.mark.e2e
@pytest.mark.usefixtures("chromium")
def test_one_figure_as_svg_and_as_png_of_the_size_asked_for(tmp_path: Path) -> None:
    png, svg = (export_figure(LINES, tmp_path / "deep" / name, 800, 500) for name in ("a.png", "a.svg"))
    assert struct.unpack(">II", png.read_bytes()[16:24]) == (800, 500)
    root = ET.parse(svg).getroot()
    assert (root.get("width"), root.get("height")) == ("800", "500")
    text = " ".join(e.text for e in root.iter("{http://www.w3.org/2000/svg}text") if e.text)
    assert LINES["title"] in text  # wrapped, not cut
    assert {"static", "chunked", "ms"} <= set(text.split())
    assert LINES["layout"] == {"xaxis": {"type": "log", "title": {"text": "ms"}}, "yaxis": {"type": "linear"}}


@pytest.mark.e2e
@pytest.mark.usefixtures("chromium")
def test_a_line_alone_is_named_where_the_figure_asks_for_it(tmp_path: Path) -> None:
    alone = {**LINES, "data": LINES["data"][:1], "layout": {**LINES["layout"], "showlegend": True}}
    assert ">static</text>" in export_figure(alone, tmp_path / "a.svg", 800, 500).read_text()


@pytest.mark.e2e
@pytest.mark.usefixtures("chromium")
def test_every_figure_of_a_page_in_the_theme_asked_for(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run")
    for theme in ("light", "dark"):
        out = tmp_path / theme
        options = ["--export", str(out), "--format", "svg", "--theme", theme]
        assert main([str(run), *options]) == 0
        assert sorted(map(str, out.iterdir())) == sorted(capsys.readouterr().out.split("\n")[:-1])
    names = {path.name for path in (tmp_path / "light").iterdir()}
    assert "01-time-to-first-token.svg" in names
    assert len(names) >= 10
    (seats,) = (tmp_path / "dark").glob("*-slot-timeline.svg")
    assert seats.read_text().count("<path") > 10
    assert ">decode</text>" in seats.read_text()
    light, dark = ((tmp_path / t / "01-time-to-first-token.svg").read_text() for t in ("light", "dark"))
    assert export.GROUNDS["light"][0] in light
    assert export.GROUNDS["dark"][0] in dark


def test_what_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch) -> None:
    for arguments, needle in (
        ((LINES, tmp_path / "a.jpg"), "png, svg"),
        ((LINES, tmp_path / "a.png", 10), "width=10"),
        ((LINES, tmp_path / "a.png", 800, 10**9), "height="),
    ):
        with pytest.raises(ExportError, match=needle):
            export_figure(*arguments)
    monkeypatch.setattr(export.shutil, "which", lambda name: None)
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "none"))
    with pytest.raises(ExportError, match="apt-get install chromium"):
        export_figure(LINES, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_titles_become_file_names() -> None:
    assert slug("Normalized latency: E2E over output tokens") == "normalized-latency-e2e-over-output-tokens"
    assert slug("../..") == "figure"
    assert slug("Größe/№ 1") == "groe-no-1"
