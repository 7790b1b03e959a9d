"""A pass that has been launched: its tokens on their way to the host, and the one moment at which somebody
waits for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from engines import sampler
from engines.batch import Sampling, StepResult


class Readback:
    """Ids of a pass on the host. On CUDA one copy to pinned memory and one event; two buffers taken in turn,
    since the next pass may be launched before the ids of this one are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(0, dtype=torch.int64)] * 2
        self._turn = 0

    def start(self, ids: torch.Tensor) -> Callable[[], NDArray[np.int64]]:
        """ids [R] -> what waits for them and gives them."""
        if not self._on_cuda:
            return ids.clone().numpy
        self._turn = 1 - self._turn
        if self._hosts[self._turn].shape[0] < ids.shape[0]:
            self._hosts[self._turn] = torch.zeros(2 * ids.shape[0], dtype=torch.int64, pin_memory=True)
        host = self._hosts[self._turn][: ids.shape[0]]
        host.copy_(ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> NDArray[np.int64]:
            copied.synchronize()
            return host.numpy().copy()

        return wait


class Span:
    """How long the device was at work between two moments of its stream, in seconds; None on the CPU, where
    whoever calls has waited for all of it."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        self._record(0)

    def _record(self, index: int) -> None:
        if self._events:
            self._events[index].record()

    def end(self) -> None:
        self._record(1)

    @property
    def seconds(self) -> float | None:
        """After the pass has ended."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else None


class DevicePass:
    """`ids` [R] stay on the device, for the pass that is launched before these are known on the host. With
    sampling a token is drawn on the host, so a pass that draws is waited for when it is launched."""

    def __init__(
        self,
        logits: torch.Tensor,  # [R, vocab]
        ids: torch.Tensor,  # [R], the greedy ones
        sampling: Sampling | None,
        pad_rows: int,
        readback: Readback,
        span: Span,
    ) -> None:
        self.ids = ids
        self._pad_rows = pad_rows
        self._span = span
        if sampling is None or not (sampling.temperature > 0).any():
            self._wait = readback.start(ids)
            span.end()
        else:
            span.end()
            drawn = sampler.draw(ids.cpu().numpy().copy(), logits, sampling)
            self.ids = torch.from_numpy(drawn).to(ids.device)
            self._wait = lambda: drawn

    def result(self) -> StepResult:
        """Waits until the pass has ended."""
        return StepResult(self._wait(), self._pad_rows)

    @property
    def seconds(self) -> float | None:
        """What the device spent on it, once it has ended; None where it is not measured."""
        return self._span.seconds
