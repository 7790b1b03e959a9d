"""The values in a trace's rows, checked: times, token counts, block ids. Wrong ones raise BadRow, which says
the column and the reason; who reads the file adds its name and the line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

MOST_TOKENS = 10_000_000  # a length above this is a broken row, not a prompt
NS = 1_000_000_000
_EXAMPLE = "2023-11-16 18:15:46.6805900"
_STAMP = re.compile(
    r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:\.(\d{1,12}))?(Z|[+-]\d{2}:?\d{2})?", re.ASCII
)
_WHOLE = re.compile(r"[+-]?\d{1,300}(\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,300}(\.\d*)?([eE][+-]?\d{1,3})?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = 1e15  # of a number that is a time, in any unit


class BadRow(Exception):
    """A row cannot be used."""

    def __init__(self, reason: str, column: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


def stamp_ns(text: Any, column: str) -> int:
    """Nanoseconds since 1970 of a date with a time, any number of fractional digits or none; without a zone
    it is UTC."""
    match = _STAMP.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise BadRow(f"{shown(text)} is not a time such as {_EXAMPLE}", column)
    day, clock, fraction, zone = match.groups()
    try:
        whole = _seconds(day, clock, zone)
    except ValueError:
        raise BadRow(f"{shown(text)} is not a time such as {_EXAMPLE}", column) from None
    return whole * NS + (int(fraction[:9].ljust(9, "0")) if fraction else 0)


@lru_cache(maxsize=64)  # neighbouring rows have the same second
def _seconds(day: str, clock: str, zone: str | None) -> int:
    return (datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}") - _EPOCH) // timedelta(seconds=1)


def time_ns(value: Any, column: str, unit: str, ns: float) -> int:
    """A number of 0 or more in `unit`, of `ns` nanoseconds."""
    if not is_number(value) or not 0 <= value < _LATEST:
        raise BadRow(f"{shown(value)} is not a time in {unit} of 0 or more", column)
    return value * int(ns) if type(value) is int else round(value * ns)


def number_text(text: str, column: str) -> float:
    """A number of a CSV field, not negative."""
    if not _NUMBER.fullmatch(text) or not 0 <= float(text) < _LATEST:
        raise BadRow(f"{shown(text)} is not a number of 0 or more", column)
    return float(text)


def seconds_text_ns(text: str, column: str) -> int:
    """Nanoseconds of a CSV field of seconds, exact to the digit."""
    if not _NUMBER.fullmatch(text) or not 0 <= float(text) < _LATEST:
        raise BadRow(f"{shown(text)} is not a time in seconds of 0 or more", column)
    whole, _, fraction = text.partition(".")
    if fraction.isdigit() or (not fraction and whole.isdigit()):
        return int(whole) * NS + int(fraction[:9].ljust(9, "0") if fraction else 0)
    return round(float(text) * NS)


def tokens_text(text: str, column: str, least: int = 1) -> int:
    """A token count of a CSV field."""
    if text.isdigit() and text.isascii() and len(text) < 8:
        return _bounded(int(text), column, least)
    if not _WHOLE.fullmatch(text):
        raise BadRow(f"{shown(text)} is not a whole number", column)
    return _bounded(int(text.split(".")[0]), column, least)


def tokens(value: Any, column: str, least: int = 1) -> int:
    """A token count of a JSON value."""
    if type(value) is not int and not (is_number(value) and value == int(value)):
        raise BadRow(f"{shown(value)} is not a whole number", column)
    return _bounded(int(value), column, least)


def _bounded(count: int, column: str, least: int) -> int:
    if count < least:
        raise BadRow(f"{shown(count)} is below {least} token{'' if least == 1 else 's'}", column)
    if count > MOST_TOKENS:
        raise BadRow(f"{shown(count)} is above {MOST_TOKENS} tokens", column)
    return count


def hash_ids(ids: Any, column: str = "hash_ids") -> list[int]:
    """Block ids of a JSON value."""
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 62 for i in ids):
        raise BadRow(f"{shown(ids)} is not a list of whole numbers of 0 or more", column)
    return ids


def needed(row: Mapping[str, Any], *keys: str) -> None:
    """All of these keys are there."""
    for key in keys:
        if key not in row:
            raise BadRow(f"is missing; needs {', '.join(keys)}", key)


def is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
