"""The experiments by name, in the order in which the gallery shows them. A name is a module here and a
preset in harness/conf/experiment/."""

from __future__ import annotations

from importlib import import_module

from harness.conf import unknown
from harness.experiments.experiment import Experiment

NAMES = (
    "anyscale_throughput",
    "orca_latency",
    "pagedattention_reservation",
    "sarathi_stalls",
    "sarathi_capacity",
    "scls_slices",
    "tgi_prefix",
    "noevict_vs_maxutil",
    "bigger_batch_is_not_better",
    "cancel_storm",
    "long_prompt_interference",
    "static_is_enough",
    "mixed_lanes",
)


def experiment(name: str) -> Experiment:
    """Raises UsageError for a name that is none."""
    if name not in NAMES:
        raise unknown(f"{name}: no such experiment", name, NAMES)
    found: Experiment = import_module(f"harness.experiments.{name}").EXPERIMENT
    return found


def all_experiments() -> list[Experiment]:
    return [experiment(name) for name in NAMES]
