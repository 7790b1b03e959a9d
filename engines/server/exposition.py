"""The Prometheus text format, 0.0.4. Written here and not by a library: a scrape stands in the way of
tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def labelled(values: Mapping[str, Any]) -> str:
    """What stands between the braces."""
    pairs = []
    for name, value in values.items():
        escaped = str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        pairs.append(f'{name}="{escaped}"')
    return ",".join(pairs)


def head(name: str, text: str, kind: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}"


class Page:
    """Lines of families whose samples all begin with the same labels."""

    def __init__(self, **labels: str) -> None:
        self.labels = labelled(labels)

    def gauge(self, name: str, text: str, value: float) -> str:
        return f"{head(name, text, 'gauge')}\n{name}{{{self.labels}}} {float(value)}"

    def counter(self, name: str, text: str, value: float) -> str:
        return f"{head(name + '_total', text, 'counter')}\n{name}_total{{{self.labels}}} {float(value)}"

    def by(
        self, name: str, text: str, label: str, values: Mapping[Any, float], kind: str = "counter"
    ) -> Iterable[str]:
        """A sample for each value of one label."""
        return self.rows(name, text, kind, (({label: key}, value) for key, value in values.items()))

    def rows(
        self, name: str, text: str, kind: str, rows: Iterable[tuple[Mapping[str, Any], float]]
    ) -> Iterable[str]:
        name += "_total" if kind == "counter" else ""
        yield head(name, text, kind)
        for labels, value in rows:
            yield f"{name}{{{self.labels},{labelled(labels)}}} {float(value)}"

    def summaries(
        self, name: str, text: str, rows: Iterable[tuple[Mapping[str, Any], int, float]]
    ) -> Iterable[str]:
        """Counts and sums, without quantiles."""
        yield head(name, text, "summary")
        for labels, count, total in rows:
            yield f"{name}_count{{{self.labels},{labelled(labels)}}} {float(count)}"
            yield f"{name}_sum{{{self.labels},{labelled(labels)}}} {float(total)}"
