from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import WorkloadError
from workloads.prompts import PromptBook, load_text

CORPUS = np.arange(100, 1097)  # every id tells its place
segments = st.lists(st.tuples(st.text(max_size=8), st.integers(0, 3000)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(parts=segments, seed=st.integers(0, 2**40))
def test_counts_are_exact_and_every_segment_is_a_slice_of_the_wrapped_corpus(parts, seed):
    book = PromptBook(CORPUS, seed)
    ids = book.tokens(parts)
    assert len(ids) == sum(n for _, n in parts)
    at = 0
    for name, count in parts:
        piece = ids[at : at + count]
        at += count
        start = book.offset(name)
        assert piece == [100 + (start + i) % len(CORPUS) for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(name=st.text(max_size=8), short=st.integers(1, 500), more=st.integers(0, 500), seed=st.integers(0, 99))
def test_who_shares_a_segment_shares_its_tokens(name, short, more, seed):
    one, other = PromptBook(CORPUS, seed), PromptBook(CORPUS.copy(), seed)
    ids = one.tokens([("before", 3), (name, short)])
    assert other.tokens([(name, short + more)])[:short] == ids[3:]


def test_segments_and_seeds_spread_over_the_corpus():
    book = PromptBook(CORPUS, 0)
    offsets = np.array([book.offset(f"segment/{i}") for i in range(4000)])
    counts = np.bincount(offsets * 10 // len(CORPUS), minlength=10)
    assert counts.min() > 320  # 400 expected, sd 19
    assert counts.max() < 480
    other = PromptBook(CORPUS, 1)
    same = sum(other.offset(f"segment/{i}") == offsets[i] for i in range(4000))
    assert same < 20  # 4 expected


def test_ids_are_plain_ints_and_the_same_in_a_process_with_another_hash_seed():
    ids = PromptBook(CORPUS, 3).tokens([("system", 4), ("r/17", 3)])
    assert all(type(i) is int for i in ids)
    code = (
        "import numpy as np; from workloads.prompts import PromptBook;"
        "print(PromptBook(np.arange(100, 1097), 3).tokens([('system', 4), ('r/17', 3)]))"
    )
    for hash_seed in ("0", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == str(ids)


@pytest.mark.parametrize("corpus", [np.array([], dtype=int), np.zeros((2, 2), dtype=int), np.array([0.5])])
def test_a_corpus_that_is_no_row_of_ids_is_refused(corpus):
    with pytest.raises(WorkloadError, match="corpus_tokens"):
        PromptBook(corpus, 0)


def test_negative_counts_are_refused():
    with pytest.raises(WorkloadError, match="tokens=-1"):
        PromptBook(CORPUS, 0).tokens([("a", -1)])


def test_the_text_is_varied_plain_ascii():
    text = load_text()
    assert text.isascii()
    assert text.isprintable() is False  # it has line ends
    assert all(c.isprintable() or c == "\n" for c in text)
    assert 20_000 < len(text) < 40_000
    words = text.lower().split()
    assert len(set(words)) > 1200
    paragraphs = [p for p in text.split("\n\n") if p.strip()]
    assert len(paragraphs) == len(set(paragraphs)) > 40
