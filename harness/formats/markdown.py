"""Markdown for the summary of a CI job: GitHub's $GITHUB_STEP_SUMMARY, a comment on a merge request."""

from __future__ import annotations

from harness.formats.report import Figure, Report
from harness.names import label, name
from harness.table import MISSING, UNRELIABLE, number

HEAD = (
    "| metric | baseline | now | 95 % interval | change | limit | verdict |\n|---|--:|--:|--:|--:|--:|---|\n"
)
HEAD_ROUNDS = (
    "| metric | base | head | change | its interval | limit | verdict |\n|---|--:|--:|--:|--:|--:|---|\n"
)
BOLD = ("regression", "inconclusive")


def markdown(report: Report) -> str:
    """A section that can follow another one: a heading with the outcome, the reasons, the table."""
    run, baseline = (_plain(text) for text in (report.run, report.baseline))
    parts = [f"### Gate: {report.outcome}, {_plain(report.name)}\n\nRun {run} against {baseline}.\n"]
    reasons = [*report.reasons, *(f"{name(f.metric)}: {f.reason}" for f in report.figures if f.reason)]
    if reasons:
        parts.append("".join(f"- {_plain(reason)}\n" for reason in reasons))
    if report.figures:
        paired = any(f.effect is not None for f in report.figures)
        parts.append((HEAD_ROUNDS if paired else HEAD) + "".join(_row(f, paired) for f in report.figures))
    return "\n".join(parts) + "\n"


def _row(figure: Figure, paired: bool) -> str:
    now = number(figure.value)
    if figure.value is not None and not figure.reliable:
        now = UNRELIABLE + now
    change = f"{100 * figure.change:+.1f} %" if figure.change is not None else MISSING
    if paired:
        middle = [change, figure.span or MISSING]
    else:
        ci = figure.ci95
        middle = [f"{number(ci[0])} to {number(ci[1])}" if ci is not None else MISSING, change]
    verdict = f"**{figure.word}**" if figure.gate and figure.verdict in BOLD else figure.word
    cells = [
        _plain(label(figure.metric)),
        number(figure.baseline),
        now,
        *middle,
        number(figure.limit),
        verdict,
    ]
    return f"| {' | '.join(cells)} |\n"


def _plain(text: str) -> str:
    """Text as it is read: on one line, no cell's end, no tag, no emphasis."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    for mark in "\\|`*[]":
        line = line.replace(mark, f"\\{mark}")
    return line
