"""What happens when KV runs out: the newest sequence gives way, and is computed again later (recompute)."""

from __future__ import annotations

from engines.kv_pool import BlockPool
from engines.sequence import Sequence, Status


class RecomputeNewest:
    """The victim is the newest running sequence, which may be the one in need; it is never older than that
    one. The oldest can therefore always take what it needs, and a sequence alone never has to: admission has
    checked that the pool holds it to its end. So every iteration makes progress."""

    def victim(self, running: list[Sequence]) -> Sequence:
        return running[-1]

    def evict(self, victim: Sequence, pool: BlockPool) -> None:
        """Give up its KV. Prompt and answer so far become one prompt to compute when it gets its seat
        back."""
        pool.release(victim.block_table)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED
