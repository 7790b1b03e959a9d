"""Sessions of several turns: their order, their growing history, their think times."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.conf import compose
from harness.plan import draw_schedule
from tests.support.workload_configs import workload
from workloads import WorkloadError, draw
from workloads.__main__ import main
from workloads.schedule import Schedule

THREE = {"dist": "constant", "value": 3}
SOME = {"dist": "discrete", "values": [1, 2, 4], "weights": [0.5, 0.3, 0.2]}
THINK = {"dist": "lognormal", "mu": 1.0, "sigma": 0.5, "max": 30}


def sessions(turns=THREE, think_s=THINK, history=True):
    return {"turns": turns, "think_s": think_s, "history": history}


def drawn(name="chat", requests=120, seed=0, duration_s=None, block=None, **changes) -> Schedule:
    node = workload(name, sessions=block or sessions(), **changes)
    return draw(node, seed=seed, requests=requests, duration_s=duration_s)


def by_session(schedule):
    found = defaultdict(list)
    for request in schedule:
        found[request.session].append(request)
    return dict(found)


@settings(max_examples=25, deadline=None)
@given(
    requests=st.integers(1, 90), seed=st.integers(0, 50), most=st.integers(1, 6),
    name=st.sampled_from(["chat", "rag", "summarize"]), history=st.booleans(),
)  # fmt: skip
def test_any_number_of_requests_is_exact_and_every_session_is_whole_up_to_its_end(
    requests, seed, most, name, history
):
    turns = {"dist": "quantiles", "points": [[0, 1], [100, most]]}
    schedule = drawn(name, requests, seed, block=sessions(turns, history=history))
    assert len(schedule) == requests
    assert [r.id for r in schedule] == [f"r{i:06d}" for i in range(requests)]
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(schedule))
    for turn_list in by_session(schedule).values():
        assert [r.turn for r in turn_list] == list(range(len(turn_list)))
        assert len(turn_list) <= most
        assert len({r.request_class for r in turn_list}) == 1, "a session stays in its class"
        assert turn_list[0].think_s is None
        for before, after in pairwise(turn_list):
            assert after.think_s is not None
            assert after.arrival_s == pytest.approx(before.arrival_s + after.think_s)


def test_only_the_last_session_is_cut():
    schedule = drawn(requests=121)
    counts = Counter(r.session for r in schedule)
    assert sorted(counts)[-1] == "s000040"
    assert [counts[name] for name in sorted(counts)] == [3] * 40 + [1]


def spelt(request) -> list[tuple[str, int]]:
    """Each token by its segment and its place in it: what two prompts share is what begins alike."""
    return [(name, k) for name, tokens in request.segments for k in range(tokens)]


@pytest.mark.parametrize("name", ["chat", "rag"])
def test_a_prompt_begins_with_the_prompt_before_it_and_the_answer_to_that(name):
    for turn_list in by_session(drawn(name, requests=120)).values():
        for before, after in pairwise(turn_list):
            assert spelt(after)[: before.prompt_tokens] == spelt(before)
            assert after.prompt_tokens > before.prompt_tokens + before.stop_after


def test_a_chat_is_its_system_prompt_a_message_and_what_came_after():
    for turn_list in by_session(drawn(requests=300)).values():
        assert len(turn_list[0].segments) == 2, "no invented history"
        for turn, request in enumerate(turn_list):
            names = [s.segment_id.split("/")[1] for s in request.segments]
            assert names == ["system", "message", "session"][: 2 + (turn > 0)]


def test_no_two_sessions_share_more_than_the_system_prompt():
    owners = defaultdict(set)
    for request in drawn(requests=300):
        for segment in request.segments[1:]:
            owners[segment.segment_id].add(request.session)
    assert {len(sessions_) for sessions_ in owners.values()} == {1}


def test_shared_parts_come_once_and_passages_are_found_anew():
    for turn_list in by_session(drawn("rag", requests=90)).values():
        for request in turn_list:
            names = [s.segment_id for s in request.segments]
            assert names.count("rag/system") == 1
            assert names[0] == "rag/system"
            if request.request_class == "retrieval":
                found = [n for n in names if "/passages/" in n]
                assert len(found) >= 3 * request.turn


def test_without_history_every_prompt_is_its_own():
    plain = drawn("rag", requests=90, block=sessions(history=False))
    for turn_list in by_session(plain).values():
        assert all(r.segments[0].segment_id == "rag/system" for r in turn_list)
        assert all("/answer/" not in s.segment_id for r in turn_list for s in r.segments)
    mean = np.mean([r.prompt_tokens for r in plain])
    assert mean == pytest.approx(
        np.mean([r.prompt_tokens for r in draw(workload("rag"), seed=0, requests=90)]), rel=0.1
    )


def test_turns_and_think_times_have_their_distributions():
    schedule = drawn(requests=6000, block=sessions(SOME), arrivals__factor=None)
    counts = Counter(Counter(r.session for r in schedule).values())
    total = sum(counts.values())
    for turns, weight in ((1, 0.5), (2, 0.3), (4, 0.2)):
        assert counts[turns] / total == pytest.approx(weight, abs=0.03)
    thinks = np.array([r.think_s for r in schedule if r.think_s is not None])
    assert np.median(thinks) == pytest.approx(np.e, rel=0.05)
    assert thinks.max() <= 30
    starts = np.array([r.arrival_s for r in schedule if r.turn == 0])
    assert len(starts) / starts[-1] == pytest.approx(5, rel=0.06), "the rate is that of sessions"
    assert schedule.planned_rate is None, "that of requests depends on the server"


def test_a_session_whose_next_prompt_would_not_fit_ends():
    block = sessions({"dist": "constant", "value": 12})
    schedule = drawn(requests=400, block=block, input__cap=600)
    assert len(schedule) == 400, "other sessions take the place"
    assert max(r.prompt_tokens for r in schedule) <= 600
    ended = [turn_list for turn_list in by_session(schedule).values() if len(turn_list) < 12]
    assert len(ended) > 20
    (note,) = [n for n in schedule.notes if "sessions end early" in n]
    count, total = int(note.split()[0]), len(by_session(schedule))
    assert note.endswith(f"of {total} sessions end early: their next prompt would pass "
                         "workload.input.cap=600 tokens")  # fmt: skip
    assert abs(count - len(ended)) <= 1, "the last one may be cut by the count instead"
    full = drawn(requests=400, block=block, input__cap=None)
    longest = {s: t[-1].prompt_tokens for s, t in by_session(full).items() if len(t) == 12}
    assert min(longest.values()) > 600, "all of them would have passed it"


def test_a_duration_ends_the_turns_too():
    schedule = drawn(requests=None, duration_s=20)
    assert 10 < schedule.requests[-1].arrival_s <= 20
    counts = Counter(r.session for r in schedule)
    assert set(counts.values()) == {1, 2, 3}
    ramp = {"kind": "ramp", "from": 1, "to": 5, "over_s": 40}
    assert drawn(requests=None, rate=ramp).requests[-1].arrival_s <= 40


def test_the_seed_decides_and_nothing_else():
    assert drawn(seed=1).sha256() == drawn(seed=1).sha256()
    assert drawn(seed=1).sha256() != drawn(seed=2).sha256()
    fast, slow = by_session(drawn(rate=50)), by_session(drawn(rate=5))
    for name, turn_list in slow.items():
        if len(turn_list) == len(fast.get(name, [])):
            assert [r.segments for r in fast[name]] == [r.segments for r in turn_list]
            assert [r.think_s for r in fast[name]] == [r.think_s for r in turn_list]


def test_a_workload_without_sessions_is_as_it_was():
    node = workload("chat")
    assert node["sessions"] is None
    with_null = draw(node, seed=0)
    del node["sessions"]
    assert draw(node, seed=0).sha256() == with_null.sha256()
    assert all(r.session is None and r.turn == 0 and r.think_s is None for r in with_null)


def test_it_survives_the_file(tmp_path):
    schedule = drawn()
    schedule.to_parquet(tmp_path / "s.parquet")
    again = Schedule.from_parquet(tmp_path / "s.parquet")
    assert again == schedule
    assert again.sha256() == schedule.sha256()


def test_the_experiment_and_a_setting_of_the_command_line():
    schedule = draw_schedule(compose(["experiment=sessions"]))
    counts = Counter(Counter(r.session for r in schedule).values())
    assert counts[1] > counts[2] > counts[4]
    assert max(counts) > 3
    two = "turns:{dist:constant,value:2},think_s:{dist:constant,value:0},history:true"
    override = f"workload.sessions={{{two}}}"
    pairs = by_session(draw_schedule(compose(["workload=chat", override, "load.requests=20"])))
    assert {len(turn_list) for turn_list in pairs.values()} == {2}
    assert all(a.arrival_s == b.arrival_s for a, b in pairs.values()), "no time to think"


def test_show_prints_turns_and_think_times(capsys):
    three = "turns: {dist: constant, value: 3}, think_s: {dist: constant, value: 2.5}, history: true"
    assert main(["show", "chat", f"sessions={{{three}}}", "--requests", "30"]) == 0
    out = capsys.readouterr().out
    assert "10 sessions" in out
    (turns,) = [line for line in out.splitlines() if line.startswith("│ turns")]
    (thinks,) = [line for line in out.splitlines() if line.startswith("│ think_s")]
    assert turns.split("│")[2].split() == ["10"]
    assert {c.strip() for c in turns.split("│")[4:-1]} == {"3"}
    assert thinks.split("│")[2].split() == ["20"]
    assert {c.strip() for c in thinks.split("│")[3:-1]} == {"2.5"}
    assert "turn by turn" in out


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (sessions({"dist": "constant", "value": 0}), r"sessions\.turns=.*may make 0 turns, needs 1 or more"),
        (sessions({"dist": "lognormal", "mu": 0, "sigma": 1}), r"may make 0 turns.*min: 1"),
        (sessions({"dist": "constant", "value": -2}), r"sessions\.turns\.value=-2: needs a number of 0 or"),
        (sessions({"dist": "constant", "value": float("nan")}), r"sessions\.turns\.value=nan"),
        (sessions({"dist": "constant", "value": 20_000}), r"makes 2e\+04 turns, needs 10000 at most"),
        (sessions(5), r"workload\.sessions\.turns=5: needs a mapping.*dist: constant"),
        (sessions(think_s={"dist": "constant", "value": -1}), r"sessions\.think_s\.value=-1: needs a number"),
        (sessions(think_s={"dist": "constant", "value": float("nan")}), r"sessions\.think_s\.value=nan"),
        (sessions(think_s={"dist": "lognormal", "mu": 1000, "sigma": 1}), "makes an infinite think time"),
        (sessions(history="yes"), r"sessions\.history=yes: needs true or false"),
        ({**sessions(), "users": 3}, r"workload\.sessions\.users is not a setting"),
        ({"turns": THREE, "history": True}, r"workload\.sessions\.think_s is missing"),
        ([3], r"workload\.sessions=\[3\]: needs a mapping"),
    ],
)  # fmt: skip
def test_wrong_sessions_are_one_line(block, words):
    with pytest.raises(WorkloadError, match=words) as caught:
        drawn(block=block)
    assert "\n" not in str(caught.value)


def test_sessions_without_end_take_no_more_than_is_asked_for():
    endless = sessions({"dist": "constant", "value": 10_000})
    schedule = drawn(requests=150, block=endless, input__cap=None)
    assert [r.turn for r in schedule] == list(range(150))
    assert schedule.notes == draw(workload("chat", input__cap=None), seed=0, requests=1).notes
    with pytest.raises(WorkloadError, match="makes more than 5000000 requests; needs fewer turns"):
        drawn(requests=None, duration_s=3600, block=endless)


def test_later_turns_must_add_something():
    node = workload("chat", sessions=sessions())
    del node["classes"]["chat"]["input"]["message"]
    with pytest.raises(WorkloadError, match="later turns of a session add nothing; needs a part of kind"):
        draw(node, seed=0)
    with pytest.raises(WorkloadError, match=r"workload\.sessions is not a setting"):
        draw({**workload("trace", path="x"), "sessions": sessions()}, seed=0)
