"""Whose requests they are, on what terms, and one process of arrivals for each tenant.

Optional keys of a class: `tenants`, its users' tenants, as weights by name or as {count: 8, zipf: 1.1}
(tenant k, from 1, has the share k^-zipf); `priority` (lower first) and `deadline_ms` (for the whole answer,
from the intended arrival). A class without them is everybody's: tenant "default", priority 0, no deadline.

With `arrivals.tenants` every tenant of every class sends by a renewal process of its own, as bursty as it
is: `cv` is a distribution over tenants, gamma gaps up to `weibull_above`, Weibull beyond. Their
superposition is the workload's; the volume of a tenant is the class's weight times its share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads import exact
from workloads.arrivals import LEAST_CV, MOST_CV, Process, renewal_process
from workloads.gaps import Renewal
from workloads.lengths import distribution_at
from workloads.settings import Settings
from workloads.streams import stream

KEYS = ("tenants", "priority", "deadline_ms")
HIGHEST_PRIORITY = 1000
"""Of a class, either way from 0: more steps than anybody tells apart."""
MOST_TENANTS = 10_000
NOBODY = "default"


@dataclass(frozen=True, slots=True)
class ClassTerms:
    """The terms of a class: its tenants, what share of its users is of each (in all 1), and the rest."""

    tenants: tuple[str, ...]
    shares: np.ndarray
    priority: int
    deadline_ms: float | None


def read_terms(classes: Settings) -> list[ClassTerms]:
    """The terms of every class, in order. Raises WorkloadError."""
    return [_terms(classes.node(name), name) for name in classes]


def choose_tenants(seed: int, terms: list[ClassTerms], member: np.ndarray, user: np.ndarray) -> np.ndarray:
    """The tenant of each request, int: its number among those of its class. member: the number of its class;
    user: who sends it, int; one user has one tenant, whatever else is drawn."""
    u = stream(seed, "tenants").random(int(user.max(initial=-1)) + 1)[user]
    tenant = np.zeros(len(member), dtype=np.int64)
    for number, one in enumerate(terms):
        mine = member == number
        found = np.searchsorted(np.cumsum(one.shares), u[mine], side="right")
        tenant[mine] = np.minimum(found, len(one.tenants) - 1)
    return tenant


@dataclass(frozen=True, slots=True)
class Superposition:
    """The tenants of all classes, each with a renewal process of its own."""

    of_class: np.ndarray  # int [k]
    number: np.ndarray  # int [k], among the tenants of its class
    share: np.ndarray  # of all arrivals, [k], in all 1
    renewals: tuple[Renewal, ...]


def read_superposition(
    seed: int, arrivals: Settings, terms: list[ClassTerms], weights: np.ndarray
) -> Superposition | None:
    """`arrivals.tenants`; None where it is null or absent. weights: the classes' shares, in all 1."""
    if "tenants" not in arrivals or arrivals.get("tenants") is None:
        return None
    node = arrivals.node("tenants", "{cv: {dist: constant, value: 1.2}, weibull_above: 1.5}")
    node.only("cv", "weibull_above")
    of_class = np.concatenate([np.full(len(t.tenants), i) for i, t in enumerate(terms)])
    number = np.concatenate([np.arange(len(t.tenants)) for t in terms])
    share = np.concatenate([w * t.shares for w, t in zip(weights, terms, strict=True)])
    cvs = np.clip(
        distribution_at(node, "cv")(stream(seed, "arrivals", "cv").random(len(share))), LEAST_CV, MOST_CV
    )
    above = node.number("weibull_above", least=0)
    kinds = ["gamma" if cv <= above else "weibull" for cv in cvs]
    renewals = tuple(Renewal(kind, float(cv)) for kind, cv in zip(kinds, cvs, strict=True))
    some = share > 0
    chosen = tuple(r for r, s in zip(renewals, some, strict=True) if s)
    return Superposition(of_class[some], number[some], share[some], chosen)


class SuperposedProcess:
    """The merged arrivals, at rate 1 in all, and whose each is. A Process."""

    def __init__(self, seed: int, superposition: Superposition) -> None:
        self._them = superposition
        self._processes: list[Process] = [
            renewal_process(seed, renewal, "tenant", str(c), str(k))
            for renewal, c, k in zip(
                superposition.renewals, superposition.of_class, superposition.number, strict=True
            )
        ]
        self._sender = np.empty(0, dtype=np.int64)

    def __call__(self, n: int) -> np.ndarray:
        span = n * 1.1 + 50.0
        while True:
            parts = [self._until(k, span) for k in range(len(self._processes))]
            if sum(map(len, parts)) >= n:
                break
            span *= 1.5
        times = np.concatenate(parts)
        sender = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        order = np.argsort(times, kind="stable")[:n]
        self._sender = sender[order]
        return times[order]

    def senders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(class, number of the tenant in it) of the first n arrivals of the last call."""
        sender = self._sender[:n]
        return self._them.of_class[sender], self._them.number[sender]

    def _until(self, k: int, span: float) -> np.ndarray:
        share = float(self._them.share[k])
        count = int(share * span * 1.2) + 16
        while True:
            times = self._processes[k](count) / share
            if times[-1] > span:
                return times[: int(np.searchsorted(times, span))]
            count *= 2


def _terms(node: Settings, name: str) -> ClassTerms:
    deadline_ms = node.number("deadline_ms", above=0) if _given(node, "deadline_ms") else None
    priority = 0
    if _given(node, "priority"):
        priority = node.whole("priority", least=-HIGHEST_PRIORITY, most=HIGHEST_PRIORITY)
    if not _given(node, "tenants"):
        return ClassTerms((NOBODY,), np.ones(1), priority, deadline_ms)
    tenants = node.node("tenants", "{acme: 3, birch: 1} or {count: 8, zipf: 1.1}")
    if "zipf" in tenants:
        tenants.only("count", "zipf")
        count = tenants.whole("count", most=MOST_TENANTS)
        weights = exact.power(1.0 / np.arange(1, count + 1), tenants.number("zipf", least=0))
        names = tuple(f"{name}-{k}" for k in range(1, count + 1))
    else:
        names = tuple(tenants)
        weights = np.array([tenants.number(one, least=0) for one in names])
    if not weights.sum() > 0:
        raise node.error("tenants", "needs a weight above 0 for a tenant, as {acme: 3, birch: 1}")
    return ClassTerms(names, weights / np.cumsum(weights)[-1], priority, deadline_ms)


def _given(node: Settings, key: str) -> bool:
    return key in node and node.get(key) is not None
