"""When requests arrive: a renewal process of unit-mean gaps, laid over a rate that may have episodes and
swings.

The gaps are drawn without knowing the rate and then stretched, so another rate replays the same pattern,
faster or slower (swings apart, which run on the clock). Episodes repeat: `off_s` seconds of quiet, then
`on_s` seconds at `factor` times the quiet rate, while the mean over a whole period stays the given rate.
Clusters: each arrival of the process brings several requests within milliseconds. Ramps and steps:
`workloads.rates`; random swings, days and silences: `workloads.swings`; one process for each tenant:
`workloads.tenants`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from workloads import exact
from workloads.errors import WorkloadError
from workloads.gaps import RENEWALS, Renewal, unit_gaps
from workloads.rates import RateProfile, shown_rate
from workloads.settings import Settings
from workloads.streams import stream
from workloads.swings import Swings, place_swinging, read_swings

KINDS = (*RENEWALS, "at_once")
LEAST_CV, MOST_CV = 1e-3, 100.0
MOST_REQUESTS = 5_000_000  # a schedule lives in memory
KEYS = ("kind", "cv", "burst", "pinned", "factor", "day", "on_off", "cluster", "tenants")


@dataclass(frozen=True, slots=True)
class Burst:
    """factor 1 means no episodes."""

    factor: float = 1.0
    on_s: float = 5.0
    off_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """size: requests in a cluster on average (geometric, 1: none are clustered); within_s: the mean gap in
    it."""

    size: float = 1.0
    within_s: float = 0.003


@dataclass(frozen=True, slots=True)
class Arrivals:
    """pinned: n arrivals take exactly the time in which n are expected, so that two kinds differ in
    burstiness and not in load."""

    kind: str
    cv: float = 1.0
    burst: Burst = Burst()
    pinned: bool = False
    swings: Swings = field(default_factory=Swings)
    cluster: Cluster = Cluster()

    @property
    def renewal(self) -> Renewal:
        return Renewal(self.kind, self.cv)


Process = Callable[[int], np.ndarray]
"""From a count n to the first n (or a few more) arrivals of a process of rate 1, in order; a larger n
begins with the same."""


def read_arrivals(node: Settings) -> Arrivals:
    """The `arrivals` node of a workload."""
    node.only(*KEYS)
    burst = node.node("burst")
    burst.only("factor", "on_s", "off_s")
    return Arrivals(
        kind=node.choice("kind", KINDS),
        cv=read_cv(node),
        burst=Burst(
            factor=burst.number("factor", above=0),
            on_s=burst.number("on_s", above=0),
            off_s=burst.number("off_s", above=0),
        ),
        pinned="pinned" in node and node.flag("pinned"),
        swings=read_swings(node),
        cluster=_cluster(node),
    )


def read_cv(node: Settings) -> float:
    """Beyond these a gamma has no gaps but 0, or none but the mean."""
    cv = node.number("cv", above=0)
    if not LEAST_CV <= cv <= MOST_CV:
        raise node.error("cv", f"needs {LEAST_CV:g} to {MOST_CV:g}; for equal gaps: arrivals.kind=constant")
    return cv


def _cluster(node: Settings) -> Cluster:
    if "cluster" not in node or node.get("cluster") is None:
        return Cluster()
    cluster = node.node("cluster", "{size: 2, within_s: 0.003}")
    cluster.only("size", "within_s")
    size = cluster.number("size", least=1)
    if size > 1000:
        raise cluster.error("size", "needs 1000 at most")
    return Cluster(size, cluster.number("within_s", least=0))


def renewal_process(seed: int, renewal: Renewal, *names: str) -> Process:
    """The arrivals of one renewal process, from a stream of its own."""
    rng = stream(seed, "arrivals", *names)
    gaps = [np.empty(0)]

    def first(n: int) -> np.ndarray:
        drawn = sum(map(len, gaps))
        if n > drawn:
            gaps.append(unit_gaps(rng, renewal, n - drawn))
        return np.cumsum(np.concatenate(gaps))[:n]

    return first


def place(requests: np.ndarray, rate: float, burst: Burst) -> np.ndarray:
    """Times in seconds at which the expected number of arrivals reaches `requests`, shape (n,)."""
    if burst.factor == 1:
        return requests / rate
    period = burst.off_s + burst.on_s
    quiet = rate * period / (burst.off_s + burst.factor * burst.on_s)
    periods, rest = np.divmod(requests, rate * period)
    in_burst = rest - quiet * burst.off_s
    within = np.where(in_burst < 0, rest / quiet, burst.off_s + in_burst / (quiet * burst.factor))
    return periods * period + within


def draw_arrivals(
    seed: int,
    arrivals: Arrivals,
    *,
    rate: float | RateProfile | None,
    requests: int | None,
    duration_s: float | None,
    process: Process | None = None,
) -> np.ndarray:
    """Arrival times in seconds from the start, not falling. Ends at `requests` arrivals or before the first
    that is later than `duration_s`, whichever comes first; one of them must be given. Pinned arrivals without
    a count are as many as `duration_s` is expected to bring. process: in place of the renewal process of
    `arrivals`."""
    if requests is not None and requests > MOST_REQUESTS:
        raise WorkloadError(f"load.requests={requests}: needs {MOST_REQUESTS} at most")
    if arrivals.kind == "at_once":
        if requests is None:
            raise WorkloadError("workload.requests=null: arrivals.kind=at_once needs a count")
        return np.zeros(requests)
    if rate is None:
        raise WorkloadError(f"workload.rate=null: arrivals.kind={arrivals.kind} needs requests per second")
    _refuse_two_shapes(arrivals, rate)
    if requests is None and duration_s is None:
        raise WorkloadError("workload.requests=null: give a count, or load.duration_s")
    process = process or renewal_process(seed, arrivals.renewal)
    if requests is not None:
        n = requests
    else:
        assert duration_s is not None
        expected = rate.expected(duration_s) if isinstance(rate, RateProfile) else rate * duration_s
        n = max(1, round(expected)) if arrivals.pinned else int(expected * 2) + 64
    while True:
        if n > MOST_REQUESTS:
            raise WorkloadError(
                f"workload.rate={shown_rate(rate)}, load.duration_s={duration_s}, "
                f"load.requests={requests}: "
                f"makes more than {MOST_REQUESTS} requests; lower one of them"
            )
        times = _times(seed, arrivals, rate, process, n, duration_s)
        if duration_s is None or (arrivals.pinned and requests is None):
            return times
        if requests is not None or times[-1] > duration_s:
            return times[times <= duration_s]
        n *= 2


def _times(
    seed: int,
    arrivals: Arrivals,
    rate: float | RateProfile,
    process: Process,
    n: int,
    duration_s: float | None,
) -> np.ndarray:
    counts, since = _clustered(seed, arrivals.cluster, process, n)
    if arrivals.pinned:
        counts = counts * (n / counts[-1])
    if not arrivals.swings.still:
        until_s = None if arrivals.pinned else duration_s
        times = place_swinging(seed, counts, rate, arrivals.swings, until_s)
        if arrivals.pinned and isinstance(rate, float | int):
            times = times * (n / rate / times[-1])
    elif isinstance(rate, RateProfile):
        times = rate.place(counts)
    else:
        times = place(counts, rate, arrivals.burst)
    return times if since is None else np.sort(times + since)[:n]


def _clustered(seed: int, cluster: Cluster, process: Process, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(the expected count at which each of n arrivals comes, seconds that it comes after the first of its
    cluster)."""
    if cluster.size == 1:
        return process(n), None
    # A cluster of geometric size: after each request another follows with this chance.
    more = 1 - 1 / cluster.size
    u = stream(seed, "arrivals", "cluster").random((n, 2))
    follows = u[:, 0] < more
    follows[0] = False
    which = np.cumsum(~follows) - 1
    gaps = np.where(follows, -exact.log(1 - u[:, 1]) * cluster.within_s, 0.0)
    run = np.cumsum(gaps)
    firsts = np.flatnonzero(~follows)
    return process(len(firsts))[which] * cluster.size, run - run[firsts][which]


def _refuse_two_shapes(arrivals: Arrivals, rate: float | RateProfile) -> None:
    if arrivals.kind == "constant" and not arrivals.swings.still:
        raise WorkloadError(
            "workload.arrivals.kind=constant: factor, day and on_off swing the rate, and the gaps with it; "
            "set those to null, or choose another kind"
        )
    if arrivals.burst.factor == 1:
        return
    if isinstance(rate, RateProfile):
        raise WorkloadError(
            f"workload.arrivals.burst.factor={arrivals.burst.factor:g}: workload.rate is a profile and has a "
            "shape of its own; set burst.factor=1, or workload.rate to a number"
        )
    if not arrivals.swings.still:
        raise WorkloadError(
            f"workload.arrivals.burst.factor={arrivals.burst.factor:g}: factor, day and on_off swing the "
            "rate as well; set burst.factor=1, or those to null"
        )
