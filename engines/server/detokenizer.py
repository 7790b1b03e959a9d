"""Token ids to text, as they come, so that what was streamed adds up to the whole answer byte for byte.

Two things must be held back: bytes that are not yet a whole UTF-8 character (at most three), and text that
may turn out to be the beginning of a stop string (at most the longest stop string less one character). Both
are let go when the answer ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """What a push of tokens made visible."""

    text: str
    used: int  # tokens that belong to the answer: all, or those up to the one that completed a stop
    stopped: bool  # a stop string is complete: the answer ends here


class Detokenizer:
    """One answer's text. The text before the stop string that is complete first is the answer; of two that
    are complete at the same character the longer one counts."""

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        """token_bytes: the bytes that a token adds to the text, b"" for a special token. stop: no empty
        strings."""
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # always a proper prefix of a stop string

    def push(self, token_ids: Sequence[int]) -> Piece:
        """The text that these tokens add. After a piece with stopped=True nothing more may be pushed."""
        texts = []
        for used, token_id in enumerate(token_ids, 1):
            text, stopped = self._release(self._decoder.decode(self._token_bytes(token_id)))
            texts.append(text)
            if stopped:
                return Piece("".join(texts), used, True)
        return Piece("".join(texts), len(token_ids), False)

    def flush(self) -> tuple[str, bool]:
        """The held rest of an answer that ended for another reason than a stop string: (text, stopped). An
        unfinished character becomes U+FFFD, as it does in a decode of the whole; that could complete a stop
        string too."""
        text, stopped = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if stopped else text + held, stopped

    def _release(self, new: str) -> tuple[str, bool]:
        """Split held text plus `new` into what may leave and what must wait; True when a stop string is
        complete."""
        if not self._stop or not new:
            return new, False
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max(_overlap(text, stop) for stop in self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
