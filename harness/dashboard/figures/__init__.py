"""The charts of the dashboard by topic: every function takes runs and returns one figure, or None without
data. Time is in seconds from the start of the load, latency in milliseconds."""

from workloads.page.frame import COLOURS

__all__ = ["COLOURS"]
