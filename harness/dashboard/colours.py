"""One colour per engine, the same on every page and picture.

The three headline strategies have colours of Okabe and Ito's palette. The others were chosen one after the
other, each as far as could be from all before it in the worst of normal sight, protanopia, deuteranopia and
tritanopia (Machado et al. 2009, distances in OKLab), at a contrast of 2.6:1 or more on white and on the dark
ground. No eleven colours are safe by hue alone, so an engine has a dash and a marker of its own as well."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

PRESETS = {
    "continuous": "#0072B2",
    "static": "#D55E00",
    "chunked": "#009E73",
    "orca": "#A596E1",
    "tgi": "#5A5A5A",
    "sliced": "#7800FF",
    "dynamic": "#B40F0F",
    "past_future": "#8778FF",
    "max_utilization": "#C31E96",
    "no_evict": "#FF69A5",
    "prefill_first": "#D29600",
}
METRICS = {"tokens/s": "#04AEAE", "goodput": "#BC3CDD", "TPOT": "#A6543F"}
"""For figures that show several metrics of one engine, so that no line is taken for an engine."""
OTHERS = ("#A6611A", "#6E8B00", "#4D4DFF", "#008B8B", "#B35FD6", "#8A7000", "#7F5F4F", "#3C86C6")
"""For engines of other names, foreign servers for one: by a hash of the name."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
HEADLINE = 3
"""Presets that are drawn solid."""


@dataclass(frozen=True)
class Style:
    """How a run is drawn: a hex colour, a Plotly dash, a Plotly marker symbol."""

    colour: str
    dash: str
    symbol: str


def colour(engine: str) -> str:
    """The hex colour of an engine's name, the same for ever."""
    return PRESETS.get(engine) or OTHERS[crc32(engine.encode("utf-8", "surrogatepass")) % len(OTHERS)]


def style(engine: str) -> Style:
    """Colour, dash and marker of an engine's name."""
    names = list(PRESETS)
    if engine in PRESETS:
        place = names.index(engine)
        dash = DASHES[0] if place < HEADLINE else DASHES[1 + (place - HEADLINE) % (len(DASHES) - 1)]
    else:
        place = crc32(engine.encode("utf-8", "surrogatepass")) >> 8
        dash = DASHES[1 + place % (len(DASHES) - 1)]
    return Style(colour(engine), dash, SYMBOLS[place % len(SYMBOLS)])


def styles(engines: Sequence[str]) -> list[Style]:
    """A style for each run of a page. Where an engine occurs more than once its first run has the engine's
    own colour, the others have lighter and darker shades of it, with other dashes and markers."""
    out: list[Style] = []
    for i, engine in enumerate(engines):
        own, again = style(engine), engines[:i].count(engine)
        if again:
            own = Style(
                shade(own.colour, again),
                DASHES[(DASHES.index(own.dash) + again) % len(DASHES)],
                SYMBOLS[(SYMBOLS.index(own.symbol) + again) % len(SYMBOLS)],
            )
        out.append(own)
    return out


def shade(hex_colour: str, step: int) -> str:
    """The same hue lighter (odd steps) or darker (even steps), further with each pair of steps."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, full = colorsys.rgb_to_hls(red, green, blue)
    away = 0.16 * ((step + 1) // 2) * (1 if step % 2 else -1)
    changed = colorsys.hls_to_rgb(hue, min(0.8, max(0.2, light + away)), full)
    return "#" + "".join(f"{round(255 * part):02X}" for part in changed)
