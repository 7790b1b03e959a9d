"""Figures as image files, for a paper or a pull request: what the pages draw, as SVG or PNG.

A figure is plain Plotly JSON, as harness.dashboard.figures makes it (data, layout, title), or a plotly
Figure. It is drawn by the very script of the pages in a headless Chromium, with title and key above it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape, quoteattr

from harness.dashboard.data import unpack
from workloads.page import frame

WIDTH = 1200
FORMATS = ("png", "svg")
SCALE = 2
"""Pixels of the image to a pixel of the layout: text of 12 stays readable in a column of a paper."""
PLOT_HEIGHT = 300
MAX_PIXELS = 20_000
LEFT, TITLE_LINE, KEY_LINE = 12, 20, 18
FONT = 'font-family="system-ui,DejaVu Sans,sans-serif"'
GROUNDS = {
    "light": ("#ffffff", "#1b1f24"),
    "dark": ("#1d2127", "#e7eaee"),
}  # as --card and --ink of the pages
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAGE = """<!doctype html><html><head><meta charset="utf-8"><style>{css} body {{ margin: 0; }}</style></head>
<body><button id="theme" hidden></button>{places}<script>{plotly}</script>
<script>const FIGURES = {figures};</script>
<script>{script}</script></body></html>"""
DRAWN = "count => document.querySelectorAll('.plot .main-svg').length >= count"
TO_SVG = (
    "([id, width, height]) => Plotly.toImage(document.getElementById(id), {format: 'svg', width, height})"
)
KEY = """id => document.getElementById(id).data.filter(t => t.name && t.showlegend !== false)
  .map(t => [t.name, [t.line?.color, t.marker?.color].find(c => typeof c === "string") || "#999999",
    t.line?.dash || "solid"])"""
SEATS = "Slot timeline"
SEATS_KEY = """() => [document.getElementById("seats").layout.height,
  [...document.querySelectorAll("#seat-key > span")].map(label => [label.textContent,
    label.firstChild.style.background.match(/rgb\\([^)]*\\)|#\\w+/)[0], "solid"])]"""
STROKES = {"dash": "5 3", "dot": "2 2.5", "dashdot": "6 2 2 2", "longdash": "8 3", "longdashdot": "8 2 2 2"}
"""Plotly's names of broken lines, as they are drawn in the key."""


class ExportError(Exception):
    """No image can be made. The message is one line and says what to install or to change."""


def export_figure(
    fig: Any, path: str | Path, width: int = WIDTH, height: int | None = None, *, theme: str = "light"
) -> Path:
    """One figure into one file, .png or .svg. Sizes in pixels; height None takes the figure's own.

    Raises ExportError, also where there is no Chromium."""
    return export_figures([(fig, Path(path))], width, height, theme=theme)[0]


def export_figures(
    figures: Sequence[tuple[Any, Path]],
    width: int = WIDTH,
    height: int | None = None,
    *,
    theme: str = "light",
) -> list[Path]:
    """Several at once, in one browser. Raises ExportError."""
    if theme not in GROUNDS:
        raise ExportError(f"theme={theme}: choose light or dark")
    for name, size, least in (("width", width, 300), ("height", height, 150)):
        if size is not None and not least <= size <= MAX_PIXELS:
            raise ExportError(f"{name}={size}: needs {least} to {MAX_PIXELS} pixels")
    for _, path in figures:
        if path.suffix.lower()[1:] not in FORMATS:
            raise ExportError(f"{path}: the ending says the format; choose from: {', '.join(FORMATS)}")
    drawn = [_plain(figure, f"plot{number}") for number, (figure, _) in enumerate(figures)]
    if not drawn:
        return []
    plots = [_Plot(figure, width, height) for figure in drawn]
    with _browser() as (browser, failure):
        context = browser.new_context(
            color_scheme=theme,
            device_scale_factor=SCALE,
            viewport={"width": -(-width // SCALE), "height": 800},
        )
        try:
            page = context.new_page()
            page.set_content(_page(plots))
            page.wait_for_function(DRAWN, arg=len(plots))
            images = []
            for plot in plots:
                plot.set_key(page.evaluate(KEY, plot.figure["id"]))
                uri = page.evaluate(TO_SVG, [plot.figure["id"], plot.width, plot.plot_height])
                images.append(plot.svg(unquote(uri.partition(",")[2]), theme))
            for image, plot, (_, path) in zip(images, plots, figures, strict=True):
                _save(page, plot, image, path)
        except failure as error:
            raise ExportError(f"chromium could not draw the figures: {str(error).splitlines()[0]}") from None
    return [path for _, path in figures]


def _figures_of(html: str) -> list[Any]:
    """Of a dashboard, where they are packed, or of another page."""
    try:
        return list(unpack(html, "data")["figures"])
    except ValueError:
        found = re.search(r"const FIGURES = (.*?);</script>", html, re.DOTALL)
        if found is None:
            raise ExportError("the page has no figures") from None
        return list(json.loads(found[1]))


def export_page(
    html: str, folder: Path, *, format: str = "png", width: int = WIDTH, theme: str = "light"
) -> list[Path]:
    """Every figure of a page that this project wrote, each into folder/<number>-<title>.<format>."""
    if format not in FORMATS:
        raise ExportError(f"--format={format}: choose from: {', '.join(FORMATS)}")
    figures = [(figure, title_of(figure)) for figure in _figures_of(html)]
    paths = [folder / f"{number:02d}-{slug(title)}.{format}" for number, (_, title) in enumerate(figures, 1)]
    drawn = export_figures(list(zip((f for f, _ in figures), paths, strict=True)), width, theme=theme)
    if 'id="seats"' in html:
        drawn.append(
            _export_seats(html, folder / f"{len(paths) + 1:02d}-{slug(SEATS)}.{format}", width, theme)
        )
    return drawn


def _export_seats(html: str, path: Path, width: int, theme: str) -> Path:
    """The slot timeline as the page opens: its script draws it from packed columns, so the page itself is
    opened for it."""
    plot = _Plot({"title": SEATS, "layout": {}}, width, None)
    with _browser() as (browser, failure):
        try:
            size = {"width": max(300, round(plot.width)), "height": 900}
            page = browser.new_context(
                color_scheme=theme, device_scale_factor=SCALE, viewport=size
            ).new_page()
            page.set_content(html)
            page.wait_for_selector("body[data-ready=yes]")
            page.wait_for_selector("#seats[data-ready=yes]")
            plot.plot_height, key = page.evaluate(SEATS_KEY)
            plot.set_key(key)
            uri = page.evaluate(TO_SVG, ["seats", plot.width, plot.plot_height])
            _save(page, plot, plot.svg(unquote(uri.partition(",")[2]), theme), path)
        except failure as error:
            raise ExportError(f"chromium could not draw {path.name}: {str(error).splitlines()[0]}") from None
    return path


def _save(page: Any, plot: _Plot, image: str, path: Path) -> None:
    data = image.encode()
    if path.suffix.lower() == ".png":
        page.set_content(f"<style>body{{margin:0}}svg{{display:block}}</style>{plot.inline(image)}")
        data = page.locator("svg").first.screenshot()
    _write(path, data)


def title_of(figure: Any) -> str:
    """The figure's own title, or the one of its layout."""
    title = figure.get("title") or figure.get("layout", {}).get("title") or ""
    return str(title.get("text") or "") if isinstance(title, dict) else str(title)


def slug(text: str) -> str:
    """A title as part of a file name: small ASCII letters, digits and hyphens."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60] or "figure"


class _Plot:
    """One figure with its place: title and key above, the chart below. Sizes in pixels of the layout."""

    def __init__(self, figure: dict[str, Any], width: int, height: int | None) -> None:
        self.figure = figure
        self.width = width / SCALE
        self.title = textwrap.wrap(title_of(figure), max(20, int(self.width / 8.5)))
        self.key: list[tuple[float, int, str, str, str]] = []  # x, line, name, colour, dash
        self.plot_height = float(figure["layout"].get("height") or PLOT_HEIGHT)
        self._asked = None if height is None else height / SCALE

    def set_key(self, entries: Sequence[Sequence[str]]) -> None:
        """(name, colour, dash) of each trace. A key of our own: Plotly's would scroll where it is long. One
        entry alone is left out unless the figure asks for it."""
        known = list(dict.fromkeys((str(name), str(colour), str(dash)) for name, colour, dash in entries))
        x, line = float(LEFT), 0
        for name, colour, dash in known if len(known) > 1 or self.figure.get("keyed") else ():
            needed = 20 + 6.6 * len(name)
            if x > LEFT and x + needed > self.width - LEFT:
                x, line = float(LEFT), line + 1
            self.key.append((x, line, name, colour, dash))
            x += needed + 14
        if self._asked is not None:
            self.plot_height = max(100.0, self._asked - self.head)

    @property
    def head(self) -> float:
        lines = self.key[-1][1] + 1 if self.key else 0
        return 12.0 + TITLE_LINE * len(self.title) + KEY_LINE * lines

    @property
    def height(self) -> float:
        return self.plot_height + self.head

    def svg(self, inner: str, theme: str) -> str:
        """The whole image around the chart's own <svg>."""
        ground, ink = GROUNDS[theme]
        parts = [
            f'<text x="{LEFT}" y="{TITLE_LINE * (number + 1) + 2}" fill="{ink}" font-size="15" '
            f'font-weight="600" {FONT}>{escape(line)}</text>'
            for number, line in enumerate(self.title)
        ]
        for x, line, name, colour, dash in self.key:
            y = TITLE_LINE * len(self.title) + KEY_LINE * (line + 1) + 2
            mark = (
                f'<path d="M{x - 2:g} {y - 4}h18" stroke-width="3" stroke={quoteattr(colour)} '
                f'stroke-dasharray="{STROKES[dash]}"/>'
                if dash in STROKES
                else f'<rect x="{x:g}" y="{y - 10}" width="12" height="12" rx="3" fill={quoteattr(colour)}/>'
            )
            parts.append(
                f'{mark}<text x="{x + 18:g}" y="{y}" fill="{ink}" font-size="12" {FONT}>{escape(name)}</text>'
            )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {self._size(SCALE)} '
            f'viewBox="0 0 {self.width:g} {self.height:g}"><rect width="100%" height="100%" fill="{ground}"/>'
            f'{"".join(parts)}<g transform="translate(0,{self.head:g})">{inner}</g></svg>'
        )

    def inline(self, image: str) -> str:
        """The image in pixels of the layout: the browser's own scale makes them those of the file."""
        return image.replace(self._size(SCALE), self._size(1), 1)

    def _size(self, scale: float) -> str:
        return f'width="{round(self.width * scale)}" height="{round(self.height * scale)}"'


def _plain(figure: Any, identity: str) -> dict[str, Any]:
    """A copy that may be changed, with a title and an id."""
    plain = copy.deepcopy(figure.to_plotly_json() if hasattr(figure, "to_plotly_json") else dict(figure))
    layout = plain.setdefault("layout", {})
    plain["title"] = title_of(plain)
    layout.pop("title", None)
    plain["keyed"] = layout.get("showlegend") is True
    layout["showlegend"] = False
    for axis in ("xaxis", "yaxis"):
        layout.setdefault(axis, {})
    plain["data"] = list(plain.get("data") or [])
    plain["id"] = identity
    return plain


def _page(plots: Sequence[_Plot]) -> str:
    return PAGE.format(
        css=frame.style(),
        plotly=frame.plotly(),
        script=frame.script(),
        figures=frame.script_json([plot.figure for plot in plots]),
        places="".join(
            f'<div class="plot" id="{plot.figure["id"]}" style="height:{plot.plot_height}px"></div>'
            for plot in plots
        ),
    )


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error.strerror or error})") from None


class _browser:
    """A headless Chromium for the length of a `with`: (browser, the error that it raises)."""

    def __enter__(self) -> tuple[Any, type[Exception]]:
        try:
            from playwright.sync_api import Error, sync_playwright
        except ImportError:
            raise ExportError(
                "images are drawn by Chromium through Playwright; install it: pip install playwright"
            ) from None
        self._playwright = sync_playwright().start()
        own = Path(self._playwright.chromium.executable_path)
        found = next(filter(None, map(shutil.which, BROWSERS)), None) or (str(own) if own.is_file() else None)
        try:
            if found is None:
                raise ExportError(
                    "no Chromium found to draw images with; install one: apt-get install chromium, or "
                    "python -m playwright install chromium"
                )
            # Containers often have neither user namespaces nor a large /dev/shm.
            options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            self._browser = self._playwright.chromium.launch(executable_path=found, args=options)
        except BaseException as error:
            self._playwright.stop()
            if isinstance(error, Error):
                reason = str(error).splitlines()[0]
                raise ExportError(f"{found} does not start: {reason}") from None
            raise
        return self._browser, Error

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._playwright.stop()
