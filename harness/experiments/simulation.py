"""A schedule played against an engine in this process, with the people of the schedule: they arrive, read,
ask again and hang up. No server and no sockets, so what comes out is the engine's own.

In virtual time (`simulate`, `play_virtual`) the model takes time and computes nothing (engines/virtual.py),
for experiments in which counts matter (batches, waste, preemptions) and time only has to be in proportion:
the same schedule gives the same figures on every machine. `play_real` is the same loop over a real model
and the clock.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from engines.config import EngineConfig
from engines.engine import Engine, Runner
from engines.request import Output, Request
from engines.virtual import Clock, Log, VirtualRunner, play
from workloads.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a pass: `step` for any, `row` for each row in it (a sequence, or pads before one), `token`
    for each token beyond a row's first. The defaults have the proportions of model=tiny, float32, on one core
    (a ridge of about 15), and take a few times as long."""

    step: float = 0.0045
    row: float = 0.0003
    token: float = 0.0001

    def __call__(self, rows: int, tokens: int) -> float:
        return self.step + self.row * rows + self.token * (tokens - rows)

    @property
    def ridge(self) -> float:
        """The batch at which a decode step takes twice as long as for none."""
        return self.step / self.row


@dataclass(slots=True)
class Seen:
    """One request as its user saw it, seconds. tokens: (when, how many) of each piece of the answer."""

    planned: ScheduledRequest
    intended_s: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    end_s: float | None = None
    hung_up: bool = False
    leaves_s: float | None = None

    @property
    def count(self) -> int:
        return sum(n for _, n in self.tokens)


@dataclass(frozen=True, slots=True)
class Played:
    """One pass over a schedule. hang_ups_s: when somebody left."""

    config: EngineConfig
    log: Log
    seen: list[Seen]

    @property
    def hang_ups_s(self) -> list[float]:
        return [s.end_s for s in self.seen if s.hung_up and s.end_s is not None]


def simulate(config: EngineConfig, schedule: Iterable[ScheduledRequest], cost: Cost | None = None) -> Log:
    """Replay the arrivals of a schedule, until its last answer is out. Nobody hangs up. `config` names its
    pool (num_kv_blocks)."""
    due = [(r.arrival_s, as_request(r)) for r in sorted(schedule, key=lambda r: r.arrival_s)]
    return play(config, _pool(config), due, cost or Cost())


def play_virtual(
    config: EngineConfig, schedule: Iterable[ScheduledRequest], cost: Cost | None = None, times: int = 1
) -> list[Played]:
    """The same schedule so many times on one engine, one after the other, in virtual time."""
    clock = Clock()

    def wait(until: float) -> None:
        clock.now = until

    return _passes(config, VirtualRunner(clock, cost or Cost()), schedule, clock, wait, times, vocab=None)


def play_real(
    config: EngineConfig, schedule: Iterable[ScheduledRequest], runner: Runner, vocab: int, times: int = 1
) -> list[Played]:
    """As `play_virtual`, with a real model and in real time."""
    start = time.monotonic()

    def clock() -> float:
        return time.monotonic() - start

    def wait(until: float) -> None:
        time.sleep(max(0.0, until - clock()))

    return _passes(config, runner, schedule, clock, wait, times, vocab)


def _passes(
    config: EngineConfig,
    runner: Runner,
    schedule: Iterable[ScheduledRequest],
    clock: Callable[[], float],
    wait: Callable[[float], None],
    times: int,
    vocab: int | None,
) -> list[Played]:
    rows = sorted(schedule, key=lambda r: r.arrival_s)
    requests = {row.id: as_request(row, vocab) for row in rows}  # drawn before time counts
    log = Log()
    engine = Engine(
        config,
        runner,
        num_kv_blocks=_pool(config),
        clock=clock,
        step_log=log,  # type: ignore[arg-type]
    )
    found = []
    for _ in range(times):
        users, steps, ended = Users(rows, requests, clock()), len(log.steps), len(log.requests)
        drive(engine, users, clock, wait)
        own = Log(log.steps[steps:], log.requests[ended:])
        found.append(Played(config, own, list(users.seen.values())))
    return found


def drive(engine: Engine, users: Users, clock: Callable[[], float], wait: Callable[[float], None]) -> None:
    """Until nobody is left to arrive and the engine has nothing to do."""
    while users.next_s is not None or engine.has_work:
        users.act(engine, clock())
        now = clock()
        wakeup = engine.next_wakeup(now)
        if wakeup is not None and wakeup <= now:
            users.read(engine.step(), clock())
        elif times := [at for at in (wakeup, users.next_s) if at is not None]:
            wait(min(times))


class Users:
    """start: when the schedule begins, on the engine's clock. A session's next turn comes think_s after the
    end of the one before it; who hangs up does so as the schedule says."""

    def __init__(self, rows: list[ScheduledRequest], requests: dict[str, Request], start: float) -> None:
        self.seen: dict[int, Seen] = {}
        self._requests = requests
        self._start = start
        self._later: dict[str, list[ScheduledRequest]] = {}
        self._due: list[tuple[float, int, ScheduledRequest]] = []
        self._leaving: list[tuple[float, int]] = []
        self._stopping: list[int] = []  # have read enough
        self._order = itertools.count()
        for row in rows:
            if row.think_s is None:
                self._push(start + row.arrival_s, row)
            else:
                self._later.setdefault(str(row.session), []).append(row)

    @property
    def next_s(self) -> float | None:
        return min((heap[0][0] for heap in (self._due, self._leaving) if heap), default=None)

    def act(self, engine: Engine, now: float) -> None:
        for seq_id in self._stopping:
            self._hang_up(engine, seq_id, now)
        self._stopping = []
        while self._due and self._due[0][0] <= now:
            at, _, row = heapq.heappop(self._due)
            seq_id = engine.add(self._requests[row.id], at)
            self.seen[seq_id] = Seen(row, at)
            if row.cancel_kind in ("after_s", "before_first_token"):
                self.seen[seq_id].leaves_s = at + (row.cancel_value or 0.0)
                heapq.heappush(self._leaving, (at + (row.cancel_value or 0.0), seq_id))
        while self._leaving and self._leaving[0][0] <= now:
            leaves, seq_id = heapq.heappop(self._leaving)
            if self._has_left(self.seen[seq_id], now):
                self._hang_up(engine, seq_id, leaves)

    def read(self, outputs: list[Output], now: float) -> None:
        for output in outputs:
            seen = self.seen[output.seq_id]
            if seen.hung_up or self._has_left(seen, now):
                if output.finish_reason is not None and not seen.hung_up:  # nothing is left to abort
                    seen.hung_up, seen.end_s = True, seen.leaves_s
                continue
            if output.token_ids:
                seen.tokens.append((now, len(output.token_ids)))
            if output.finish_reason is not None:
                seen.end_s = now
                self._ask_again(seen, now)
            elif seen.planned.cancel_kind == "after_tokens" and seen.count >= (
                seen.planned.cancel_value or 0
            ):
                self._stopping.append(output.seq_id)

    def _has_left(self, seen: Seen, now: float) -> bool:
        """Also in the middle of a pass, which brings what nobody reads any more."""
        stays = seen.planned.cancel_kind == "before_first_token" and bool(seen.tokens)
        return seen.leaves_s is not None and seen.leaves_s <= now and not stays

    def _hang_up(self, engine: Engine, seq_id: int, at: float) -> None:
        seen = self.seen[seq_id]
        if seen.end_s is None:
            seen.hung_up, seen.end_s = True, at
            engine.abort(seq_id)

    def _ask_again(self, seen: Seen, now: float) -> None:
        if turns := self._later.get(str(seen.planned.session)):
            turn = turns.pop(0)
            self._push(max(now + (turn.think_s or 0.0), self._start + turn.arrival_s), turn)

    def _push(self, at: float, row: ScheduledRequest) -> None:
        heapq.heappush(self._due, (at, next(self._order), row))


def _pool(config: EngineConfig) -> int:
    if config.num_kv_blocks is None:
        raise ValueError("a simulation needs engine.num_kv_blocks")
    return config.num_kv_blocks


def as_request(planned: ScheduledRequest, vocab: int | None = None) -> Request:
    """Prompts that share a segment share its tokens: in virtual time the numbers of their place, for a model
    with a vocabulary draws from it."""
    draw = _numbers if vocab is None else _tokens_of(vocab)
    return Request(
        [token for segment, count in planned.segments for token in draw(segment, count)],
        planned.max_tokens,
        stop_after=planned.stop_after,
        label={"run": "simulation", "id": planned.id, "attempt": 1},
        tenant=planned.tenant,
        request_class=planned.request_class,
        priority=planned.priority,
        deadline_ms=planned.deadline_ms,
    )


def _numbers(segment: str, count: int) -> Iterable[int]:
    return range(_start(segment), _start(segment) + count)


def _tokens_of(vocab: int) -> Callable[[str, int], Iterable[int]]:
    return lambda segment, count: np.random.default_rng(_start(segment)).integers(1, vocab, count).tolist()


def _start(segment: str) -> int:
    """Where the tokens of a segment begin: another place for every name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(segment.encode(), digest_size=7).digest(), "big")
