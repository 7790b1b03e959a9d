"""A schedule over several workers: nothing is lost, nothing is sent twice, sessions stay whole, and every
worker has its share at any time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.loadgen import LoadSettings
from harness.loadgen.slices import (
    REQUESTS_PER_S,
    TOKENS_PER_S,
    auto_processes,
    shares,
    slices,
    split,
)
from tests.support.load import request

plans = st.lists(st.none() | st.integers(0, 9), max_size=60)
"""For each request its session, or none."""


def plan(sessions, gap_s=0.01, stop_after=4):
    turns = Counter()
    rows = []
    for i, session in enumerate(sessions):
        rows.append(
            request(
                i,
                i * gap_s,
                stop_after,
                session=None if session is None else f"s{session}",
                turn=0 if session is None else turns[session],
            )
        )
        turns[session] += 1
    return rows


@given(plans, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_request_is_in_exactly_one_slice_in_its_order(sessions, weights):
    rows = plan(sessions)
    parts = slices(rows, weights)
    assert len(parts) == len(weights)
    together = sorted((r for part in parts for r in part), key=lambda r: r.id)
    assert together == rows
    for part in parts:
        assert [r.id for r in part] == sorted(r.id for r in part)


@given(plans, st.integers(1, 6))
def test_a_session_stays_whole(sessions, n):
    parts = slices(plan(sessions), [1] * n)
    owners = [{r.session for r in part if r.session is not None} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))


@given(st.integers(0, 200), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_at_any_time_every_worker_has_its_share(count, weights, data):
    rows = plan([None] * count)
    parts = slices(rows, weights)
    until = data.draw(st.integers(0, count))
    for part, weight in zip(parts, weights, strict=True):
        have = sum(int(r.id[1:]) < until for r in part)
        assert abs(have - until * weight / sum(weights)) < len(weights)
    if len(set(weights)) == 1:  # dealt round: counts never differ by more than one
        counts = [sum(int(r.id[1:]) < until for r in part) for part in parts]
        assert max(counts) - min(counts) <= 1


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_a_split_adds_up(total, n):
    parts = split(total, n)
    assert (len(parts), sum(parts)) == (n, total)
    assert max(parts) - min(parts) <= 1


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 9), st.sampled_from(["open", "closed"]))
def test_places_add_up_and_every_worker_has_one(concurrency, requests, n, kind):
    parts = shares(LoadSettings("r", kind=kind, concurrency=concurrency), requests, n)
    assert 1 <= len(parts) <= min(n, requests, concurrency)
    assert len(parts) == min(n, requests, concurrency)
    assert sum(part.concurrency for part in parts) == concurrency
    assert min(part.concurrency for part in parts) >= 1
    assert {(part.kind, part.run_id) for part in parts} == {(kind, "r")}


def test_an_open_load_without_a_cap_is_shared_as_it_is():
    settings = LoadSettings("r", timeout_s=3)
    assert shares(settings, 5, 3) == [settings] * 3
    assert shares(settings, 2, 3) == [settings] * 2


@pytest.mark.parametrize(
    ("rate", "tokens", "cores", "n"),
    [
        (10, 100, 16, 1),
        (TOKENS_PER_S / 100, 99, 16, 1),
        (TOKENS_PER_S / 100, 102, 16, 2),
        (TOKENS_PER_S / 100, 302, 16, 4),
        (TOKENS_PER_S / 100, 302, 3, 3),
        (TOKENS_PER_S / 100, 302, 1, 1),
        (TOKENS_PER_S / 100, 302, 0, 1),
        (REQUESTS_PER_S * 0.99, 1, 16, 1),
        (REQUESTS_PER_S * 2.1, 1, 16, 3),
    ],
)
def test_auto_counts_what_one_process_can_carry(rate, tokens, cores, n):
    rows = plan([None] * int(rate * 2), 1 / rate, tokens)
    assert auto_processes(rows, LoadSettings("r"), cores) == n
    assert auto_processes(rows, LoadSettings("r", kind="closed", concurrency=500), cores) == 1
    assert auto_processes(rows, LoadSettings("r", concurrency=500), cores) == 1


def test_auto_of_next_to_nothing_is_one():
    assert auto_processes([], LoadSettings("r"), 8) == 1
    assert auto_processes(plan([None], 0.0, 10**6), LoadSettings("r"), 8) == 1
