"""How a pass gets under way while the engine does something else: in the device's own queue, or in a thread
where there is none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.batch import Copies, RaggedBatch, StepResult

Source = NDArray[np.int64]
"""[T]: which result of the pass before is the token; -1: it is known."""


class LostKv(RuntimeError):
    """Copying KV has failed: that of sequences outside of the pass is lost as well."""


class Done(NamedTuple):
    result: StepResult
    start: float  # on the engine's clock
    end: float


class Handle(Protocol):
    def wait(self) -> Done:
        """Until the pass is over. Raises what it has raised."""
        ...


class Launcher(Protocol):
    def launch(
        self, batch: RaggedBatch, copies: Copies | None, source: Source | None, before: Any
    ) -> Handle: ...

    def close(self) -> None: ...


def launcher_for(runner: Any, clock: Callable[[], float]) -> Launcher:
    return DeviceQueue(runner, clock) if getattr(runner, "asynchronous", False) else PassThread(runner, clock)


class PassThread:
    """Runs any runner's passes in a thread, one after the other. torch lets go of the interpreter while it
    computes, so the engine's Python has it meanwhile."""

    def __init__(self, runner: Any, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        adopt: Callable[[], None] = getattr(runner, "adopt_thread", lambda: None)
        self._pool = ThreadPoolExecutor(1, "pass", initializer=adopt)

    def launch(
        self, batch: RaggedBatch, copies: Copies | None, source: Source | None, before: _Running | None
    ) -> _Running:
        return _Running(self._pool.submit(self._run, batch, copies, source, before))

    def _run(
        self, batch: RaggedBatch, copies: Copies | None, source: Source | None, before: _Running | None
    ) -> Done:
        start = self._clock()
        if copies is not None:
            try:
                self._runner.copy(copies)
            except Exception as error:
                raise LostKv(f"{type(error).__name__}: {error}") from error
        if source is not None and before is not None:  # it has run in this thread: nothing is waited for
            ids = before.wait().result.token_ids
            batch = replace(
                batch, token_ids=np.where(source < 0, batch.token_ids, ids[np.maximum(source, 0)])
            )
        return Done(self._runner.run(batch), start, self._clock())

    def close(self) -> None:
        self._pool.shutdown()


class _Running:
    def __init__(self, future: Future[Done]) -> None:
        self._future = future

    def wait(self) -> Done:
        return self._future.result()


class DeviceQueue:
    """Launches with `runner.begin`, which comes back at once: the device works off what it is given in
    order."""

    def __init__(self, runner: Any, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        self._ended = 0.0

    def launch(
        self, batch: RaggedBatch, copies: Copies | None, source: Source | None, before: _Queued | None
    ) -> _Queued:
        from engines.staging import Carried

        if copies is not None:
            try:
                self._runner.copy(copies)
            except Exception as error:
                raise LostKv(f"{type(error).__name__}: {error}") from error
        launched = self._clock()
        try:
            carried = None
            if source is not None and before is not None:
                carried = Carried(source, before.device_pass.ids)
            return _Queued(self, launched, self._runner.begin(batch, carried))
        except Exception as error:
            return _Queued(self, launched, error)

    def ended(self, launched: float, seconds: float | None) -> tuple[float, float]:
        """When the pass that has just been waited for began and ended. It began when it was launched or when
        the one before it ended, and it ended before now: we may have come late."""
        start, now = max(launched, self._ended), self._clock()
        self._ended = now if seconds is None else min(now, start + seconds)
        return start, self._ended

    def close(self) -> None:
        pass


class _Queued:
    def __init__(self, queue: DeviceQueue, launched: float, outcome: Any) -> None:
        self._queue, self._launched, self._outcome = queue, launched, outcome

    @property
    def device_pass(self) -> Any:
        """Raises what the launch has raised."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def wait(self) -> Done:
        running = self.device_pass
        result = running.result()
        return Done(result, *self._queue.ended(self._launched, running.seconds))
