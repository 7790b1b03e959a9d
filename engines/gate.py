"""The door of an engine: asks admission about each request, keeps what its answers rest on, and holds the
limits that may change while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Any

from engines.admission import Decision, admissible, asked_for, decide, snapshot
from engines.config import ConfigError, EngineConfig, typed
from engines.pace import Pace
from engines.request import Request
from engines.schedulers import Scheduler
from engines.sequence import Sequence
from engines.stats import Counters, QueueState
from engines.tenants import TenantRates

CHANGEABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk_size",
    "max_queue_delay_ms",
    "max_waiting_requests",
    "max_waiting_tokens",
    "queue_timeout_ms",
    "deadline_admission",
    "tenant_rate",
    "tenant_burst",
    "kv_watermark",
    "kv_high_watermark",
    "kv_reject_watermark",
    "stream_idle_timeout_ms",
)
"""What no array was sized by and no request in flight was promised."""


def changed(config: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """`config` with `changes`, checked as a configuration is. Raises ConfigError."""
    types = {f.name: str(f.type) for f in fields(EngineConfig)}
    values = {}
    for name, value in changes.items():
        if name not in CHANGEABLE:
            raise ConfigError(
                f"engine.{name} cannot be changed while it runs; choose from: {', '.join(CHANGEABLE)}"
            )
        values[name] = typed(name, value, types[name])
    return replace(config, **values)


@dataclass(frozen=True, slots=True)
class Change:
    old: Any
    new: Any


class Gate:
    def __init__(self, scheduler: Scheduler, counters: Counters) -> None:
        self.pace = Pace()
        self._scheduler = scheduler
        self._counters = counters
        self._rates = TenantRates()
        self._wanted = scheduler.config
        self._pass_ended: float | None = None
        self._released = 0

    # -- who comes in

    def ask(self, seq: Sequence, request: Request, now: float) -> Decision:
        """The answer to a request that has just come; counted. Its tenant pays for it unless it is
        rejected."""
        limits = self._wanted
        rate = (limits.tenant_rate, limits.tenant_burst, now)
        state = snapshot(seq, self._scheduler, self.pace, self._rates.wait_s(seq.tenant, *rate))
        decision = decide(asked_for(seq, request, self._scheduler, now), state, limits)
        if decision.verdict != "reject":
            self._rates.take(seq.tenant, *rate)
        if decision.verdict == "wait":
            waits = self._counters.waits
            waits[str(decision.reason)] = waits.get(str(decision.reason), 0) + 1
        return decision

    # -- what the answers rest on

    def passed(self, entered: Seq[Sequence], left_behind: bool, start: float, end: float) -> None:
        """An iteration is over, from its schedule to the end of its pass; `entered` got their first seats."""
        begin = start if self._pass_ended is None else self._pass_ended
        pool = self._scheduler.pool
        self.pace.passed(
            max(0.0, end - begin),
            [seq.prompt_len for seq in entered],
            sum(pool.blocks_for(self._scheduler.reservation.tokens(seq, seq.prompt_len)) for seq in entered),
            pool.num_released - self._released,
            left_behind,
        )
        self._released, self._pass_ended = pool.num_released, end

    def waited(self) -> None:
        """There was nothing to compute: that time says nothing about speed."""
        self._pass_ended = None

    def queue_state(self) -> QueueState:
        scheduler = self._scheduler
        waiting = list(scheduler.waiting)
        tokens = sum(seq.num_tokens for seq in waiting)
        return QueueState(
            running=len(scheduler.running) + len(scheduler.ended),
            waiting=len(waiting),
            waiting_tokens=tokens,
            kv_live=scheduler.pool.num_live,
            kv_usable=scheduler.pool.usable,
            admissible=admissible(scheduler, self.pace),
            wait_s=self.pace.wait_s(tokens),
            by_class=dict(Counter(seq.request_class for seq in waiting)),
            by_tenant=dict(Counter(seq.tenant for seq in waiting)),
        )

    # -- limits

    @property
    def limits(self) -> dict[str, Any]:
        return {name: getattr(self._wanted, name) for name in CHANGEABLE}

    def change(self, changes: Mapping[str, Any]) -> dict[str, Change]:
        """Between two iterations. Raises ConfigError, and then nothing has changed."""
        before, self._wanted = self._wanted, changed(self._wanted, changes)
        return {name: Change(getattr(before, name), getattr(self._wanted, name)) for name in changes}

    def in_force(self) -> EngineConfig:
        """The limits of the next iteration. A lower number of seats takes nobody's seat away: it holds once
        as many have left, and until then nobody enters. The token budget keeps a token for each of them."""
        taken = self._wanted.max_num_seqs + max(0, -self._free())
        if taken == self._wanted.max_num_seqs:
            return self._wanted
        budget = max(self._wanted.max_num_batched_tokens, taken)
        return replace(self._wanted, max_num_seqs=taken, max_num_batched_tokens=budget)

    def _free(self) -> int:
        scheduler = self._scheduler
        return self._wanted.max_num_seqs - len(scheduler.running) - len(scheduler.ended)
