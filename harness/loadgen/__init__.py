"""The load generator: sends a schedule at its times, stamps what comes back, hangs up as users do."""

from harness.loadgen.run import run_load
from harness.loadgen.settings import LoadError, LoadResult, LoadSettings, Target
from harness.loadgen.stop import Stop

__all__ = [
    "LoadError",
    "LoadResult",
    "LoadSettings",
    "Stop",
    "Target",
    "run_load",
]
