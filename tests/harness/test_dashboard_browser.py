"""The page in a real browser, from disk: drawn without an error or the network, and walked through."""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.dashboard import write_dashboard
from tests.harness.test_attribution import long_prompt_stalls_two
from tests.harness.test_dashboard import make_run
from tests.harness.test_seats import static_batch

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.e2e
TABS = ["overview", "latency", "time", "engine", "waits", "users", "figures", "settings", "tables"]
FIT = "document.documentElement.scrollWidth"
LABELS = """tab => [...document.querySelectorAll(`#${tab} .plot`)].flatMap(plot => ["x", "y"].map(axis => {
  const boxes = [...plot.querySelectorAll(`.${axis}tick text`)].map(t => t.getBoundingClientRect())
    .filter(box => box.width);
  const over = boxes.slice(1).some((box, i) => axis === "x" && box.left < boxes[i].right);
  return [plot._fullLayout[`${axis}axis`].type, boxes.length, over, plot.id + axis]; }))"""
"""Of each axis of a tab: its type, how many labels it has, whether two of them overlap, and where it is."""
EVIL = 'chat"><img src=x onerror=window.hurt=1>%{x}\u2028\U0001f600,=1+1'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        assert not os.environ.get("BATCHMARK_REQUIRE_CHROMIUM"), "chromium is not installed"
        pytest.skip("chromium is not installed: the page is not opened in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static run whose batch is padded and held beside a chunked one with a stall."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [static_batch(folder / "a"), long_prompt_stalls_two(folder / "b")]
    return write_dashboard(runs, folder / "page.html")


class Pages:
    """Opens a page once for all tests that want it so; keeps what went wrong, and what was asked for."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.pages: dict[tuple[Path, int, str], Any] = {}
        self.problems: list[str] = []
        self.asked: list[str] = []

    def __call__(self, file: Path, width: int = 1280, scheme: str = "light") -> Any:
        if (page := self.pages.get((file, width, scheme))) is None:
            page = self.browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("pageerror", lambda error: self.problems.append(str(error)))
            page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
            page.on("request", lambda r: self.asked.append(r.url))
            page.goto(file.as_uri())
            page.wait_for_selector("body[data-ready=yes]", timeout=120_000)
            self.pages[file, width, scheme] = page
        page.bring_to_front()
        page.click("#tabs a[href='#overview']")
        return page


@pytest.fixture(scope="module")
def pages(browser: Any) -> Pages:
    return Pages(browser)


@pytest.fixture
def opened(pages: Pages) -> Iterator[Pages]:
    yield pages
    assert pages.problems == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in pages.asked), pages.asked


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_chart_is_drawn_in_both_themes_and_on_a_phone(
    opened: Any, compared: Path, width: int, scheme: str
) -> None:
    page = opened(compared, width, scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for tab in TABS:
        page.click(f"#tabs a[href='#{tab}']")
        assert page.evaluate(FIT) <= width, tab  # the page itself never scrolls sideways
        drawn = page.evaluate(
            f"[...document.querySelectorAll('#{tab} .plot')].map(p => p.querySelectorAll('path').length)"
        )
        assert all(count > 0 for count in drawn), tab
        for kind, labels, overlap, where in page.evaluate(LABELS, tab):
            assert labels > (kind != "category"), where  # one label is no scale
            assert not overlap, where
        assert page.evaluate(f"getComputedStyle(document.getElementById('{tab}')).display") == "block"
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    page.click("#tabs a[href='#latency']")  # what was hidden is drawn again, in the new theme
    themes = page.evaluate("[...document.querySelectorAll('#latency .plot')].map(p => p.dataset.theme)")
    assert set(themes) == {"light" if scheme == "dark" else "dark"}


def test_what_only_one_of_the_runs_has_says_whose_it_is(opened: Any, compared: Path) -> None:
    page = opened(compared)
    page.click("#tabs a[href='#waits']")
    names = "[...document.querySelectorAll('#stalls .legendtext')].map(t => t.textContent)"
    assert page.evaluate(names)[0] == "continuous"


def test_a_name_is_not_broken_in_the_head_of_a_column(opened: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name) for name in ("static", "continuous", "chunked")]
    page = opened(write_dashboard(runs, tmp_path / "page.html"), 390)
    page.click("#tabs a[href='#figures']")
    heads = page.evaluate(
        "[...document.querySelectorAll('#figures table:first-of-type thead th')].slice(0, 4)"
        ".map(h => [h.textContent.trim(), [...h.childNodes].filter(n => n.nodeType === 3 && n.data.trim())"
        ".map(n => { const r = document.createRange(); r.selectNode(n);"
        " return r.getClientRects().length; })])"
    )
    assert dict(heads)["continuous"] == [1]


def test_a_block_of_the_slot_timeline_opens_the_life_of_its_request(opened: Any, compared: Path) -> None:
    page = opened(compared)
    assert page.is_hidden("#life")
    page.evaluate(
        "(() => { const plot = document.getElementById('seats');"
        "const trace = plot.data.findIndex(t => t.name === 'ended row');"
        "const customdata = plot.data[trace].customdata[0], y = plot.data[trace].y[0];"
        "plot.emit('plotly_click', { points: [{ customdata, y }] }); })()"
    )
    told = page.inner_text("#life")
    assert "r000000 in static" in told
    assert "prompt: 20 tokens after 30 of left padding, iteration 0, with prompts of r000001 (50)" in told
    assert "its answer has ended, its row is computed on: iterations 2 to 3" in told
    page.click("#life button:has-text('in continuous')")  # the same request under the other strategy
    told = page.inner_text("#life")
    assert "STALL before chunk 4: prompts of r000002 (rag) 900 tokens" in told
    assert "stalled by others' prefill 325 ms" in told
    assert "has a seat and is left out: iteration 4" in told
    page.keyboard.press("Escape")
    assert page.is_hidden("#life")


def test_the_keyboard_alone_is_enough(opened: Any, compared: Path) -> None:
    page = opened(compared)
    page.focus("#tabs a[aria-selected=true]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#latency"
    page.keyboard.press("Home")
    page.focus("#seats")
    before = page.evaluate("document.getElementById('seats').layout.xaxis.range")
    page.keyboard.press("+")
    closer = page.evaluate("document.getElementById('seats').layout.xaxis.range")
    assert closer[1] - closer[0] == pytest.approx((before[1] - before[0]) / 2)
    page.keyboard.press("Home")
    page.keyboard.press("n")
    assert "Enter opens it" in page.inner_text("#seat-note")
    page.keyboard.press("Enter")
    assert page.is_visible("#life")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "seats"  # back where it came from
    page.focus("#tabs a[aria-selected=true]")
    page.keyboard.press("End")
    page.focus("#table tbody tr")
    page.keyboard.press("Enter")
    assert page.inner_text("#life-title") == "r000000 in static"


def test_raw_tables_are_searched_sorted_and_downloaded(opened: Any, compared: Path) -> None:
    page = opened(compared)
    page.click("#tabs a[href='#tables']")
    page.select_option("#table-run", "1")
    page.fill("#table-search", "rag")
    assert page.locator("#table tbody tr").count() == 1
    assert page.inner_text("#table-note").startswith("1 of 3 requests")
    page.fill("#table-search", "")
    page.click("#table thead button:has-text('E2E')")
    page.click("#table thead button:has-text('E2E')")
    rows = download(page)
    ends = [float(row["E2E, ms"]) for row in rows]
    assert ends == sorted(ends, reverse=True) == pytest.approx([411, 411, 331])
    assert [row["class"] for row in rows] == ["chat", "chat", "rag"]
    page.select_option("#table-kind", "steps")
    steps = download(page)
    assert [int(row["prefill_tokens"]) for row in steps] == [0] * 6  # as the log says
    assert float(steps[3]["took, ms"]) == 310
    page.select_option("#table-kind", "stalls")
    assert [row["whose prompts (tokens)"] for row in download(page)] == ["r000002 (rag) 900"] * 2
    page.select_option("#table-kind", "figures")
    figures = {row["path in summary.json"]: row for row in download(page)}
    assert float(figures["counts.completed"]["static"]) == 3


def download(page: Any) -> list[dict[str, str]]:
    with page.expect_download() as found:
        page.click("#table-csv")
    return list(csv.DictReader(Path(found.value.path()).read_text().splitlines()))


def test_names_are_text_wherever_they_stand(opened: Any, tmp_path: Path) -> None:
    from tests.support.run_factory import engine_request, request, step, write_run

    rows = [
        request(i, [(1.0 + i, 1), (1.5 + i, 1)], request_class=EVIL, tenant=f"{EVIL}{i % 2}")
        for i in range(8)
    ]
    rows[0]["id"] = EVIL
    engine = [
        engine_request(row | {"id": f"r{i}"}, admitted=0.5) | {"id": row["id"]} for i, row in enumerate(rows)
    ]
    steps = [step(i, start=0.5 + i, duration=0.4, ids=[i], kind=[0], tokens=[9]) for i in range(8)]
    run = write_run(tmp_path / "run", rows, engine=engine, steps=steps, name=EVIL)
    page = opened(write_dashboard([run], tmp_path / "page.html"))
    for tab in TABS:
        page.click(f"#tabs a[href='#{tab}']")
    page.click("#table tbody tr")
    assert page.inner_text("#life-title").startswith(EVIL.split("\u2028")[0])
    assert page.evaluate("window.hurt") is None
    assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0


def test_an_invalid_run_is_red_in_both_themes(opened: Any, tmp_path: Path) -> None:
    bad = write_dashboard([make_run(tmp_path / "bad", complete=False)], tmp_path / "bad.html")
    for scheme in ("light", "dark"):
        page = opened(bad, scheme=scheme)
        for element, side in ((".banner.bad", "color"), ("h1 .invalid", "backgroundColor")):
            colour = page.evaluate(f"getComputedStyle(document.querySelector('{element}')).{side}")
            red, green, blue = (int(n) for n in re.findall(r"\d+", colour)[:3])
            assert red > 1.5 * green
            assert red > 1.5 * blue
