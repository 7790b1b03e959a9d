"""KV of sequences that lost their seat, put away in host memory: which host block holds what, and the copies
that the next pass begins with.

A copy is only noted here. It is made right before the pass that may write over the blocks it reads: first all
that goes out, then all that comes back. Until then a host block whose copy is on its way back stays held."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable

from engines.batch import Copies
from engines.kv_pool import IntegrityError


class HostPool:
    """Owns the blocks of the host, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._out: dict[int, int] = {}  # host block to device block
        # by seq_id: host table, and what of it comes back to which block
        self._back: dict[int, tuple[array[int], list[tuple[int, int]]]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put_away(self, host_table: array[int], blocks: array[int]) -> bool:
        """Host blocks for `blocks` of the device. All or nothing: False leaves everything alone."""
        if len(blocks) > len(self._free):
            return False
        for block in blocks:
            host = self._free.popleft()
            host_table.append(host)
            self._out[host] = block
        return True

    def bring_back(self, seq_id: int, host_table: array[int], first: int, blocks: array[int]) -> None:
        """Blocks `first` and those behind it come back to `blocks`; what is before it was found elsewhere."""
        pairs = list(zip(host_table[first:], blocks[first:], strict=False))
        self._back[seq_id] = host_table, pairs

    def stay(self, seq_id: int) -> bool:
        """It is not to come back after all. Whether it was about to."""
        return self._back.pop(seq_id, None) is not None

    def release(self, seq_id: int, host_table: array[int]) -> None:
        """Nobody wants this KV any more. Harmless when repeated."""
        self._back.pop(seq_id, None)
        while host_table:
            host = host_table.pop()
            self._out.pop(host, None)
            self._free.append(host)

    def take(self) -> Copies | None:
        """The copies that are due now; None when there are none. What has come back is held no longer."""
        if not self._out and not self._back:
            return None
        out = [(block, host) for host, block in self._out.items()]
        back = [pair for _, pairs in self._back.values() for pair in pairs]
        self._out.clear()
        for seq_id, (host_table, _) in list(self._back.items()):
            self.release(seq_id, host_table)
        return Copies(tuple(out), tuple(back))

    def check(self, host_tables: Iterable[array[int]]) -> None:
        """Raise IntegrityError unless every host block is free or in one host table."""
        places = Counter(self._free)
        places.update(host for table in host_tables for host in table)
        if set(places) != set(range(self.num_blocks)) or places.total() != self.num_blocks:
            wrong = {host: n for host, n in places.items() if n != 1}
            raise IntegrityError(f"host blocks are not in one place each: {wrong or 'some are lost'}")
        if not set(self._out).isdisjoint(self._free):
            raise IntegrityError("a free host block is about to be written")
