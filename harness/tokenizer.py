"""Token ids and text on the client's side: prompts of an exact length, and counts where a server sends none.

Only the `tokenizers` library is used, and only for a real tokenizer: no torch, no transformers. `exact`
says whether a count is the served model's own or a guess that no figure may rest on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

BYTE_IDS = 256
CHARS_PER_TOKEN = 4
MENDING_ATTEMPTS = 24


class TokenizerError(ValueError):
    """engine.tokenizer names something that is no tokenizer. One line: the setting, its value, what would
    work."""


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool:
        """Whether ids and counts are those of the served model."""

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def count(self, text: str) -> int: ...


class ByteTokenizer:
    """UTF-8 bytes are the ids, as in the embedded model. Ids above 255 are special tokens and have no
    text."""

    name = "bytes"
    exact = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < BYTE_IDS).decode("utf-8", "replace")

    def count(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    exact = True

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend: Any = Backend.from_file(str(path))
        except Exception as exc:  # the library raises plain Exception
            reason = " ".join(str(exc).split())
            raise TokenizerError(
                f"engine.tokenizer={path}: not a readable tokenizer.json ({reason})"
            ) from None
        self.name = str(path)

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def count(self, text: str) -> int:
        return len(self.encode(text))


class ApproximateTokenizer:
    """For a server whose tokenizer is not at hand: every four characters are a "token". encode() remembers
    the pieces, so that decode() gives back the text of any ids that came from it."""

    name = "approximate"
    exact = False

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [self._id(text[i : i + CHARS_PER_TOKEN]) for i in range(0, len(text), CHARS_PER_TOKEN)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[i] for i in ids)

    def count(self, text: str) -> int:
        return -(-len(text) // CHARS_PER_TOKEN)

    def _id(self, piece: str) -> int:
        known = self._ids.get(piece)
        if known is None:
            known = self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return known


def exact_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text that the tokenizer reads as exactly len(ids) tokens, nearly always that of `ids` but for its end.

    The text of ids need not be read as those ids: where two slices of a corpus meet, letters form other
    tokens. What is missing is added at the end, what is too much is cut there, so that prompts that begin
    alike still do. Some counts may not exist (a vocabulary without short pieces): then the nearest that was
    met, and the server's count tells (prompt_tokens.off)."""
    text = tokenizer.decode(ids)
    nearest, distance = text, len(ids) + 1
    for attempt in range(MENDING_ATTEMPTS):
        read = tokenizer.encode(text)
        missing = len(ids) - len(read)
        if abs(missing) < distance:
            nearest, distance = text, abs(missing)
        if not missing:
            break
        if missing > 0:
            # Other words each time: the last ones may have run together with the end.
            text += tokenizer.decode([ids[(attempt + k) % len(ids)] for k in range(missing)])
        else:
            text = tokenizer.decode(read[: len(ids) - attempt // 4])
    return nearest


def load_tokenizer(ref: str | None) -> Tokenizer:
    """From what a ready line or engine.tokenizer says: "bytes", a tokenizer.json or its folder; None:
    approximate. Raises TokenizerError."""
    if ref is None:
        return ApproximateTokenizer()
    if ref == "bytes":
        return ByteTokenizer()
    path = Path(ref).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"engine.tokenizer={ref}: no tokenizer.json there; give that file or its folder")
    return FileTokenizer(file)
