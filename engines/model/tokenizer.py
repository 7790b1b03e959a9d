"""Text to token ids and back, without transformers.

Contract: the text of an answer is `b"".join(token_bytes(i) for i in ids).decode("utf-8", "replace")`, and
`decode` is exactly that. A token therefore always means the same bytes, whatever stands before it, so that a
server can detokenise incrementally: push each token's bytes through an incremental UTF-8 decoder and hold
back what is not yet a whole character. Special tokens (BOS, EOS, chat markers) have no bytes: they never show
in a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from engines.config import ConfigError

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Used where a checkpoint ships no chat template."""


class Tokenizer(Protocol):
    """What the server needs from a tokenizer. All ids are below vocab_size."""

    @property
    def ref(self) -> str:
        """ "bytes", or the path of the tokenizer.json that a client can load to see the same ids."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a raw prompt, with the special tokens that the checkpoint puts around one (BOS, say)."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer: see the module's contract."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; b"" for a special or unknown id."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation, ending where the assistant answers. Raises ValueError, one line, when
        the template refuses the messages (an unknown role, say)."""

    def description(self) -> dict[str, Any]:
        """All that from_description needs to make the same tokenizer again, as JSON."""


def from_description(described: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of another process of this host. Raises ConfigError."""
    values = dict(described)
    ref = values.pop("ref")
    return ByteTokenizer(**values) if ref == ByteTokenizer.ref else BpeTokenizer(ref, **values)


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 BOS, 257 EOS, 258 pad; ids above mean nothing. It needs no file."""

    BOS, EOS, PAD = 256, 257, 258
    ref = "bytes"

    def __init__(self, vocab_size: int = 384, eos_token_ids: Sequence[int] = (EOS,)) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    def description(self) -> dict[str, Any]:
        return {"ref": self.ref, "vocab_size": self.vocab_size, "eos_token_ids": list(self.eos_token_ids)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [self.BOS, *self.encode(render_chat(PLAIN_CHAT_TEMPLATE, messages, {}))]


class BpeTokenizer:
    """A Hugging Face tokenizer.json through the `tokenizers` library."""

    def __init__(
        self,
        path: str | Path,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        template_values: Mapping[str, Any] | None = None,
    ) -> None:
        """template_values: what the chat template may read beside `messages` (bos_token, eos_token)."""
        from tokenizers import Tokenizer as Backend

        self.ref = str(Path(path).resolve())
        try:
            self._backend = Backend.from_file(self.ref)
            described = json.loads(Path(path).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: not a readable tokenizer.json ({error})") from None
        # Some checkpoints ship with their training's limits switched on: a prompt must never be cut in
        # silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self._chat_template = chat_template or PLAIN_CHAT_TEMPLATE
        self._template_values = dict(template_values or {})
        added = described.get("added_tokens") or []
        self._special = {t["id"] for t in added if t.get("special")}
        self._verbatim = {t["id"]: t["content"].encode() for t in added if not t.get("special")}
        self._alphabet = _piece_alphabet(described.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    def description(self) -> dict[str, Any]:
        return {
            "ref": self.ref,
            "eos_token_ids": list(self.eos_token_ids),
            "chat_template": self._chat_template,
            "template_values": self._template_values,
        }

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = render_chat(self._chat_template, messages, self._template_values)
        return self._backend.encode(text, add_special_tokens=False).ids

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._special or token_id < 0:
            return b""
        if token_id in self._verbatim:
            return self._verbatim[token_id]
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet == "byte_level":
            table = byte_level_alphabet()
            if all(c in table for c in piece):
                return bytes(table[c] for c in piece)
            return piece.encode()
        if self._alphabet == "sentencepiece":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("\u2581", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=True).encode()


def _piece_alphabet(decoder: Mapping[str, Any] | None) -> str:
    """How a piece of the vocabulary spells its bytes: "byte_level" (GPT-2), "sentencepiece" (with byte
    fallback) or "plain" (the library decodes each token)."""
    steps = (
        [decoder] if decoder and decoder.get("type") != "Sequence" else (decoder or {}).get("decoders", [])
    )
    kinds = {step.get("type") for step in steps if step}
    if "ByteLevel" in kinds:
        return "byte_level"
    if "ByteFallback" in kinds:
        return "sentencepiece"
    return "plain"


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a GPT-2 vocabulary: itself where it is printable,
    else the next free one from U+0100 up (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """Render a chat template in Jinja's sandbox: a template is foreign code. Raises ValueError."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **values
        )
    except Exception as error:  # a template may fail in any way on messages that it did not expect
        raise ValueError(f"the chat template refuses these messages: {error}") from None
