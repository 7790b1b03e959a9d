"""How one schedule is shared out among several worker processes. Pure: no process, no clock.

Every request belongs to exactly one slice, and the slices together send what one process would send at the
same times: an open schedule is drawn before it is cut, so no worker draws arrivals of its own (N thinned
streams with their own clocks would be another traffic)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.conf.checks import MAX_PROCESSES
from harness.loadgen.settings import LoadSettings
from workloads.schedule import ScheduledRequest

TOKENS_PER_S = 40_000
"""Planned answer tokens a second for one process. One that receives them in single chunks does 50,000 on a
core; the rest is for moments above the mean."""
REQUESTS_PER_S = 2_000
"""Requests a second for one process: each costs a body, a write and a record besides its tokens."""


def slices(requests: Sequence[ScheduledRequest], weights: Sequence[int]) -> list[list[ScheduledRequest]]:
    """One list per weight, each in the order of the schedule. A session stays whole, since each of its turns
    waits for the one before. Sessions and single requests are dealt in order of their first arrival, each to
    the slice that is furthest behind its weight, so at any time every slice has its share."""
    dealt = [0] * len(weights)
    owner: dict[str, int] = {}
    parts: list[list[ScheduledRequest]] = [[] for _ in weights]
    for request in requests:
        k = owner.get(request.session) if request.session is not None else None
        if k is None:
            k = min(range(len(weights)), key=lambda i: ((dealt[i] + 1) / weights[i], i))
            dealt[k] += 1
            if request.session is not None:
                owner[request.session] = k
        parts[k].append(request)
    return parts


def split(total: int, n: int) -> list[int]:
    """n whole numbers that differ by at most 1 and add up to total."""
    return [total // n + (k < total % n) for k in range(n)]


def shares(settings: LoadSettings, requests: int, n: int) -> list[LoadSettings]:
    """The settings of each worker, at most n of them: never more than there are requests or places. The
    places of a cap or of a closed loop add up to load.concurrency."""
    n = max(1, min(n, requests))
    if settings.concurrency is None:
        return [settings] * n
    places = split(settings.concurrency, min(n, settings.concurrency))
    return [replace(settings, concurrency=count) for count in places]


def auto_processes(requests: Sequence[ScheduledRequest], settings: LoadSettings, cores: int) -> int:
    """load.processes=auto: as many as the planned rates need, and never more than `cores`, those that
    nothing local (an engine on the CPU) has been given.

    One for a closed loop and for a cap: who is held back there depends on all places together, and several
    workers would each know only their own."""
    if settings.kind == "closed" or settings.concurrency is not None or len(requests) < 2:
        return 1
    first, last = requests[0].arrival_s, requests[-1].arrival_s
    span_s = max(last - first, 1.0)  # all at once: they are not sent faster than one can send them
    needed = max(
        sum(request.stop_after for request in requests) / span_s / TOKENS_PER_S,
        len(requests) / span_s / REQUESTS_PER_S,
    )
    return max(1, min(math.ceil(needed), cores, MAX_PROCESSES))
