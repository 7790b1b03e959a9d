"""The plan of one iteration: which sequences are computed, and how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import repeat
from typing import NamedTuple

from engines.sequence import Sequence


class Kind(IntEnum):
    """For the records only: the pass treats all four alike."""

    PREFILL = 0
    DECODE = 1
    RECOMPUTE = 2  # starts below what was computed before a preemption
    ENDED = 3  # a row of a static batch whose answer has ended: computed, and thrown away


PREFILL, DECODE, RECOMPUTE, ENDED = Kind  # looked up once, not for every row


class Entry(NamedTuple):
    seq: Sequence
    num_tokens: int
    kind: Kind
    left_pad: int  # pad tokens computed in front of it (static)

    def split(self) -> tuple[int, int, int]:
        """Its tokens by use, before the pass: prompt for the first time, answer for the first time,
        recomputed."""
        seq = self.seq
        end = seq.num_computed + self.num_tokens
        recomputed = min(end, seq.max_computed) - seq.num_computed
        prefill = max(0, min(end, seq.prompt_len) - seq.max_computed)
        return prefill, self.num_tokens - prefill - recomputed, recomputed


_entry = partial(tuple.__new__, Entry)  # without the Python of Entry(), which is called for every token


@dataclass(slots=True)
class Plan:
    entries: list[Entry] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0  # all that is computed, pads included

    def add(self, seq: Sequence, num_tokens: int, left_pad: int = 0) -> None:
        if seq.num_computed < seq.max_computed:
            kind = RECOMPUTE
        else:
            kind = DECODE if seq.decoding else PREFILL
        self.entries.append(Entry(seq, num_tokens, kind, left_pad))
        self.num_tokens += num_tokens + left_pad

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """The newest token of each of these, whose others are computed: the most frequent entries by far."""
        kinds = [DECODE if seq.num_computed >= seq.max_computed else RECOMPUTE for seq in sequences]
        self.entries += map(_entry, zip(sequences, repeat(1), kinds, repeat(0)))
        self.num_tokens += len(sequences)

    def add_ended(self, seq: Sequence) -> None:
        self.entries.append(Entry(seq, 1, ENDED, 0))
        self.num_tokens += 1

    def ends_with(self, seq: Sequence) -> bool:
        """Whether it is what was added last."""
        return bool(self.entries) and self.entries[-1].seq is seq

    def drop(self, seq: Sequence) -> None:
        """Take back what was planned for a sequence that has just been preempted; its tokens return to the
        budget."""
        for entry in [e for e in self.entries if e.seq is seq]:
            self.entries.remove(entry)
            self.num_tokens -= entry.num_tokens + entry.left_pad
