"""Another tool's result as a run: from its file, or from the run directory that an import made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.exchange.reading import imported, is_result
from harness.exchange.result import ResultError, empty_run
from harness.metrics.run import Run


def load_imported(path: Path) -> Run | None:
    """None where path is neither. Raises ResultError for a file that is no result."""
    if is_result(path):
        return empty_run(imported(path), path)
    meta = read_object(path / "meta.json")
    if meta is None or "imported" not in meta:
        return None
    summary = read_object(path / "summary.json")
    if summary is None or "latency_ms" not in summary:
        raise ResultError(
            f"{path}: the summary.json of this imported result is gone or damaged; import it again"
        )
    return empty_run(summary, path)


def read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
