"""An engine is told apart by its colour on light and dark ground, also by colour-blind readers."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from harness.conf import __file__ as conf_file
from harness.dashboard.colours import METRICS, PRESETS, colour, style, styles
from harness.dashboard.figures import phases
from harness.dashboard.figures.load import OUTCOME_COLOURS

# Machado, Oliveira and Fernandes 2009, severity 1.0, in linear RGB.
SIGHTS = {
    "normal": "1 0 0  0 1 0  0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216  -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413  -0.01182 0.04294 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602  0.004733 0.691367 0.3039",
}
DARK_CARD = "#1d2127"


def linear(hex_colour: str) -> np.ndarray:
    rgb = np.array([int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson 2020."""
    lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
           [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    lab = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
           [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip
    return np.array(lab) @ np.cbrt(np.array(lms) @ rgb)


def distance(a: str, b: str, sight: str) -> float:
    seen = [
        oklab(np.clip(np.array(SIGHTS[sight].split(), float).reshape(3, 3) @ linear(c), 0, 1)) for c in (a, b)
    ]
    return float(np.linalg.norm(seen[0] - seen[1]))


def contrast(a: str, b: str) -> float:
    bright, dim = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_every_preset_has_a_colour_of_its_own() -> None:
    from pathlib import Path

    presets = {p.stem for p in (Path(conf_file).parent / "engine").glob("*.yaml")} - {"_reference", "openai"}
    assert presets <= set(PRESETS)
    assert len({colour(name) for name in presets}) == len(presets)
    assert len({(s.dash, s.symbol) for s in map(style, presets)}) == len(presets)  # without any colour at all


@pytest.mark.parametrize("sight", SIGHTS)
def test_presets_are_told_apart_by_every_sight(sight: str) -> None:
    for a, b in combinations(PRESETS, 2):
        assert distance(PRESETS[a], PRESETS[b], sight) > 0.065, (a, b)  # 0.02 is just noticeable
    for a, b in combinations(("static", "continuous", "chunked"), 2):
        assert distance(PRESETS[a], PRESETS[b], sight) > 0.08, (a, b)


@pytest.mark.parametrize("sight", SIGHTS)
def test_metrics_are_told_apart_and_taken_for_no_engine(sight: str) -> None:
    for a, b in combinations(METRICS.values(), 2):
        assert distance(a, b, sight) > 0.065, (a, b)
    for metric, engine in product(METRICS.values(), PRESETS.values()):
        assert distance(metric, engine, sight) > 0.05, (metric, engine)
    assert all(contrast(one, "#ffffff") > 2.6 for one in METRICS.values())


@pytest.mark.parametrize("sight", SIGHTS)
def test_what_time_is_spent_on_is_taken_for_no_strategy(sight: str) -> None:
    spent = {*phases.SEAT_COLOURS, *OUTCOME_COLOURS.values(), *(part for part, _ in phases.PARTS.values())}
    for one, engine in product(spent, ("static", "continuous", "chunked")):
        assert distance(one, PRESETS[engine], sight) > 0.04, (one, engine)
    assert distance(phases.PREFILL, phases.DECODE, sight) > 0.08


def test_colours_stand_out_on_light_and_dark_ground() -> None:
    for name in (*PRESETS, "vllm", "sglang", "", "\ud800", "模型"):
        assert contrast(colour(name), "#ffffff") > 2.2, name
        assert contrast(colour(name), DARK_CARD) > 2.0, name


def test_runs_of_one_engine_are_shades_of_it() -> None:
    three = styles(["static", "chunked", "static", "static"])
    assert three[0].colour == colour("static")
    assert len({s.colour for s in three}) == 4
    assert len({(s.dash, s.symbol) for s in three}) == 4
    assert styles(["chunked"]) == [three[1]]  # whoever else is on the page
