"""Two ends of a socket, neither of which ever waits: order, completeness, and the end."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from engines.request import Request
from engines.server import wire
from engines.server.channel import Channel, socket_pair
from engines.server.wire import Abort, Add, Died, Message, Produced, Report
from engines.stats import Stats

STATS = Stats(running=1, waiting=2, kv_live=3, kv_cached=4, kv_free=5)


@contextlib.contextmanager
def pair() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """Two channels, and the raw socket of the first."""
    ours, theirs = socket_pair()
    one, other = Channel(ours), Channel(theirs)
    try:
        yield one, other, ours
    finally:
        one.close()
        other.close()


def report(number: int, tokens: int) -> Report:
    return Report(number, STATS, [Produced(key, [number] * tokens) for key in range(3)])


def drained(sender: Channel, receiver: Channel) -> list[Message]:
    found: list[Message] = []
    while sender.unsent or (not found):
        sender.flush()
        found += receiver.receive()
    while more := receiver.receive():
        found += more
    return found


def test_a_full_socket_keeps_everything_in_order() -> None:
    """The other end takes nothing for a while, then now and then; the sender never waits for it."""
    draw = random.Random(1)
    with pair() as (sender, receiver, ours):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sent: list[Message] = [report(number, draw.choice((1, 20, 3000))) for number in range(400)]
        found: list[Message] = []
        was_full = 0
        for number, message in enumerate(sent):
            sender.send(message)
            was_full += sender.unsent
            if number > 100 and draw.random() < 0.3:
                found += receiver.receive()
        assert was_full > 200
        assert len(found) < len(sent)
        assert found + drained(sender, receiver) == sent
        assert not sender.unsent
        assert receiver.receive() == []
        assert not receiver.ended


def test_a_message_larger_than_any_buffer_arrives_whole() -> None:
    prompt = list(range(2_000_000))
    with pair() as (sender, receiver, _):
        sender.send(Add(7, 1, Request(prompt, 5)))
        assert sender.unsent
        sender.send(Abort(7, "stop"))
        add, abort = drained(sender, receiver)
        assert isinstance(add, Add)
        assert add.request.prompt_token_ids == prompt
        assert abort == Abort(7, "stop")


def test_frames_may_be_cut_anywhere() -> None:
    sent: list[Message] = [Died("one"), report(1, 2), Abort(3, "abort")]
    stream = b"".join(wire.encode(message) for message in sent)
    with pair() as (_, receiver, ours):
        found: list[Message] = []
        for at in range(len(stream)):
            ours.send(stream[at : at + 1])
            found += receiver.receive()
        assert found == sent


def test_what_was_sent_before_the_end_is_received_and_a_cut_message_is_not() -> None:
    with pair() as (sender, receiver, ours):
        sender.send(Died("whole"))
        ours.send(wire.encode(Died("cut"))[:-2])
        sender.close()
        assert receiver.receive() == [Died("whole")]
        assert not receiver.ended
        assert receiver.receive() == []
        assert receiver.ended


def test_one_direction_may_end_alone() -> None:
    with pair() as (server, engine, _):
        server.send(Abort(1, "stop"))
        server.end()
        assert engine.receive() == [Abort(1, "stop")]
        engine.receive()
        assert engine.ended
        engine.send(Died("last words"))
        assert server.receive() == [Died("last words")]


def test_the_end_waits_for_what_waits() -> None:
    """Commands that the engine was too busy to take are still obeyed."""
    with pair() as (server, engine, _):
        sent: list[Message] = [Add(7, 1, Request([1] * 2_000_000, 5)), Abort(7, "abort")]
        for message in sent:
            server.send(message)
        server.end()
        assert server.unsent
        found: list[Message] = []
        while not engine.ended:
            server.flush()
            found += engine.receive()
        assert found == sent


def test_sending_to_an_end_that_is_gone_does_no_harm_and_its_last_words_are_read() -> None:
    with pair() as (sender, other, _):
        other.send(Died("out of memory"))
        other.close()
        for _ in range(3):
            sender.send(report(1, 10))
        assert not sender.unsent
        assert sender.receive() == [Died("out of memory")]
        sender.receive()
        assert sender.ended


@pytest.mark.parametrize(
    "stream", [wire.HEAD.pack(wire.MAX_FRAME_BYTES + 1, 18), wire.HEAD.pack(2, 99) + b"[]", b"\0" * 5]
)
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with pair() as (_, receiver, ours):
        ours.send(stream)
        with pytest.raises(wire.WireError):
            receiver.receive()
