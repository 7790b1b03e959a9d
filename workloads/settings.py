"""Reading a configuration node: typed, checked, and with every error naming the setting, its value and a
remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workloads.errors import WorkloadError

SMALLEST, LARGEST = 1e-9, 1e12
"""No setting of a workload is meant smaller (0 apart) or larger: beyond lie overflows, not traffic."""


class Settings:
    """A mapping of a configuration (a dict or an OmegaConf node) and its dotted name."""

    def __init__(self, values: Any, name: str, example: str = "") -> None:
        if not isinstance(values, Mapping):
            such = f", such as {example}" if example else ""
            raise WorkloadError(f"{name}={values!r}: needs a mapping of settings{such}")
        self._values = values
        self.name = name

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(str(key) for key in self._values)

    def only(self, *known: str) -> None:
        """Refuse what nobody reads: a misspelt setting must not pass for the default."""
        for key in self:
            if key not in known:
                raise WorkloadError(
                    f"{self.name}.{key} is not a setting; choose from: {', '.join(sorted(known))}"
                )

    def error(self, key: str, needs: str) -> WorkloadError:
        return WorkloadError(f"{self.name}.{key}={_shown(self._values.get(key))}: {needs}")

    def get(self, key: str) -> Any:
        if key not in self._values:
            raise WorkloadError(f"{self.name}.{key} is missing")
        return self._values[key]

    def node(self, key: str, example: str = "") -> Settings:
        return Settings(self.get(key), f"{self.name}.{key}", example)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "needs text")
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        value = self.get(key)
        if value not in choices:
            raise self.error(key, f"choose from {', '.join(choices)}")
        return str(value)

    def number(self, key: str, *, above: float | None = None, least: float | None = None) -> float:
        """A number of a sane size, greater than `above` or at least `least` where given."""
        value = self.get(key)
        bound = (
            f" above {above:g}"
            if above is not None
            else f" of {least:g} or more"
            if least is not None
            else ""
        )
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value == value  # no NaN
        if not ok or (above is not None and value <= above) or (least is not None and value < least):
            raise self.error(key, f"needs a number{bound}")
        if not _is_sane(value):
            raise self.error(key, f"needs a number of a size from {SMALLEST:g} to {LARGEST:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "needs true or false")
        return value

    def share(self, key: str) -> float:
        value = self.number(key)
        if not 0 <= value <= 1:
            raise self.error(key, "needs a share, 0 to 1")
        return value

    def whole(self, key: str, *, least: int = 1, most: int | None = None) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"needs a whole number of {least} or more")
        if value > (LARGEST if most is None else most):
            raise self.error(key, f"needs a whole number of {LARGEST if most is None else most:g} at most")
        return value

    def optional_whole(self, key: str, *, least: int = 1) -> int | None:
        return None if self.get(key) is None else self.whole(key, least=least)

    def numbers(self, key: str) -> list[float]:
        """A non-empty list of finite numbers."""
        value = self.get(key)
        if _is_list(value) and value and all(_is_number(v) for v in value):
            return [float(v) for v in value]
        raise self.error(key, "needs a list of numbers")

    def table(self, key: str, columns: int) -> list[list[float]]:
        """A non-empty list of rows of `columns` finite numbers."""
        rows = self.get(key)
        if _is_list(rows) and rows and all(_is_list(r) and len(r) == columns for r in rows):
            table = [list(row) for row in rows]
            if all(_is_number(v) for row in table for v in row):
                return [[float(v) for v in row] for row in table]
        raise self.error(key, f"needs a list of rows of {columns} numbers")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_sane(value)


def _is_sane(value: float) -> bool:
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
