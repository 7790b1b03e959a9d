"""One self-contained HTML page for one run or several: opens from disk, needs no network."""

from harness.dashboard.page import write_dashboard

__all__ = ["write_dashboard"]
