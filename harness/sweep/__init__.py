"""A sweep: every combination of the given values, each measured once, then one comparison. An interrupted
one is continued: what is finished is not measured again."""

from harness.sweep.command import run_sweep
from harness.sweep.points import changed

__all__ = ["changed", "run_sweep"]
