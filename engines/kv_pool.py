"""The KV pool: fixed-size blocks of the cache and who holds them (PagedAttention, SOSP 2023).

Block 0 is the null block (vLLM): pad rows read it, nobody owns it, so num_blocks - 1 are usable. Freed blocks
queue up at the back and are taken from the front, the longest free first."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable

from engines.batch import NULL_BLOCK


class IntegrityError(RuntimeError):
    """The pool and the block tables disagree: a bug of ours, never of a request."""


class BlockPool:
    """Owns every block. Each is free, cached (kept for reuse, holds no one up; none yet) or live (in a
    table)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_kv_blocks={num_blocks}: needs at least 2, block {NULL_BLOCK} is never used"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_count = [0] * num_blocks
        self._free = deque(b for b in range(num_blocks) if b != NULL_BLOCK)

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_live(self) -> int:
        return self.usable - self.num_free - self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, table: array[int], num_tokens: int) -> int:
        """Blocks that `table` lacks to hold num_tokens."""
        return max(0, self.blocks_for(num_tokens) - len(table))

    def grow(self, table: array[int], num_tokens: int) -> bool:
        """Extend `table` in place to hold num_tokens. All or nothing: False leaves the pool and the table
        alone."""
        need = self.missing(table, num_tokens)
        if need > len(self._free):
            return False
        for _ in range(need):
            block = self._free.popleft()
            self.ref_count[block] += 1
            table.append(block)
        return True

    def release(self, table: array[int]) -> None:
        """Empty `table`: the one way back for blocks, and harmless when repeated. The last block goes first,
        so that the tail of a sequence is overwritten before its head."""
        while table:
            block = table.pop()
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[array[int]]) -> None:
        """Raise IntegrityError unless the tables, the reference counts and the free list tell one story."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        if NULL_BLOCK in held or NULL_BLOCK in free:
            raise IntegrityError(f"the null block {NULL_BLOCK} is in a block table or in the free list")
        for block in range(self.num_blocks):
            if self.ref_count[block] != held[block]:
                raise IntegrityError(
                    f"block {block} is in {held[block]} tables and counts {self.ref_count[block]}"
                )
            if block != NULL_BLOCK and free[block] != (held[block] == 0):
                raise IntegrityError(
                    f"block {block} is in {held[block]} tables and {free[block]} times in the free list"
                )
        if self.num_live != len(held):
            raise IntegrityError(f"{self.num_live} blocks are said to be live, {len(held)} are in tables")
