"""Tenants, priorities and deadlines of classes, and the preset that has them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.support.workload_configs import full_size, workload
from workloads import WorkloadError, draw
from workloads.schedule import Schedule


def columns(schedule: Schedule, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(request, name) for name in names) for request in schedule]


def with_classes(**classes: dict[str, object]) -> dict[str, object]:
    node = workload("tiers")
    for name, changes in classes.items():
        node["classes"][name] |= changes
    return node


def test_a_class_without_terms_is_everybodys():
    node = workload("rag")
    for terms in node["classes"].values():
        del terms["tenants"], terms["priority"]
    assert set(columns(draw(node, seed=0), "tenant", "priority", "deadline_ms")) == {("default", 0, None)}


def test_every_request_of_tiers_names_the_terms_of_its_class():
    schedule = draw(workload("tiers"), seed=0)
    assert set(columns(schedule, "request_class", "priority", "deadline_ms")) == {
        ("interactive", 0, 10000.0),
        ("long_context", 1, 20000.0),
        ("batch", 2, 60000.0),
    }


def test_tiers_has_the_shares_and_the_heavy_tenant_that_its_file_says():
    schedule = draw(full_size("tiers"), seed=0, requests=6000)
    classes = Counter(r.request_class for r in schedule)
    assert [round(classes[c] / 6000, 1) for c in ("interactive", "long_context", "batch")] == [0.5, 0.3, 0.2]
    by = Counter(columns(schedule, "request_class", "tenant"))
    assert by["long_context", "acme"] / classes["long_context"] == pytest.approx(2 / 3, abs=0.04)
    assert by["batch", "acme"] / classes["batch"] == pytest.approx(2 / 3, abs=0.04)
    assert ("batch", "birch") not in by
    for tenant in ("acme", "birch", "cedar"):
        assert by["interactive", tenant] / classes["interactive"] == pytest.approx(1 / 3, abs=0.04)
    tokens = Counter[str]()
    for r in schedule:
        tokens[r.tenant] += r.prompt_tokens + r.stop_after
    assert tokens["acme"] > tokens["birch"] + tokens["cedar"]


@pytest.mark.parametrize(
    ("preset", "of_preset", "own", "of_own"),
    [
        ("tiers", "interactive", "chat", "chat"),
        ("tiers", "batch", "summarize", "summarize"),
        ("mixed", "chat", "chat", "chat"),
        ("mixed", "rag", "rag", "retrieval"),
        ("mixed", "summarize", "summarize", "summarize"),
        ("mixed", "batch", "batch", "generate"),
    ],
)
def test_the_classes_of_a_mix_are_those_of_their_own_files(preset, of_preset, own, of_own):
    """Names of parts apart: what is called the same would be shared."""
    here, there = workload(preset)["classes"][of_preset], workload(own)["classes"][of_own]
    assert list(here["input"].values()) == list(there["input"].values())
    assert here["output"] == there["output"]
    assert preset == "tiers" or here.get("slo") == there.get("slo")


@pytest.mark.parametrize("name", ["mixed", "tiers"])
def test_classes_of_a_mix_share_no_prompt(name):
    owners: dict[str, set[str]] = {}
    for r in draw(workload(name), seed=0):
        for segment in r.segments:
            owners.setdefault(segment.segment_id, set()).add(r.request_class)
    common = {name for name, classes in owners.items() if len(classes) > 1}
    assert not common


def test_terms_move_nothing_else_and_nothing_else_moves_them():
    rest = ("arrival_s", "request_class", "segments", "stop_after", "max_tokens", "cancel_value", "stream")
    base = draw(workload("tiers"), seed=3)
    other = draw(with_classes(batch={"tenants": {"x": 1, "y": 5}, "priority": -3, "deadline_ms": 1}), seed=3)
    assert columns(base, *rest) == columns(other, *rest)
    assert {r.tenant for r in other if r.request_class == "batch"} == {"x", "y"}
    same = [r.tenant for r in base if r.request_class == "interactive"]
    assert same == [r.tenant for r in other if r.request_class == "interactive"]
    faster = draw(workload("tiers", rate=50), seed=3)
    assert columns(base, "tenant") == columns(faster, "tenant")
    assert columns(draw(workload("tiers"), seed=3, requests=300), "tenant")[:200] == columns(base, "tenant")
    assert columns(draw(workload("tiers"), seed=4), "tenant") != columns(base, "tenant")


def test_all_turns_of_a_session_are_of_one_tenant():
    sessions = {
        "turns": {"dist": "constant", "value": 3},
        "think_s": {"dist": "constant", "value": 1},
        "history": True,
    }
    schedule = draw(workload("tiers", sessions=sessions), seed=0, requests=90)
    tenants: dict[str | None, set[str]] = {}
    for r in schedule:
        tenants.setdefault(r.session, set()).add(r.tenant)
        assert r.deadline_ms is not None
    assert {len(names) for names in tenants.values()} == {1}
    assert len(set().union(*tenants.values())) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tenants": {}}, "classes.batch.tenants={}: needs a weight above 0"),
        ({"tenants": {"acme": 0}}, "classes.batch.tenants={'acme': 0}: needs a weight above 0"),
        ({"tenants": {"acme": -1}}, "classes.batch.tenants.acme=-1: needs a number of 0 or more"),
        ({"tenants": "acme"}, "classes.batch.tenants='acme': needs a mapping"),
        ({"priority": 0.5}, "classes.batch.priority=0.5: needs a whole number"),
        ({"priority": 5000}, "classes.batch.priority=5000: needs a whole number of 1000 at most"),
        ({"deadline_ms": 0}, "classes.batch.deadline_ms=0: needs a number above 0"),
        ({"deadline": 5}, "classes.batch.deadline is not a setting; choose from: cancel, deadline_ms"),
    ],
)
def test_what_cannot_work_is_named(change, words):
    with pytest.raises(WorkloadError) as caught:
        draw(with_classes(batch=change), seed=0)
    assert words in str(caught.value)


def test_null_terms_are_no_terms():
    schedule = draw(with_classes(batch={"tenants": None, "priority": None, "deadline_ms": None}), seed=0)
    batch = [r for r in schedule if r.request_class == "batch"]
    assert set(columns(batch, "tenant", "priority", "deadline_ms")) == {("default", 0, None)}
    assert np.all([r.deadline_ms is not None for r in schedule if r.request_class != "batch"])
