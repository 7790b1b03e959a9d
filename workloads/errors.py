"""What goes wrong in a workload. Every message is one line: the setting, its value and what would work."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A workload setting, a schedule file or a trace cannot be used."""


class TraceError(WorkloadError):
    """A trace file, or one row of it, cannot be read: file, line (from 1), column and reason."""

    def __init__(self, path: str, reason: str, *, line: int | None = None, column: str | None = None) -> None:
        where = str(path)
        if line is not None:
            where += f", line {line}"
        if column is not None:
            where += f", column {column}"
        super().__init__(f"{where}: {reason}")
        self.path = str(path)
        self.line = line
        self.column = column
        self.reason = reason
