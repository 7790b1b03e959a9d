"""What the probes are configured as: one rate, or as fast as the engine can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.conf import FOLDER, UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SATURATING_S = 8.0
"""How long the closed loop runs that says how fast the engine serves when it never waits for work."""
CROWD = 1.5
"""Its clients, as a multiple of the engine's seats."""
FOREIGN_SEATS = 32


def probe_config(cfg: DictConfig, rate: float, repeat: int, requests: int) -> DictConfig:
    """A probe at that many requests (of sessions: sessions) a second. One seed draws the same requests at
    every rate, only closer together, and in exactly requests / rate seconds: a short stretch of a workload
    whose rate swings would otherwise have another mean than the one that is asked for."""
    probe = cfg.copy()
    probe.workload.rate = rate
    probe.load.requests, probe.load.duration_s = requests, None
    probe.seed = cfg.seed + repeat
    probe.slo.enforce = False
    if "arrivals" in probe.workload:
        probe.workload.arrivals.pinned = True
    return probe


def saturating_config(cfg: DictConfig, requests: int, duration_s: float | None = None) -> DictConfig:
    """A closed loop with more clients than the engine has seats."""
    from omegaconf import OmegaConf

    closed: Any = OmegaConf.load(FOLDER / "load" / "closed.yaml")
    for key in closed:
        if key in cfg.load and key not in ("kind", "concurrency"):
            closed[key] = cfg.load[key]
    seats = cfg.engine.get("max_num_seqs") or FOREIGN_SEATS
    closed.concurrency = min(round(CROWD * seats), cfg.load.concurrency or 10**6)
    closed.requests, closed.duration_s = requests, duration_s
    load = cfg.copy()
    OmegaConf.update(load, "load", closed, merge=False)
    load.slo.enforce = False
    return load


def check_workload(cfg: DictConfig) -> None:
    """Raises UsageError for traffic that has no rate to search over."""
    kind = (cfg.workload.get("arrivals") or {}).get("kind")
    if kind == "at_once":
        raise UsageError(
            "workload.arrivals.kind=at_once: has no rate to search over; needs workload.arrivals.kind=poisson"
        )
    if cfg.load.kind != "open":
        raise UsageError("load=closed: a capacity is a rate; needs load=open")
