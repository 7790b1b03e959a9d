"""What goes through the socket comes out the same, and nothing else comes out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.request import Request, SamplingParams
from engines.server import wire
from engines.server.wire import Abort, Add, Died, Left, Message, Pass, Produced, Ready, Refusal, Report, Start
from engines.stats import QueueState, Stats

numbers = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**63 - 1)
maybe = st.none() | counts
texts = st.text(max_size=20)  # no surrogates, which no JSON body can bring either
floats = st.floats(allow_nan=False, allow_infinity=False)
tallies = st.dictionaries(texts, counts, max_size=3)
stats = st.builds(
    Stats,
    **dict.fromkeys(("running", "waiting", "kv_live", "kv_cached", "kv_free", "steps"), counts),
    refusals=tallies,
    finished=tallies,
)
requests = st.builds(
    Request,
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    max_tokens=counts,
    sampling=st.builds(SamplingParams, temperature=floats, top_p=floats, seed=maybe),
    ignore_eos=st.booleans(),
    stop_after=maybe,
    priority=st.integers(-(2**31), 2**31 - 1),
    tenant=texts,
    request_class=texts,
    deadline_ms=st.none() | floats,
    label=st.dictionaries(texts, st.none() | texts | counts, max_size=3),
)
queues = st.builds(
    QueueState,
    **dict.fromkeys(("running", "waiting", "waiting_tokens", "kv_live", "kv_usable", "admissible"), counts),
    wait_s=st.none() | floats,
    by_class=tallies,
    by_tenant=tallies,
)
reports = st.builds(
    Report,
    counts,
    stats,
    st.lists(
        st.builds(
            Produced,
            *(counts, st.lists(counts, max_size=5), st.none() | texts, st.none() | texts, st.none() | counts),
        )
    ),
    st.lists(st.builds(Refusal, counts, texts, texts, counts, maybe)),
    st.lists(st.builds(Pass, counts, counts, maybe)),
    st.lists(st.builds(Left, counts, maybe, maybe)),
    st.lists(queues),
)
open_fields = st.dictionaries(texts, st.none() | texts | counts | floats | st.lists(counts), max_size=4)
messages = st.one_of(
    st.builds(Start, open_fields, st.none() | texts, counts),
    st.builds(Add, counts, counts, requests, counts),
    st.builds(wire.Ask, counts, st.sampled_from(wire.QUESTIONS), open_fields),
    st.builds(wire.Told, counts, st.none() | texts, open_fields),
    st.builds(Abort, counts, st.sampled_from(wire.ABORT_REASONS)),
    st.builds(Ready, open_fields, open_fields, stats),
    st.builds(wire.Unfit, texts),
    st.builds(Died, texts),
    reports,
)


def payload_of(message: Message) -> tuple[int, bytes]:
    frame = wire.encode(message)
    length, kind = wire.HEAD.unpack_from(frame)
    assert len(frame) == wire.HEAD.size + length
    return kind, frame[wire.HEAD.size :]


@settings(max_examples=200, deadline=None)
@given(messages)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert wire.decode(*payload_of(message)) == message


@pytest.mark.parametrize("fields", [{"deadline_ms": 500}, {"max_tokens": 1.0}, {"tenant": None}])
def test_a_request_that_the_engine_could_not_read_is_not_sent(fields: dict[str, Any]) -> None:
    """It would be the end of the engine; so it is the end of one request."""
    request = Request(**{"prompt_token_ids": [1], "max_tokens": 1, **fields})
    with pytest.raises(wire.WireError):
        wire.encode(Add(1, 2, request))


@settings(max_examples=60, deadline=None)
@given(messages, st.data())
def test_a_cut_or_longer_payload_is_refused(message: Message, data: st.DataObject) -> None:
    kind, payload = payload_of(message)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(wire.WireError):
        wire.decode(kind, payload[:cut])
    with pytest.raises(wire.WireError):
        wire.decode(kind, payload + b"1234")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 255), st.binary(max_size=40))
def test_noise_is_refused_or_means_something_and_raises_nothing_else(kind: int, payload: bytes) -> None:
    try:
        message = wire.decode(kind, payload)
    except wire.WireError:
        return
    assert wire.decode(*payload_of(message)) == message


STATS: dict[str, Any] = {"running": 0, "waiting": 0, "kv_live": 0, "kv_cached": 0, "kv_free": 0}


@pytest.mark.parametrize(
    ("like", "values"),
    [
        (Abort(1, "abort"), [1, "why not"]),
        (Abort(1, "abort"), [True, "abort"]),
        (Abort(1, "abort"), ["1", "abort"]),
        (Abort(1, "abort"), [1]),
        (Abort(1, "abort"), {"key": 1, "reason": "abort"}),
        (Died("x"), [None]),
        (Report(1, Stats(**STATS)), [1, STATS, [[1, ["2"], None, None]], [], [], [], []]),
        (Report(1, Stats(**STATS)), [1, STATS, [[1, [2], None]], [], [], [], []]),
        (Report(1, Stats(**STATS)), [1, STATS | {"more": 1}, [], [], [], [], []]),
        (Report(1, Stats(**STATS)), [1, STATS | {"running": "1"}, [], [], [], [], []]),
        (Report(1, Stats(**STATS)), [1, {}, [], [], [], [], []]),
        (Report(1, Stats(**STATS)), [1, STATS, [], [], [[1, 2.5, None]], [], []]),
    ],
)
def test_a_field_of_another_type_is_refused(like: Message, values: Any) -> None:
    kind, _ = payload_of(like)
    with pytest.raises(wire.WireError):
        wire.decode(kind, orjson.dumps(values))


def test_an_error_that_is_no_unicode_is_told_all_the_same() -> None:
    assert wire.decode(*payload_of(Died("bad \ud800 name"))) == Died("bad ? name")


def test_a_message_beyond_the_largest_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    assert wire.encode(Died("x" * 900))
    with pytest.raises(wire.WireError, match="1000"):
        wire.encode(Died("x" * 1000))
