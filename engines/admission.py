"""May a request come in? accept: a seat and KV for it are free. wait: it is queued. reject: a status, a
reason and when to try again.

    1. what could never run is refused for good (400): it would wait at the head of the queue for ever
    2. its tenant has used up its rate (429)
    3. KV above the reject watermark, a queue full by requests or by tokens, a deadline that it cannot make by
       recent throughput (503). The bounds of the queue are on those that have to wait: whoever a free
       seat and KV await at the next iteration does not count
    4. where others wait, or a seat or KV for it is missing, it waits; so it does above the high watermark
    5. else it is accepted

`decide` is a function of a snapshot: it changes nothing and knows no clock. `snapshot` takes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engines.config import EngineConfig
from engines.pace import Pace, retry_after
from engines.plan import Plan
from engines.request import Refused, Request
from engines.schedulers import Scheduler
from engines.sequence import Sequence

Verdict = Literal["accept", "wait", "reject"]


@dataclass(frozen=True, slots=True)
class Decision:
    verdict: Verdict
    reason: str | None = None  # of a wait or a rejection
    message: str = ""
    status: int | None = None  # of a rejection
    retry_after_s: int | None = None  # of a rejection that is not for good

    def refused(self) -> Refused:
        assert self.reason is not None
        assert self.status is not None
        return Refused(self.reason, self.message, self.status, self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants."""

    prompt_tokens: int
    max_tokens: int
    entry_blocks: int  # KV that it takes when it enters
    most_blocks: int  # KV that it may come to hold
    deadline_s: float | None = None  # from now; its last token is due then


@dataclass(frozen=True, slots=True)
class State:
    """The engine as admission sees it. None: not measured yet."""

    waiting: int
    waiting_tokens: int
    entering: int  # of the waiting, those whom free seats and free KV await
    entering_tokens: int
    joinable: bool  # the scheduler lets somebody in at the next iteration (a static batch may be running)
    running: int
    free_seats: int
    kv_live: int  # blocks
    kv_available: int
    kv_usable: int
    tenant_wait_s: float = 0.0  # until its tenant may send the next request
    wait_s: float | None = None  # until the requests in front of it have got their seats
    serve_s: float | None = None  # from its seat to its last token
    release_per_s: float | None = None  # blocks


def decide(asked: Asked, state: State, limits: EngineConfig) -> Decision:
    return (
        _never(asked, state, limits)
        or _not_now(asked, state, limits)
        or _wait(asked, state, limits)
        or Decision("accept")
    )


def _never(asked: Asked, state: State, limits: EngineConfig) -> Decision | None:
    if asked.prompt_tokens == 0:
        return Decision("reject", "empty_prompt", "the prompt has no tokens: give at least one", 400)
    if asked.max_tokens < 1:
        return Decision("reject", "max_tokens", f"max_tokens={asked.max_tokens}: needs at least 1", 400)
    longest = limits.max_model_len
    if asked.prompt_tokens >= longest:
        message = (
            f"the prompt has {asked.prompt_tokens} tokens: engine.max_model_len={longest} takes at most "
            f"{longest - 1}"
        )
        return Decision("reject", "prompt_too_long", message, 400)
    if asked.most_blocks > state.kv_usable:
        message = (
            f"prompt and max_tokens ({asked.prompt_tokens} + {asked.max_tokens}) need {asked.most_blocks} KV "
            f"blocks of {limits.block_size} tokens: engine.num_kv_blocks={state.kv_usable + 1} leaves "
            f"{state.kv_usable}"
        )
        return Decision("reject", "never_fits", message, 400)
    return None


def _not_now(asked: Asked, state: State, limits: EngineConfig) -> Decision | None:
    if limits.tenant_rate is not None and state.tenant_wait_s > 0:
        message = f"this tenant sends more than {limits.tenant_rate:g} requests per second"
        return _later("rate_limit", f"{message} (engine.tenant_rate)", state.tenant_wait_s, status=429)
    mark = limits.kv_reject_watermark
    if mark is not None and state.kv_live > mark * state.kv_usable:
        message = f"{state.kv_live} of {state.kv_usable} KV blocks are live (engine.kv_reject_watermark)"
        surplus = state.kv_live - mark * state.kv_usable
        return _later("kv_reject_watermark", message, _over(surplus, state.release_per_s))
    queued, queued_tokens = state.waiting - state.entering, state.waiting_tokens - state.entering_tokens
    bound = limits.max_waiting_requests
    if bound is not None and queued >= bound:
        message = f"{queued} requests are waiting (engine.max_waiting_requests={bound})"
        return _later("queue_full", message, state.wait_s)
    bound = limits.max_waiting_tokens
    if bound is not None and queued and queued_tokens + asked.prompt_tokens > bound:
        message = (
            f"{queued_tokens} tokens are waiting, this prompt has {asked.prompt_tokens} "
            f"(engine.max_waiting_tokens={bound})"
        )
        return _later("queue_tokens_full", message, state.wait_s)
    if limits.deadline_admission and asked.deadline_s is not None:
        needed_s = (state.wait_s or 0.0) + (state.serve_s or 0.0)
        if needed_s > asked.deadline_s:
            message = f"by recent throughput it would take {needed_s:.3g} s, its deadline is in"
            late_s = needed_s - max(0.0, asked.deadline_s)
            return _later("deadline", f"{message} {asked.deadline_s:.3g} s", late_s)
    return None


def _wait(asked: Asked, state: State, limits: EngineConfig) -> Decision | None:
    """Its place in the queue. The order of the reasons is that of `blocked`."""
    if state.waiting:
        return Decision("wait", "queue")
    if not state.joinable:
        return Decision("wait", "batch")
    if state.free_seats < 1:
        return Decision("wait", "seats")
    mark = limits.kv_high_watermark
    if mark is not None and state.running and state.kv_live > mark * state.kv_usable:
        return Decision("wait", "kv_high_watermark")
    if asked.entry_blocks > state.kv_available:
        return Decision("wait", "kv")
    return None


def _later(reason: str, message: str, wait_s: float | None, status: int = 503) -> Decision:
    return Decision("reject", reason, message, status, retry_after(wait_s))


def _over(amount: float, per_s: float | None) -> float | None:
    return amount / per_s if per_s else None


# -- snapshots of a scheduler --


def asked_for(seq: Sequence, request: Request, scheduler: Scheduler, now: float) -> Asked:
    pool, keeps = scheduler.pool, scheduler.reservation
    return Asked(
        prompt_tokens=seq.prompt_len,
        max_tokens=request.max_tokens,
        entry_blocks=pool.blocks_for(keeps.tokens(seq, seq.prompt_len)),
        most_blocks=pool.blocks_for(keeps.most(seq)),
        deadline_s=None if seq.deadline is None else seq.deadline - now,
    )


def snapshot(seq: Sequence, scheduler: Scheduler, pace: Pace, tenant_wait_s: float = 0.0) -> State:
    """What `seq`, which has not been queued, would find. Sums over the queue are taken only where a limit or
    its deadline needs them."""
    pool, limits, waiting = scheduler.pool, scheduler.config, scheduler.waiting
    urgent = limits.deadline_admission and seq.deadline is not None
    bounded = limits.max_waiting_tokens is not None or limits.max_waiting_requests is not None
    tokens = sum(other.num_tokens for other in waiting) if bounded or urgent else 0
    ahead = tokens
    if urgent:
        place = waiting.key(seq)
        ahead = sum(other.num_tokens for other in waiting if waiting.key(other) < place)
    entering = _entering(scheduler) if bounded else []
    return State(
        waiting=len(waiting),
        waiting_tokens=tokens,
        entering=len(entering),
        entering_tokens=sum(other.num_tokens for other in entering),
        joinable=scheduler.joinable,
        running=len(scheduler.running),
        free_seats=free_seats(scheduler),
        kv_live=pool.num_live,
        kv_available=pool.usable - pool.num_live,
        kv_usable=pool.usable,
        tenant_wait_s=tenant_wait_s,
        wait_s=pace.wait_s(ahead),
        serve_s=pace.serve_s(seq.prompt_len, seq.max_tokens, limits.max_num_batched_tokens),
        release_per_s=pace.release_per_s,
    )


def _entering(scheduler: Scheduler) -> list[Sequence]:
    """Those of the queue for whom seats and KV are free, in its order; at most as many as there are seats.
    What the prefix cache or the host may have of them is not looked up: their KV counts in full."""
    pool, limits, draft = scheduler.pool, scheduler.config, Plan()
    seats = free_seats(scheduler) if scheduler.joinable else 0
    mark, spare = limits.kv_high_watermark, pool.usable - pool.num_live
    found: list[Sequence] = []
    for seq in scheduler.waiting.in_turn(draft) if seats else ():
        needed = pool.blocks_for(scheduler.reservation.tokens(seq, seq.num_tokens))
        alone = not (scheduler.running or found)
        high = not alone and mark is not None and pool.usable - spare > mark * pool.usable
        short = spare - needed < (0 if alone else limits.kv_watermark * pool.usable)
        if len(found) == seats or high or short:
            break
        draft.add(seq, 0)  # its tokens are no matter here: who waits for the budget alone will have a seat
        found.append(seq)
        spare -= needed
    return found


def free_seats(scheduler: Scheduler) -> int:
    """Rows of a static batch whose answer has ended keep their seats."""
    return max(0, scheduler.config.max_num_seqs - len(scheduler.running) - len(scheduler.ended))


def blocked(scheduler: Scheduler, plan: Plan) -> str | None:
    """Why the head of the queue is not in this plan: batch | company | seats | kv_high_watermark | kv |
    budget | order (a rule of the strategy's own); None: nobody waits."""
    waiting, pool, limits = scheduler.waiting, scheduler.pool, scheduler.config
    if not waiting:
        return None
    if not scheduler.joinable:
        return "batch"
    if not plan.entries:
        return "company"
    if not free_seats(scheduler):
        return "seats"
    if plan.preempted:
        return "kv"
    mark = limits.kv_high_watermark
    if mark is not None and pool.num_live > mark * pool.usable:
        return "kv_high_watermark"
    head, left = next(iter(waiting.in_turn(Plan())), None), scheduler.budget(plan)
    if head is None:  # lanes: each one that waits has all the seats of its own
        return "seats"
    if next(iter(waiting.in_turn(plan)), None) is None:  # or its own budget
        return "budget"
    chunk = head.remaining if scheduler.whole_prompts else min(head.remaining, left)
    if chunk > left or chunk < 1:
        return "budget"
    wanted = scheduler.reservation.tokens(head, head.num_computed + head.remaining)
    spare = pool.usable - pool.num_live - pool.missing(head.block_table, wanted)
    if spare < limits.kv_watermark * pool.usable:
        return "kv"
    return "order"


def admissible(scheduler: Scheduler, pace: Pace) -> int:
    """How many more sequences could get a seat now, if they are like those that lately did. An estimate, and
    0 while somebody waits: whoever could enter would have."""
    if scheduler.waiting or not scheduler.joinable:
        return 0
    pool, seats = scheduler.pool, free_seats(scheduler)
    mark = scheduler.config.kv_high_watermark
    top = pool.usable if mark is None or not scheduler.running else int(mark * pool.usable)
    room = max(0, top - pool.num_live)
    typical = pace.entry_blocks or pool.blocks_for(scheduler.config.max_model_len)
    return min(seats, int(room / typical))
