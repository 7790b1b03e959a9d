"""JUnit XML: a test case a metric, and one for the run itself.

A regression is a failure, an invalid run an error, and what could not be judged is skipped with its reason.
The elements and attributes are those that the common readers share (Jenkins' junit-10.xsd, GitLab, GitHub
actions): measured values stand in the suite's properties and in each case's message."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from harness.formats.report import Figure, Report
from harness.table import MISSING, number

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2


def junit(report: Report) -> str:
    """One suite. The run's own case takes the run's duration, the others none, so that times add up."""
    duration = report.summary["run"].get("duration_s")
    seconds = f"{duration if isinstance(duration, int | float) else 0:.3f}"
    suite = ET.Element("testsuite", name=_clean(f"gate {report.name}"))
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(report):
        ET.SubElement(properties, "property", name=_clean(name), value=_clean(value))
    run = ET.SubElement(suite, "testcase", classname=_clean(report.name), name="run", time=seconds)
    if report.outcome == "invalid":
        ET.SubElement(run, "error", message=_clean("; ".join(report.reasons)), type="invalid")
    elif report.reasons:
        ET.SubElement(run, "skipped", message=_clean("; ".join(report.reasons)))
    for figure in report.figures:
        case = ET.SubElement(
            suite, "testcase", classname=_clean(report.name), name=_clean(figure.metric), time="0.000"
        )
        _judge(case, figure, report.reasons)
    totals = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    root = ET.Element("testsuites", name="batchmark")
    for element in (root, suite):
        for key, count in totals.items():
            element.set(key, str(count))
        element.set("time", seconds)
    started = report.summary["run"].get("started_at")
    if started:
        suite.set("timestamp", _clean(str(started)[:19]))  # xs:dateTime without a zone: the run's UTC
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _judge(case: ET.Element, figure: Figure, reasons: tuple[str, ...]) -> None:
    """What a reader shows of this metric; only a judged one can pass or fail."""
    if reasons:
        ET.SubElement(case, "skipped", message=_clean(f"not judged: {'; '.join(reasons)}"))
    elif figure.verdict == "inconclusive" and figure.gate:
        ET.SubElement(case, "skipped", message=_clean(f"inconclusive: {figure.reason}"))
    elif figure.failed:
        ET.SubElement(case, "failure", message=_clean(_message(figure)), type="regression")
    else:
        ET.SubElement(case, "system-out").text = _clean(_message(figure))


def _message(figure: Figure) -> str:
    """Everything that is known of it: the unknown is left out."""
    words = [f"{figure.word}: {number(figure.value)} {figure.unit}".strip()]
    if figure.baseline is not None:
        change = f"{100 * figure.change:+.1f} %" if figure.change is not None else MISSING
        words.append(f"baseline {number(figure.baseline)} ({change})")
    if figure.limit is not None:
        words.append(f"limit {number(figure.limit)} ({figure.better} is better)")
    if figure.effect is not None and figure.confidence is not None:
        words.append(f"{100 * figure.confidence:.4g} % interval of the change {figure.span}")
        words.append(f"{len(figure.rounds)} rounds")
    elif figure.ci95 is not None:
        low, high = figure.ci95
        words.append(f"95 % interval {number(low)} to {number(high)}")
    else:
        words.append("no interval")
    return ", ".join(words + ([figure.reason] if figure.reason else []))


def _properties(report: Report) -> list[tuple[str, str]]:
    pairs = [("run", report.run), ("baseline", report.baseline), ("outcome", report.outcome)]
    for figure in report.measured():
        pairs.append((f"{figure.metric}.measured", f"{figure.value:.6g}"))
        if figure.baseline is not None:
            pairs.append((f"{figure.metric}.baseline", f"{figure.baseline:.6g}"))
        if figure.change is not None:
            pairs.append((f"{figure.metric}.change", f"{figure.change:.6g}"))
        if figure.ci95 is not None:
            pairs.append((f"{figure.metric}.ci95", "{:.6g} {:.6g}".format(*figure.ci95)))
        if figure.effect is not None:
            pairs.append((f"{figure.metric}.change_interval", "{:.6g} {:.6g}".format(*figure.effect)))
    return pairs


def _clean(text: str) -> str:
    """Without what XML cannot hold, not even escaped."""
    return NOT_XML.sub("?", text)
