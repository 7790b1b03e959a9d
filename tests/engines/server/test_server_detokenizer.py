"""Streamed text adds up to the whole answer, byte for byte, however the tokens arrive."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.server.detokenizer import Detokenizer

TOKENS = [bytes([b]) for b in range(256)] + [
    "é".encode(),
    "🙂".encode(),
    b"ab",
    b"abcd",
    b"\xf0\x9f",
    b"",
    b"\x99a",
]
byte_tokens = st.integers(0, len(TOKENS) - 1)
letters = st.sampled_from(
    [ord(c) for c in "abcd"] + [258, 259, 261]
)  # few symbols, so that stops are met often
answers = st.lists(st.one_of(letters, letters, byte_tokens), max_size=60)
stops = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=4)


def whole(tokens: list[int]) -> str:
    return b"".join(TOKENS[t] for t in tokens).decode("utf-8", "replace")


def expected(text: str, stop: list[str]) -> tuple[str, bool]:
    """By the definition, a character at a time: the answer ends before the stop that is complete first."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def stream(tokens: list[int], stop: list[str], cuts: list[int]) -> tuple[list[str], bool, int]:
    detokenizer = Detokenizer(TOKENS.__getitem__, stop)
    borders = sorted({min(c, len(tokens)) for c in cuts} | {0, len(tokens)})
    texts, used = [], 0
    for start, end in itertools.pairwise(borders):
        piece = detokenizer.push(tokens[start:end])
        texts.append(piece.text)
        used += piece.used
        if piece.stopped:
            return texts, True, used
    rest, stopped = detokenizer.flush()
    return [*texts, rest], stopped, used


@settings(max_examples=250, deadline=None)
@given(answers, stops, st.lists(st.integers(0, 60), max_size=20))
@example([ord("a"), ord("b")], ["abc"], [1])  # the held tail of an answer that ends by length
@example([259 - 1, ord("a")], ["bc"], [])
@example([0xF0, 0x9F], ["�"], [1])  # the end completes a stop string
def test_stream_is_the_whole_answer_for_any_chunking(
    tokens: list[int], stop: list[str], cuts: list[int]
) -> None:
    texts, stopped, used = stream(tokens, stop, cuts)
    text, should_stop = expected(whole(tokens), stop)
    assert "".join(texts) == text
    assert stopped == should_stop
    if stopped:  # no token after the one that completed the stop string, and that one is needed
        assert expected(whole(tokens[:used]), stop)[1]
    else:
        assert used == len(tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(byte_tokens, max_size=80))
def test_at_most_three_bytes_are_held(tokens: list[int]) -> None:
    detokenizer = Detokenizer(TOKENS.__getitem__)
    seen = ""
    for count, token in enumerate(tokens, 1):
        seen += detokenizer.push([token]).text
        raw = b"".join(TOKENS[t] for t in tokens[:count])
        assert any(raw[: len(raw) - held].decode("utf-8", "replace") == seen for held in range(4))
        assert ("�" in seen) <= ("�" in whole(tokens))


def beginnings(stop: list[str]) -> set[str]:
    return {s[:size] for s in stop for size in range(len(s))}


@settings(max_examples=200, deadline=None)
@given(answers, stops.filter(bool))
def test_held_text_is_only_the_beginning_of_a_stop(tokens: list[int], stop: list[str]) -> None:
    detokenizer = Detokenizer(TOKENS.__getitem__, stop)
    seen = ""
    for count, token in enumerate(tokens, 1):
        piece = detokenizer.push([token])
        seen += piece.text
        if piece.stopped:
            return
        raw = b"".join(TOKENS[t] for t in tokens[:count])
        texts = {raw[: len(raw) - bytes_held].decode("utf-8", "replace") for bytes_held in range(4)}
        held = {text.removeprefix(seen) for text in texts if text.startswith(seen)}
        assert held & beginnings(stop)


def test_tokens_after_a_stop_are_not_used() -> None:
    detokenizer = Detokenizer(TOKENS.__getitem__, ["bc"])
    piece = detokenizer.push([ord(c) for c in "abcd"])
    assert (piece.text, piece.used, piece.stopped) == ("a", 3, True)
