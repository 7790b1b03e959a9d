"""capacity.json: what was found, point by point. Written after every probe, so that it survives a kill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.capacity.cost import costs
from harness.capacity.measure import Arm

SCHEMA_VERSION = 1
CRITERIA = {
    "slo": "SLO attainment",
    "growth": "requests pile up",
    "queue_delay": "median queue delay",
    "itl": "p99 gap between tokens",
}
ENDINGS = {
    "time": "the time was up (capacity.max_minutes)",
    "out_of_reach": "no rate held",
    "unbounded": "no rate failed",
    "interrupted": "interrupted",
}


def to_json(arms: Sequence[Arm], about: dict[str, Any], device_hour: float | None) -> dict[str, Any]:
    """about: workload, model, limits and settings, as they are."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "capacity",
        **about,
        "arms": [_arm(arm, about["limits"], device_hour) for arm in arms],
    }


def _arm(arm: Arm, limits: Mapping[str, float | None], device_hour: float | None) -> dict[str, Any]:
    found = arm.interval
    points = [
        {**point.to_json(), "cost": costs(device_hour, [point])}
        for point in sorted(arm.points, key=lambda p: (p.rate, p.repeat))
    ]
    return {
        "name": arm.name,
        "engine": arm.name,
        "saturated_rps": arm.guess,
        "capacity": {"rps": found.low, "low": found.low, "high": found.high},
        "limited_by": limited_by(arm),
        "ended": arm.ended,
        "notes": notes(arm, limits),
        "cost": costs(device_hour, arm.held),
        "points": points,
    }


def limited_by(arm: Arm) -> list[str]:
    """The criteria that were not kept right above the capacity."""
    above = [point for point in arm.points if point.rate == arm.interval.high]
    return [name for name in CRITERIA if any(name in point.over for point in above)]


def notes(arm: Arm, limits: Mapping[str, float | None]) -> list[str]:
    """What a reader of the interval has to know. Lines. limits: of `about`."""
    found, lines = arm.interval, []
    if arm.ended == "invalid":
        lines.append(f"a probe is not valid: {arm.reason}")
    elif arm.ended in ENDINGS:
        none = f"; no rate held down to {found.high:g} requests/s" if found.high and not found.low else ""
        lines.append(ENDINGS[arm.ended] + (none if arm.ended == "time" else ""))
    if found.unclear and found.low is not None:
        lines.append(f"repeats near the limit did not agree at {_listed(found.unclear)} requests/s")
    lines += [f"{bad:g}/s failed although the higher {good:g}/s held" for bad, good in found.violations]
    ends = [rate for rate in (found.low, found.high) if rate is not None]
    single = [rate for rate in ends if sum(p.rate == rate for p in arm.points) == 1]
    if single:
        lines.append(f"a single probe stands for {_listed(single)} requests/s")
    if limits["itl_p99_ms"] is not None and arm.points and not any("itl" in p.pressures for p in arm.points):
        lines.append("not held to capacity.itl_p99_ms: its answers come whole, without gaps between tokens")
    if late := [point for point in arm.points if point.warnings]:
        lines.append(
            f"{len(late)} of {len(arm.points)} probes: {late[0].warnings[0]}; little against the SLO"
        )
    return lines


def shown(found: dict[str, Any]) -> str:
    """An interval in words: 5.2 to 5.5, below 0.3, at least 9."""
    low, high = found["low"], found["high"]
    if low is None:
        return f"below {high:.3g}" if high is not None else "-"
    return f"at least {low:.3g}" if high is None else f"{low:.3g} to {high:.3g}"


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)
