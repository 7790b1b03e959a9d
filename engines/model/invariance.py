"""Does a row's result depend on how many rows are computed with it? On the CPU a matrix product picks its
inner loop by the row count, and with it the order of the additions. Padding the rows to a multiple of some
number removes the odd cases. This module finds the smallest such number for the model's own products, on this
machine, with this many threads; where none holds, it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.model.base import RowProbe

MULTIPLES = (1, 2, 4, 8, 16, 32)
BITWISE = "bitwise"
CHECKED_ROWS = 4096
"""The most rows that are compared. Larger products are cut into blocks of the same size; checking a static
batch of 65,536 rows would take longer than the rest of the start."""


@dataclass(frozen=True, slots=True)
class RowGuarantee:
    """multiple: pad rows to it. guarantee: "bitwise" or "not bitwise: <why>"."""

    multiple: int
    guarantee: str


def find_row_guarantee(
    probes: Sequence[RowProbe], max_rows: int, max_sampled: int, device: torch.device, dtype: torch.dtype
) -> RowGuarantee:
    """Compare every probe at several row counts up to max_rows (max_sampled for those that see only sampled
    rows) or CHECKED_ROWS, and at shifted positions, with the same rows of one large product. Takes about
    twice the time of a pass over that many tokens through one layer."""
    if device.type != "cpu":
        return RowGuarantee(
            1, f"not bitwise: on {device.type} the matrix library picks kernels by the batch size"
        )
    multiple = 1
    for probe in probes:
        found = _probe_multiple(probe, max_sampled if probe.sampled_only else max_rows, dtype, multiple)
        if found is None:
            return RowGuarantee(8, "not bitwise: an operation of the model depends on its row count")
        multiple = max(multiple, found)
    return RowGuarantee(multiple, BITWISE)


def _probe_multiple(probe: RowProbe, max_rows: int, dtype: torch.dtype, at_least: int) -> int | None:
    largest = -(-min(max_rows, CHECKED_ROWS) // MULTIPLES[-1]) * MULTIPLES[-1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(largest, probe.in_features, generator=generator).to(dtype)
    whole = probe.apply(x)
    candidates = [m for m in MULTIPLES if m >= at_least]
    for rows in _row_counts(largest):
        shift = min(5, largest - rows)
        same = torch.equal(probe.apply(x[shift : shift + rows]), whole[shift : shift + rows])
        if not same:
            candidates = [m for m in candidates if rows % m]
    return candidates[0] if candidates else None


def _row_counts(largest: int) -> list[int]:
    """Every small count, where the inner loops change, then a few of every size."""
    some = {
        20,
        24,
        28,
        31,
        32,
        33,
        40,
        48,
        63,
        64,
        65,
        127,
        128,
        192,
        255,
        256,
        511,
        largest // 2,
        largest - 32,
    }
    return sorted(n for n in {*range(1, 17)} | some if 0 < n < largest)
