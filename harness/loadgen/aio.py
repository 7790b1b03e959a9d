"""The aiohttp backend: a load over asyncio and aiohttp. It speaks TLS, goes through proxies and follows
redirects, and runs wherever Python does; stamps are taken when its reader gets the bytes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from harness.loadgen.pacing import PREPARE_MARGIN_NS, Alarm
from harness.loadgen.settings import BackendReport
from harness.loadgen.transport import AiohttpTransport, Transport, TransportError
from harness.loadgen.watch import LoopLag

if TYPE_CHECKING:
    from harness.loadgen.call import Call
    from harness.loadgen.dispatch import Due
    from harness.loadgen.run import Load

STOP_GRACE_S = 1.5


def run_aio(load: Load) -> BackendReport:
    """Drive the load until it is through or stopped."""
    return asyncio.run(_Driver(load).run())


class _Driver:
    """Paces in one task; every call under way is a task of its own."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: Transport
        self._alarm = Alarm()
        self._target_ns: int | None = None  # what the pacing task sleeps for
        self._open: dict[Call, asyncio.Task[None]] = {}
        self._timers: dict[Call, asyncio.TimerHandle] = {}

    async def run(self) -> BackendReport:
        load, loop, lag = self._load, asyncio.get_running_loop(), LoopLag()
        self._transport = AiohttpTransport(
            load.target.root_url, load.target.api_key, trust_env=load.settings.trust_env
        )
        lag_task = loop.create_task(lag.run())
        loop.add_reader(load.stop.fileno(), self._stopped)
        try:
            with self._alarm:
                try:
                    await self._pace()
                finally:
                    await self._cut_off()
        finally:
            loop.remove_reader(load.stop.fileno())
            lag_task.cancel()
            await asyncio.gather(lag_task, return_exceptions=True)
            await self._transport.close()
        return BackendReport(
            "aiohttp", "reader", tuple(lag.samples_ms), connections=self._transport.connections
        )

    async def _pace(self) -> None:
        load, dispatcher = self._load, self._load.dispatcher
        while not load.stop.is_set:
            next_ns = dispatcher.next_ns()
            if next_ns is None and not self._open and dispatcher.exhausted:
                return
            now_ns = time.monotonic_ns()
            if (next_ns is None or next_ns - now_ns > PREPARE_MARGIN_NS) and load.idle(next_ns or now_ns):
                await asyncio.sleep(0)
                continue
            self._target_ns = next_ns
            if await self._alarm.until(next_ns):
                due = dispatcher.take(time.monotonic_ns())
                if due is not None:
                    self._launch(due)

    def _launch(self, due: Due) -> None:
        body = self._load.bodies.body(due)
        call = self._load.call(due, time.monotonic_ns())
        task = asyncio.get_running_loop().create_task(self._exchange(call, body))
        self._open[call] = task
        task.add_done_callback(lambda _: self._finish(call))  # also of a task that never ran

    async def _exchange(self, call: Call, body: bytes) -> None:
        try:
            call.dispatched(time.monotonic_ns())
            self._watch(call)
            socket = call.request.transport == "websocket"
            send = self._transport.converse if socket else self._transport.post
            await send(self._load.path, body, call)
            call.finish(time.monotonic_ns())
        except asyncio.CancelledError:
            call.cut_off(time.monotonic_ns())
        except TransportError as exc:
            call.broke(time.monotonic_ns(), exc.reason, str(exc))
        except Exception as exc:
            call.broke(time.monotonic_ns(), "client_error", f"{type(exc).__name__}: {exc}")
        self._finish(call)

    def _finish(self, call: Call) -> None:
        """The call has ended: once, whoever notices."""
        if self._open.pop(call, None) is None:
            return
        now_ns = time.monotonic_ns()
        call.cut_off(now_ns)
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()
        self._load.ended(call, now_ns)
        if not self._open or self._load.dispatcher.next_ns() != self._target_ns:
            self._alarm.wake()

    def _watch(self, call: Call) -> None:
        """Come back at the call's next deadline."""
        if call.deadline_ns is not None:
            wait_s = max(0, call.deadline_ns - time.monotonic_ns()) / 1e9
            self._timers[call] = asyncio.get_running_loop().call_later(wait_s, self._deadline, call)

    def _deadline(self, call: Call) -> None:
        if call.on_deadline(time.monotonic_ns()):
            self._open[call].cancel()
        else:
            self._watch(call)

    def _stopped(self) -> None:
        asyncio.get_running_loop().remove_reader(self._load.stop.fileno())
        self._alarm.wake()

    async def _cut_off(self) -> None:
        """End what is under way: the load was stopped, or has failed."""
        now_ns, tasks = time.monotonic_ns(), list(self._open.values())
        for call, task in self._open.items():
            call.cut_off(now_ns)
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_S)
        for call in list(self._open):
            self._finish(call)
