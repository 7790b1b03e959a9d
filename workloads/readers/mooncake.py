"""Mooncake's traces: JSONL with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one for each
started block of 512 prompt tokens; an id stands for its block and all before it). Qin et al. 2025 (FAST).

Other tools write the same keys with blocks of other sizes: the size is the first of 512, 16, 64, .. that
fits every row."""

from __future__ import annotations

from typing import Any

from workloads.readers.files import each_object
from workloads.readers.rows import BLOCK_SIZES, Rows
from workloads.readers.values import BadRow, hash_ids, needed, time_ns, tokens

KEYS = ("timestamp", "input_length", "output_length")


def read(path: str, rows: Rows) -> None:
    rows.block_sizes = BLOCK_SIZES

    def record(row: dict[str, Any]) -> None:
        needed(row, *KEYS)
        stamp = time_ns(row["timestamp"], "timestamp", "milliseconds", 1e6)
        prompt, answer = (tokens(row[key], key) for key in KEYS[1:])
        ids = checked_ids(rows, row.get("hash_ids"), prompt)
        rows.add(stamp, prompt, answer)
        rows.add_ids(ids)

    each_object(path, rows, record)


def checked_ids(rows: Rows, ids: Any, prompt: int) -> list[int]:
    """The block ids of a row; () where it has none. Narrows `rows.block_sizes` to those that fit."""
    if not ids and ids in (None, []):
        return []
    ids = hash_ids(ids)
    fitting = tuple(size for size in rows.block_sizes if -(-prompt // size) == len(ids))
    if not fitting:
        size = rows.block_sizes[0]
        needs = f"{prompt} tokens need {-(-prompt // size)} blocks of {size}"
        raise BadRow(f"has {len(ids)} ids, {needs}", "hash_ids")
    rows.block_sizes = fitting
    return ids
