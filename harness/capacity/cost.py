"""What tokens cost, from the price of an hour of the device. Any currency: a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.capacity.point import Point


def per_million(device_hour: float | None, tokens_per_s: float | None) -> float | None:
    """The cost of a million tokens; None without a price or tokens."""
    if device_hour is None or not tokens_per_s:
        return None
    return device_hour / (3600 * tokens_per_s) * 1e6


def costs(device_hour: float | None, points: Sequence[Point]) -> dict[str, float | None]:
    """Of points at one rate: what flows there, and what a million of it costs. `total` counts prompts too."""
    flows = [flow for point in points if (flow := point.sustained) is not None]
    output, total = np.mean(flows, axis=0).tolist() if flows else (None, None)
    found: dict[str, Any] = {"output_tokens_per_s": output, "total_tokens_per_s": total}
    found["per_million_output"] = per_million(device_hour, output)
    found["per_million_total"] = per_million(device_hour, total)
    return found
