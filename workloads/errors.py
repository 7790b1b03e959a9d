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
        self.skippable = False  # one row alone is at fault, and a reader can leave it out

    def advised(self, skip: str) -> TraceError:
        """The same with what leaves the row out, where one is at fault. skip: the option that does."""
        if not self.skippable:
            return self
        reason = f"{self.reason}; {skip} leaves such rows out"
        return TraceError(self.path, reason, line=self.line, column=self.column)
