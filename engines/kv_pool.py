"""The KV pool: fixed-size blocks of the cache and who holds them (PagedAttention, SOSP 2023).

Every block is in one of three states:

    live     in the tables of `ref_count` sequences; more than one share a prefix
    cached   in no table, but its content can still be found: a hit makes it live again
    free     in no table, and nobody will ask for its content

What is taken is a free block, or else the cached block that nobody has held for the longest time, which then
loses its content: eviction is lazy, and `available` counts both. Block 0 is the null block (vLLM): pad rows
read it, nobody owns it, so num_blocks - 1 are usable."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence

from engines.batch import NULL_BLOCK
from engines.prefix_cache import ROOT, PrefixCache


class IntegrityError(RuntimeError):
    """The pool and the block tables disagree: a bug of ours, never of a request."""


class BlockPool:
    """Owns every block. With `prefix_cache` full blocks are kept and shared, without it none is ever
    cached."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_kv_blocks={num_blocks}: needs at least 2, block {NULL_BLOCK} is never used"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.ref_count = [0] * num_blocks
        self.num_live = 0
        self.num_released = 0  # since the start: blocks whose last holder let go
        self._free = deque(b for b in range(num_blocks) if b != NULL_BLOCK)
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._tree = PrefixCache()

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- what tables take and give back ----------------------------------------------------------------------

    def missing(self, table: array[int], num_tokens: int, hit: Sequence[int] = ()) -> int:
        """Available blocks that it takes until `table` holds num_tokens. An empty table may begin with the
        blocks of `hit`: of these, only those that nobody holds are taken from the available ones."""
        lacking = self.blocks_for(num_tokens) - len(table) - sum(self.ref_count[block] > 0 for block in hit)
        return max(0, lacking)

    def grow(self, table: array[int], num_tokens: int, hit: Sequence[int] = ()) -> bool:
        """Extend `table` in place to hold num_tokens, an empty one with the blocks of `hit` at its head. All
        or nothing: False leaves the pool and the table alone."""
        if self.missing(table, num_tokens, hit) > self.available:
            return False
        for block in hit:  # all of them first: a block of the hit must not be evicted for another one
            self._hold(block)
            table.append(block)
        for _ in range(self.blocks_for(num_tokens) - len(table)):
            block = self._take()
            self._hold(block)
            table.append(block)
        return True

    def release(self, table: array[int]) -> None:
        """Empty `table`: the one way back for blocks, and harmless when repeated. The last block goes first,
        so that the tail of a sequence is overwritten before its head."""
        while table:
            self._drop(table.pop())

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        self._tree.drop(block)
        return block

    def _hold(self, block: int) -> None:
        if self.ref_count[block] == 0:
            self._cached.pop(block, None)
            self.num_live += 1
        self.ref_count[block] += 1

    def _drop(self, block: int) -> None:
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.num_live -= 1
            self.num_released += 1
            if block in self._tree:
                self._cached[block] = None
            else:
                self._free.append(block)

    # -- the prefix cache ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[Hashable], most: int) -> list[int]:
        """The blocks, live or cached, that hold the longest known beginning of `keys`; at most `most`. They
        stay where they are until a table takes them or anything else is taken."""
        return self._tree.find(keys, most)

    def publish(self, table: array[int], keys: Sequence[Hashable], first: int, end: int) -> None:
        """Blocks first to end of `table` are full and have been written: others may find them. Where the same
        content has been published by another sequence meanwhile, the table takes that block and gives its own
        back: there is one copy of everything, and every table is a path in the tree."""
        for i in range(first, end):
            parent = table[i - 1] if i else ROOT
            if i and parent not in self._tree:  # the cache was emptied since
                return
            known = self._tree.add(parent, keys[i], table[i])
            if known != table[i]:
                own, table[i] = table[i], known
                self._hold(known)
                self._drop(own)

    def forget(self) -> None:
        """Empty the cache. Blocks that are held stay held, but nobody finds them any more."""
        self._tree.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    # -- integrity -------------------------------------------------------------------------------------------

    def check(self, tables: Iterable[array[int]]) -> None:
        """Raise IntegrityError unless tables, reference counts, free list and cache tell one story."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        if NULL_BLOCK in held or NULL_BLOCK in free or NULL_BLOCK in self._cached:
            raise IntegrityError(f"the null block {NULL_BLOCK} is in a block table or in the free list")
        for block in range(self.num_blocks):
            if self.ref_count[block] != held[block]:
                raise IntegrityError(
                    f"block {block} is in {held[block]} tables and counts {self.ref_count[block]}"
                )
            idle = free[block] + (block in self._cached)
            if block != NULL_BLOCK and idle != (held[block] == 0):
                raise IntegrityError(
                    f"block {block} is in {held[block]} tables and {free[block]} times in the free list"
                    + (", and cached" if block in self._cached else "")
                )
        self.check_sums()
        if self.num_live != len(held):
            raise IntegrityError(f"{self.num_live} blocks are said to be live, {len(held)} are in tables")
        for block in self._tree.blocks():
            parent = self._tree.parent(block)
            if free[block] or (parent != ROOT and parent not in self._tree):
                raise IntegrityError(f"block {block} can be found, but it or its parent {parent} is free")
        if not all(block in self._tree for block in self._cached):
            raise IntegrityError("a block is cached that nobody can find")

    def check_sums(self) -> None:
        """The same from the sums alone, cheap enough for every idle moment."""
        if self.num_free + self.num_cached + self.num_live != self.usable:
            raise IntegrityError(
                f"{self.num_free} free, {self.num_cached} cached and {self.num_live} live blocks are not the "
                f"{self.usable} usable ones"
            )
