"""On what terms a request comes: whose it is, how urgent, and until when its answer is of use.

Three optional keys of a class: `tenants` (weights by name), `priority` (lower first) and `deadline_ms` (for
the whole answer, from the intended arrival). A class without them is everybody's: tenant "default", priority
0, no deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.settings import Settings
from workloads.streams import stream

KEYS = ("tenants", "priority", "deadline_ms")
HIGHEST_PRIORITY = 1000
"""Of a class, either way from 0: more steps than anybody tells apart."""


@dataclass(frozen=True, slots=True)
class Terms:
    tenant: str = "default"
    priority: int = 0
    deadline_ms: float | None = None


EVERYBODY = Terms()


def draw_terms(seed: int, classes: Settings, member: np.ndarray, user: np.ndarray) -> list[Terms]:
    """The terms of each request. member: the number of its class; user: who sends it, int; one user has one
    tenant, whatever else is drawn. Raises WorkloadError."""
    names = list(classes)
    u = stream(seed, "tenants").random(int(user.max(initial=-1)) + 1)[user]
    terms = [EVERYBODY] * len(member)
    for number, name in enumerate(names):
        node = classes.node(name)
        tenants, edges = _tenants(node)
        priority = _priority(node)
        deadline_ms = node.number("deadline_ms", above=0) if _given(node, "deadline_ms") else None
        for index in np.flatnonzero(member == number):
            place = min(int(np.searchsorted(edges, u[index], side="right")), len(tenants) - 1)
            terms[index] = Terms(tenants[place], priority, deadline_ms)
    return terms


def _tenants(node: Settings) -> tuple[list[str], np.ndarray]:
    """Names, and the share of users up to and with each."""
    if not _given(node, "tenants"):
        return [EVERYBODY.tenant], np.ones(1)
    tenants = node.node("tenants")
    weights = np.array([tenants.number(name, least=0) for name in tenants])
    if not weights.sum() > 0:
        raise node.error("tenants", "needs a weight above 0 for a tenant, as {acme: 3, birch: 1}")
    return list(tenants), weights.cumsum() / weights.sum()


def _priority(node: Settings) -> int:
    if not _given(node, "priority"):
        return 0
    return node.whole("priority", least=-HIGHEST_PRIORITY, most=HIGHEST_PRIORITY)


def _given(node: Settings, key: str) -> bool:
    return key in node and node.get(key) is not None
