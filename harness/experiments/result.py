"""The result of an experiment as data, as text and as markdown. `<name>.json` is what everything else is made
from, the figure included."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from harness.experiments.experiment import Experiment, Findings
from harness.experiments.ratios import Ratios

SCHEMA_VERSION = 1


def result(
    experiment: Experiment, findings: Findings, *, real: bool, smoke: bool, seed: int, seconds: float
) -> dict[str, Any]:
    """JSON-ready; what was not measured is null."""
    found = {
        "schema_version": SCHEMA_VERSION,
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "published": experiment.published,
        "mode": "real" if real else "virtual",
        "smoke": smoke,
        "seed": seed,
        "seconds": round(seconds, 1),
        "machine": _machine() if real else None,
        "verdict": findings.verdict,
        "because": findings.because,
        "claims": [asdict(claim) for claim in findings.claims],
        "ratios": {part: asdict(r) for part, r in findings.ratios.items()},
        "tables": [asdict(t) for t in findings.tables],
        "outcomes": findings.outcomes,
        "figure": _small(json.loads(findings.figure.to_json())),
    }
    return _plain(found)


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [
        f"{found['title']}  ({found['name']}, {_how(found)})",
        f"source     {found['source']}",
        f"published  {found['published']}",
        "",
    ]
    for part, values in found["ratios"].items():
        lines += [f"{part}:", Ratios(**values).text(), ""]
    for table in found["tables"]:
        lines += [
            *([table["name"]] if table["name"] else []),
            *_columns([table["titles"], *table["rows"]]),
            "",
        ]
    for claim in found["claims"]:
        lines += [
            f"{'held    ' if claim['held'] else 'NOT HELD'} {claim['text']}",
            f"           published: {claim['published']}",
            f"           measured:  {claim['measured']}",
        ]
    return "\n".join([*lines, "", f"verdict: {verdict(found)}"])


def verdict(found: dict[str, Any]) -> str:
    held = sum(claim["held"] for claim in found["claims"])
    smoke = "smoke run, says little: " if found["smoke"] else ""
    return f"{smoke}{found['verdict']} ({held} of {len(found['claims'])} claims); {found['because']}"


def markdown(found: dict[str, Any]) -> str:
    name = found["name"]
    lines = [
        f"# {found['title']}",
        "",
        f"`python -m harness.experiments {name}` ({_how(found)}, {found['seconds']:.0f} s)",
        "",
        f"Source: {found['source']}. Published: {found['published']}.",
        "",
        f"![{found['title']}]({name}.png)",
        "",
        f"**Verdict: {found['verdict']}.** {found['because'][0].upper()}{found['because'][1:]}",
        "",
        *_grid(
            ("", "claim", "published", "measured"),
            [
                ["held" if c["held"] else "not held", c["text"], c["published"], c["measured"]]
                for c in found["claims"]
            ],
        ),
        "",
    ]
    for table in found["tables"]:
        lines += [*([f"{table['name'][0].upper()}{table['name'][1:]}:", ""] if table["name"] else [])]
        lines += [*_grid(table["titles"], table["rows"]), ""]
    lines += ["The five ratios on which the shape depends:", ""]
    lines += ["```"]
    for part, values in found["ratios"].items():
        lines += [f"{part}:", Ratios(**values).text()]
    return "\n".join([*lines, "```", ""])


def _how(found: dict[str, Any]) -> str:
    if found["mode"] == "virtual":
        return "virtual time: the same on every machine"
    machine = found["machine"] or {}
    return f"model=tiny on {machine.get('cores')} cores of {machine.get('cpu')}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") or " " for cell in row] for row in (titles, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]


def _machine() -> dict[str, Any]:
    from harness.host import facts

    found = facts()
    return {key: found[key] for key in ("cpu", "cores")}


def _small(figure: dict[str, Any]) -> dict[str, Any]:
    """Without the template, 7 kB in every file: its name says the same."""
    figure["layout"]["template"] = "plotly_white"
    return figure


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value.item() if hasattr(value, "item") else value
