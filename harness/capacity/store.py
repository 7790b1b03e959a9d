"""Capacities that were measured on this machine: in $BATCHMARK_CACHE/capacity (or ~/.cache/batchmark), a file
for each engine, workload, model and SLO. `load.utilization=0.8` of a run is 80 % of the one of its kind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.conf import UsageError
from harness.host import digest, facts
from harness.slo import limits_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

SCHEMA_VERSION = 1
NOT_OF_THE_CAPACITY = ("rate", "requests", "speed")
"""Settings of a workload that say how much of it comes, not what."""
OF_THE_LOAD = ("concurrency", "max_wait_s", "timeout_s", "retries", "retry_backoff_s")
LEFT_OUT = (
    "load.utilization",
    "load.requests",
    "load.duration_s",
    "workload.rate",
    "output.dir",
    "seed",
    "dry_run",
)
"""Overrides of a run that the command which measures its capacity does not take, or need not."""


def folder() -> Path:
    root = os.environ.get("BATCHMARK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "batchmark") / "capacity"


def key(cfg: DictConfig) -> str:
    """What a capacity belongs to: the machine and every setting that moves it. The seed is none of them."""
    from omegaconf import OmegaConf

    whole: Any = OmegaConf.to_container(cfg, resolve=True)
    workload = {k: v for k, v in whole["workload"].items() if k not in NOT_OF_THE_CAPACITY}
    if "arrivals" in workload:  # probes pin their arrivals, whatever the workload says
        workload["arrivals"] = {**workload["arrivals"], "pinned": True}
    host = {k: v for k, v in facts().items() if k in ("cpu", "cores", "memory_gb")}
    of_run = {k: whole[k] for k in ("engine", "model", "device", "dtype")}
    load = {k: whole["load"].get(k) for k in OF_THE_LOAD}
    slo = {**limits_of(cfg), "attainment": cfg.slo.attainment}
    return digest({"host": host, "workload": workload, "load": load, "slo": slo, **of_run})


def save(cfg: DictConfig, found: dict[str, Any]) -> Path:
    """Replace what is known. found: rps, low, high and whatever else is worth keeping. Raises OSError."""
    path = folder() / f"{key(cfg)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **found}, indent=1) + "\n")
    partial.replace(path)
    return path


def load(cfg: DictConfig) -> dict[str, Any] | None:
    """None when none of this kind has been measured here, or none can be read."""
    try:
        value = json.loads((folder() / f"{key(cfg)}.json").read_text())
        if value["schema_version"] == SCHEMA_VERSION and value["rps"] > 0:
            return dict(value)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def at_utilization(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration at load.utilization times the capacity, arrivals pinned: the mean rate of the run is
    then that rate and no swing of it. Raises UsageError where no capacity is known."""
    share = cfg.load.utilization
    if any(text.startswith("workload.rate=") for text in overrides):
        raise UsageError(f"load.utilization={share:g}: says what workload.rate is; leave one of them out")
    found = load(cfg)
    if found is None:
        command = " ".join(["python -m harness.capacity", *_for_capacity(overrides)])
        raise UsageError(
            f"load.utilization={share:g}: no capacity is known here of this engine, workload, model and "
            f"SLO; measure it with: {command}"
        )
    cfg = cfg.copy()
    cfg.workload.rate = float(f"{share * found['rps']:.4g}")
    if "arrivals" in cfg.workload:
        cfg.workload.arrivals.pinned = True
    return cfg


def _for_capacity(overrides: list[str]) -> list[str]:
    kept = [text for text in overrides if text.split("=", 1)[0] not in LEFT_OUT]
    groups = ("workload=", "engine=", "experiment=")
    return [_quoted(f"+{text}" if text.startswith(groups) else text) for text in kept]


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)
