from __future__ import annotations

import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import WorkloadError
from workloads.schedule import Schedule, ScheduledRequest, Segment, planned_rate, request_id

texts = st.text(min_size=1, max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> ScheduledRequest:
    segments = draw(st.lists(st.builds(Segment, texts, st.integers(1, 5000)), min_size=1, max_size=4))
    stop_after = draw(st.integers(1, 4000))
    streams = draw(st.booleans())
    kind = draw(st.sampled_from(["none", "before_first_token", "after_tokens", "after_s"]))
    session, turn = draw(st.none() | texts), draw(st.integers(0, 9))
    thinks = draw(st.none() | st.floats(0, 600)) if session is not None and turn > 0 else None
    return ScheduledRequest(
        id=draw(texts),
        arrival_s=draw(st.floats(0, 1e6)),
        tenant=draw(texts),
        request_class=draw(texts),
        priority=draw(st.integers(-5, 5)),
        deadline_ms=draw(st.none() | st.floats(0, 1e6)),
        stream=streams,
        session=session,
        turn=turn,
        segments=tuple(segments),
        prompt_tokens=sum(s.tokens for s in segments),
        max_tokens=stop_after + draw(st.integers(0, 100)),
        stop_after=stop_after,
        cancel_kind=kind,
        cancel_value=None if kind == "none" else draw(st.integers(1, 99) | st.floats(0.1, 99)),
        timeout_s=draw(st.none() | st.floats(0.1, 600)),
        think_s=thinks,
        transport=draw(st.sampled_from(["http", "websocket"])) if streams else "http",
    )


def one(**changes) -> ScheduledRequest:
    values = {
        "id": "r000000",
        "arrival_s": 0.5,
        "segments": (Segment("a", 7),),
        "prompt_tokens": 7,
        "max_tokens": 16,
        "stop_after": 4,
    }
    return ScheduledRequest(**{**values, **changes})


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(requests(), max_size=5), scale=st.floats(0.01, 2))
def test_parquet_gives_back_every_column_and_the_same_digest(tmp_path_factory, rows, scale):
    path = tmp_path_factory.mktemp("schedule") / "schedule.parquet"
    before = Schedule(tuple(rows), "mine", 7, scale, 2.5, skipped_rows=3, notes=("a note",))
    before.to_parquet(path)
    after = Schedule.from_parquet(path)
    assert after == before
    assert after.sha256() == before.sha256()


def test_segments_are_structs_that_pandas_and_others_can_read(tmp_path):
    Schedule((one(segments=(Segment("a", 3), Segment("b", 4))),), "mine", 0).to_parquet(
        tmp_path / "s.parquet"
    )
    table = pq.read_table(tmp_path / "s.parquet")
    assert table["segments"].to_pylist() == [
        [{"segment_id": "a", "tokens": 3}, {"segment_id": "b", "tokens": 4}]
    ]
    assert table.column_names == [f.name for f in dataclasses.fields(ScheduledRequest)]


def test_digest_is_that_of_the_content():
    base = Schedule((one(),), "mine", 0)
    # The value is fixed: a change of it breaks every recorded fingerprint and must be meant.
    assert base.sha256() == "68e9d34a866f1da34d233709064181a24150cba5c48b799cda6cdff28a09d260"
    assert Schedule((one(),), "other name", 0, 0.5, 3.0, 2, ("note",)).sha256() == base.sha256()
    assert Schedule((one(arrival_s=0.5000001),), "mine", 0).sha256() != base.sha256()
    assert Schedule((one(),), "mine", 1).sha256() != base.sha256(), "the seed decides what prompts say"
    five = one(cancel_kind="after_tokens", cancel_value=5)
    assert (
        Schedule((five,), "m", 0).sha256()
        == Schedule((dataclasses.replace(five, cancel_value=5.0),), "m", 0).sha256()
    )


def test_a_file_from_before_think_times_is_read_and_keeps_its_digest(tmp_path):
    schedule = Schedule((one(), one(id="r000001", arrival_s=1.5, session="s", turn=1)), "mine", 0)
    schedule.to_parquet(tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet")
    pq.write_table(table.drop_columns(["think_s", "transport"]), tmp_path / "old.parquet")
    old = Schedule.from_parquet(tmp_path / "old.parquet")
    assert old == schedule
    assert old.sha256() == schedule.sha256()


def test_think_time_is_part_of_the_digest():
    def later(think_s):
        return Schedule((one(session="s", turn=1, think_s=think_s),), "mine", 0).sha256()

    assert len({later(None), later(0.0), later(1.0), later(1.5)}) == 4
    assert later(2) == later(2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival_s": -1.0}, "arrival_s=-1.0"),
        ({"arrival_s": float("nan")}, "arrival_s=nan"),
        ({"prompt_tokens": 8}, "prompt_tokens=8"),
        ({"stop_after": 17}, "stop_after=17"),
        ({"stop_after": 0}, "stop_after=0"),
        ({"cancel_kind": "later", "cancel_value": 1}, "cancel_kind=later"),
        ({"cancel_kind": "after_s"}, "cancel_value=None"),
        ({"cancel_value": 3.0}, "cancel_kind=none"),
        ({"session": "s", "turn": 1, "think_s": -0.1}, "think_s=-0.1, needs seconds of 0 or more"),
        ({"session": "s", "turn": 1, "think_s": float("nan")}, "think_s=nan"),
        ({"session": "s", "turn": 1, "think_s": float("inf")}, "think_s=inf"),
        ({"session": "s", "turn": 0, "think_s": 1.0}, "turn=0, needs a session and a turn of 1 or more"),
        ({"turn": 1, "think_s": 1.0}, "session=None"),
        ({"transport": "carrier pigeon"}, "transport=carrier pigeon.*needs one of http, websocket"),
        ({"transport": "websocket", "stream": False}, "stream=False.*a websocket streams"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(WorkloadError, match=words):
        one(**changes)


def test_files_that_are_no_schedule(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read as parquet"):
        Schedule.from_parquet(tmp_path / "missing.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(WorkloadError, match="cannot be read as parquet") as caught:
        Schedule.from_parquet(tmp_path / "text.parquet")
    assert "\n" not in str(caught.value)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(WorkloadError, match="not a schedule"):
        Schedule.from_parquet(tmp_path / "other.parquet")


def test_names_and_rates():
    assert request_id(12) == "r000012"
    assert planned_rate([0.0, 1.0, 4.0]) == 0.5
    assert planned_rate([2.0, 2.0]) is None
    assert planned_rate([1.0]) is None
