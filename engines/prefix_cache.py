"""Which block holds what: prompts that begin alike share the KV of their beginning (automatic prefix caching
in vLLM V1, a radix tree in SGLang and TGI).

Only full blocks are shared. What a block holds is named by its parent, the block before it in the sequence,
and by its own tokens: a chain of names, and so a tree whose root is the empty sequence. The name is the key
of a dictionary, which hashes it and then compares it in full: contents whose hashes collide never share KV.

Names stay true because a block never leaves the tree before its children do. Whoever holds a block holds its
parents too, and gives them back later (BlockPool.release goes from the tail to the head). So among blocks
that nobody holds a child is always older than its parent, and the oldest is evicted first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from engines.batch import NULL_BLOCK

ROOT = NULL_BLOCK
"""The parent of first blocks. The null block is never in the tree itself."""

Name = tuple[int, Hashable]  # parent, tokens


class PrefixCache:
    def __init__(self) -> None:
        self._blocks: dict[Name, int] = {}
        self._names: dict[int, Name] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def find(self, keys: Sequence[Hashable], most: int) -> list[int]:
        """The blocks that hold the longest known beginning of `keys`, at most `most` of them."""
        found: list[int] = []
        parent = ROOT
        for key in keys[:most]:
            block = self._blocks.get((parent, key))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def add(self, parent: int, key: Hashable, block: int) -> int:
        """From now on `block` can be found as `key` after `parent`. The block that holds this content,
        which is another one if it was known already."""
        known = self._blocks.setdefault((parent, key), block)
        if known == block:
            self._names[block] = (parent, key)
        return known

    def drop(self, block: int) -> None:
        del self._blocks[self._names.pop(block)]

    def parent(self, block: int) -> int:
        return self._names[block][0]

    def blocks(self) -> list[int]:
        return list(self._names)

    def clear(self) -> None:
        self._blocks.clear()
        self._names.clear()
