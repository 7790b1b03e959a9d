"""The engine's loop at the end of a channel, in a thread: what it says when, and when it ends."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.engine import Engine
from engines.request import Request
from engines.server.channel import Channel, socket_pair
from engines.server.engine_loop import EngineLoop, ReportLog
from engines.server.wire import Abort, Add, Died, Message, Report
from engines.turns import Engines
from tests.engines.server.live_server import PATIENCE_S, GatedRunner
from tests.support.mock_runner import MockRunner
from tests.support.mock_runner import answer as oracle


class Other:
    """The server's end of a running loop: `seen` is all that it has said."""

    def __init__(self, gated: bool, scheduler: str, **settings: Any) -> None:
        values: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 256}
        values |= {
            "block_size": 4,
            "num_kv_blocks": 300,
            "name": scheduler,
            "scheduler": scheduler,
        } | settings
        config = EngineConfig(**values)
        self.runner = GatedRunner(MockRunner(300, 4))
        if not gated:
            self.runner.open_gate()
        log = ReportLog(None)
        self.engine = Engine(config, self.runner, num_kv_blocks=300, step_log=log)  # type: ignore[arg-type]
        ours, self.theirs = socket_pair()
        self.channel = Channel(ours)
        self.seen: list[Message] = []
        self.waits = 0
        self.failure: str | None = "not ended"
        loop = EngineLoop(Engines({"default": self.engine}), log, self._counting(Channel(self.theirs)))
        self.thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self.thread.start()

    def _counting(self, channel: Channel) -> Channel:
        wait = channel.wait

        def counted(timeout_s: float | None) -> None:
            self.waits += 1
            wait(timeout_s)

        channel.wait = counted  # type: ignore[method-assign]
        return channel

    def _run(self, loop: EngineLoop) -> None:
        self.failure = loop.run()
        self.theirs.close()

    def add(self, key: int, prompt: list[int], max_tokens: int, **more: Any) -> None:
        self.channel.send(Add(key, time.monotonic_ns(), Request(prompt, max_tokens, ignore_eos=True, **more)))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never happened: {what}: {self.seen[-3:]}"
            self.read(0.001)

    def read(self, timeout_s: float = 0.0) -> None:
        self.channel.wait(timeout_s)
        self.channel.flush()
        self.seen += self.channel.receive()

    @property
    def reports(self) -> list[Report]:
        return [message for message in self.seen if isinstance(message, Report)]

    def answer(self, key: int) -> list[int]:
        rows = [p for report in self.reports for p in report.produced if p.key == key]
        return [token for row in rows for token in row.token_ids]

    def ended(self, *keys: int) -> bool:
        ends = {p.key for report in self.reports for p in report.produced if p.finish_reason}
        return ends >= set(keys)


@contextlib.contextmanager
def looping(gated: bool = False, scheduler: str = "continuous", **settings: Any) -> Iterator[Other]:
    other = Other(gated, scheduler, **settings)
    try:
        yield other
    finally:
        other.runner.open_gate()
        other.channel.close()
        other.thread.join(PATIENCE_S)
        assert not other.thread.is_alive()


def test_every_token_every_pass_and_every_end_is_told_once() -> None:
    with looping() as other:
        prompts = {key: [key + 1] * (key + 2) for key in range(6)}
        for key, prompt in prompts.items():
            other.add(key, prompt, 10 + key)
        other.until(lambda: other.ended(*prompts), "all end")
        other.until(lambda: other.reports[-1].stats.running == 0, "the seats are free")
        for key, prompt in prompts.items():
            assert other.answer(key) == oracle(prompt, 10 + key)
        ends = [p for report in other.reports for p in report.produced if p.finish_reason]
        assert sorted(p.key for p in ends) == sorted(prompts)
        passes = [step for report in other.reports for step in report.passes]
        assert len(passes) == other.reports[-1].stats.steps
        computed = sum(len(prompt) + 10 + key - 1 for key, prompt in prompts.items())
        assert sum(step.tokens for step in passes) == computed
        assert all(step.duration_ns > 0 for step in passes)
        left = [row for report in other.reports for row in report.left]
        assert len(left) == len(prompts)
        assert all(row.queued_ns >= 0 and row.prefill_ns and row.decode_ns for row in left)
        times = [report.at_ns for report in other.reports]
        assert times == sorted(times)


def test_refusals_and_freed_state_do_not_wait_for_another_pass() -> None:
    with looping(gated=True, max_waiting_requests=1) as other:
        other.add(0, [1] * 8, 50)
        other.until(lambda: other.runner.entered == 1, "a pass begins")
        other.add(1, [1] * 200, 200)  # cut to what fits
        other.add(2, [1] * 300, 5)  # can never fit
        other.channel.send(Abort(0, "abort"))
        other.runner.permit(1)
        other.until(lambda: other.runner.entered == 2, "the next pass begins")
        other.until(lambda: any(report.refusals for report in other.reports), "the refusal is told")
        told = next(report for report in other.reports if report.refusals)
        assert [(r.key, r.reason, r.status) for r in told.refusals] == [(2, "prompt_too_long", 400)]
        assert told.stats.finished == {"abort": 1}
        assert told.stats.waiting == 1
        assert other.runner.entered == 2  # and that pass has no permit to end


def test_what_is_aborted_before_the_engine_has_seen_it_never_runs() -> None:
    with looping(gated=True) as other:
        other.add(0, [1], 2)
        other.until(lambda: other.runner.entered == 1, "a pass begins")
        other.add(1, [2], 50)
        other.channel.send(Abort(1, "abort"))
        other.channel.send(Abort(1, "abort"))
        other.channel.send(Abort(77, "stop"))  # unknown, or ended long ago
        other.runner.open_gate()
        other.until(lambda: other.ended(0, 1), "both end")
        assert other.answer(1) == []
        assert other.answer(0) == oracle([1], 2)


def test_it_sleeps_while_there_is_nothing_to_do() -> None:
    with looping(scheduler="static", reservation="max_model_len", max_queue_delay_ms=150.0) as other:
        other.until(lambda: other.waits == 1, "it waits")
        time.sleep(0.1)
        assert other.waits == 1  # and has not come back from it
        other.add(0, [1, 2], 3)
        other.until(lambda: other.ended(0), "it runs once the batch has waited long enough for company")
        time.sleep(0.05)
        assert other.waits <= 10  # one for the request, one for the company, one a pass, one that goes on


def test_a_server_that_reads_nothing_stops_no_pass_and_gets_everything_in_the_end() -> None:
    with looping(max_model_len=4096, max_num_batched_tokens=4096, num_kv_blocks=300) as other:
        other.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        prompts = {key: [key + 1] * 4 for key in range(4)}
        for key, prompt in prompts.items():
            other.add(key, prompt, 250)
        deadline = time.monotonic() + PATIENCE_S
        while other.engine.counters.steps < 249:  # far more than the socket holds
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert other.seen == []
        other.until(lambda: other.ended(*prompts), "all end")
        for key, prompt in prompts.items():
            assert other.answer(key) == oracle(prompt, 250)


def test_it_ends_after_the_pass_in_which_the_server_goes() -> None:
    with looping(gated=True) as other:
        other.add(0, [1], 50)
        other.until(lambda: other.runner.entered == 1, "a pass begins")
        other.channel.close()
        other.runner.permit(1)
        other.thread.join(PATIENCE_S)
        assert not other.thread.is_alive()
        assert other.runner.entered == 1
        assert other.failure is None


@pytest.mark.parametrize("what", ["a failure of the engine", "a frame that is none"])
def test_a_failure_is_told_and_ends_it(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    def leak() -> None:
        raise RuntimeError("KV blocks have leaked")

    with looping(gated=True) as other:
        other.add(0, [1], 50)
        other.until(lambda: other.runner.entered == 1, "a pass begins")
        if what == "a failure of the engine":
            other.engine.step = leak  # type: ignore[method-assign,assignment]
        else:
            other.channel.send(Died("the server says what only an engine may"))
        other.runner.open_gate()
        other.until(lambda: Died in map(type, other.seen), "it says so")
        other.thread.join(PATIENCE_S)
        assert other.failure is not None
        assert other.failure.startswith("RuntimeError: ")
        assert other.seen[-1] == Died(other.failure)
    assert other.failure.removeprefix("RuntimeError: ") in capfd.readouterr().err


def test_a_failure_is_told_where_no_log_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that the records have filled often is the log's."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with looping() as other:
        monkeypatch.setattr(other.engine, "step", full)
        monkeypatch.setattr(sys.stderr, "write", full)
        other.add(0, [1], 50)
        other.thread.join(PATIENCE_S)
        assert not other.thread.is_alive()
        other.read()
        assert other.seen[-1] == Died("OSError: [Errno 28] No space left on device")
