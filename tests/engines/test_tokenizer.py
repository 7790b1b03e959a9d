"""The byte tokenizer and the BPE tokenizer keep the contract of engines.model.tokenizer."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import ConfigError
from engines.model.tokenizer import BpeTokenizer, ByteTokenizer, byte_level_alphabet, render_chat

MESSAGES = [{"role": "user", "content": "Hi {{ 7 * 7 }}"}]


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox says grüße 你好 🙂 the end"] * 20, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_bytes_round_trip(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be encoded
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_bpe_round_trip_and_incremental_decoding(bpe_path: Path, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = BpeTokenizer(bpe_path, eos_token_ids=(0,))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(tokenizer.token_bytes(i)) for i in ids]
    assert "".join(pieces) + decoder.decode(b"", final=True) == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_ids_decode_as_the_concatenation_of_their_bytes(bpe_path: Path, ids: list[int]) -> None:
    tokenizer = BpeTokenizer(bpe_path)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert tokenizer.decode(ids) == joined.decode("utf-8", "replace")
    assert tokenizer._backend.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_special_and_unknown_ids_have_no_bytes(bpe_path: Path) -> None:
    tokenizer = BpeTokenizer(bpe_path)
    assert tokenizer.token_bytes(0) == b""
    assert tokenizer.token_bytes(10_000) == b""
    assert ByteTokenizer().token_bytes(ByteTokenizer.EOS) == b""
    assert ByteTokenizer().decode([72, 257, 105]) == "Hi"


def test_byte_level_alphabet_is_the_one_of_the_library() -> None:
    from tokenizers import pre_tokenizers

    table = byte_level_alphabet()
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(table.values()) == list(range(256))


def test_sentencepiece_pieces_keep_their_spaces_and_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "▁Paris": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "s": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert BpeTokenizer(tmp_path / "tokenizer.json").decode([1, 5, 2, 3, 4]) == " Pariss€"


def test_chat_is_rendered_in_a_sandbox() -> None:
    assert (
        ByteTokenizer().decode(ByteTokenizer().apply_chat_template(MESSAGES))
        == "user: Hi {{ 7 * 7 }}\nassistant: "
    )
    with pytest.raises(ValueError, match="only one user"):
        render_chat("{{ raise_exception('only one user') }}", MESSAGES, {})
    with pytest.raises(ValueError, match="refuses"):
        render_chat("{{ messages.__class__.__mro__ }}", MESSAGES, {})


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a readable"):
        BpeTokenizer(tmp_path / "tokenizer.json")


def test_limits_that_a_checkpoint_left_on_are_off(bpe_path: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    limited = Tokenizer.from_file(str(bpe_path))
    limited.enable_truncation(4)
    limited.enable_padding(length=4)
    limited.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BpeTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("a prompt of more than four tokens")).endswith("four tokens")
    assert len(tokenizer.encode("x")) == 1


def test_templates_may_fail_in_any_way_and_write_json() -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        render_chat("{{ messages[0]['content'] + 1 }}", MESSAGES, {})
    assert render_chat("{{ messages[0]['content'] | tojson }}", [{"content": "<é>"}], {}) == '"<é>"'
