"""Who else was on the two cores while a measurement ran: other processes, and the host under a virtual
machine (steal). From /proc, in ticks of 10 ms: good for windows of seconds."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
MOST_OTHERS_CLIENT = 0.05
"""Of the client's core: someone else's time slice is 3 ms and more, and is read as the client's error."""
MOST_OTHERS_SERVER = 0.12
"""Of the server's core: it logs what it really did, so only its receipts come late."""
MOST_STEAL = 0.02
"""Of the window, over both cores."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Shares of the window. steal is the sum over the cores. What others get on a core whose process goes
    before them (real-time priority) does not disturb it."""

    window_s: float
    others_client: float
    others_server: float
    steal: float
    client_first: bool = False
    server_first: bool = False

    @property
    def noisy(self) -> bool:
        return (
            (self.others_client > MOST_OTHERS_CLIENT and not self.client_first)
            or (self.others_server > MOST_OTHERS_SERVER and not self.server_first)
            or self.steal > MOST_STEAL
        )

    @property
    def total(self) -> float:
        """For choosing the quietest of several."""
        client = 0.0 if self.client_first else self.others_client
        return client + (0.0 if self.server_first else self.others_server) + self.steal


class NoiseWatch:
    """From its making to stop(). This process moves to the server's core meanwhile, and its own work there
    (it merges records once the load is over) is not called noise. On one core both shares are of that
    core."""

    def __init__(self, client_core: int, server_core: int, server_pid: int, *, client_first: bool) -> None:
        self._client_first = client_first
        self._cores = (client_core, server_core)
        self._pid = server_pid
        self._affinity = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {server_core})
        self._before = (time.monotonic(), _cores(), self._server_s())

    def stop(self, client_cpu_s: float) -> Noise:
        """client_cpu_s: CPU seconds of the client in the window."""
        start, before, server_before = self._before
        window_s, after = time.monotonic() - start, _cores()
        os.sched_setaffinity(0, self._affinity)
        client, server = self._cores
        own = {client: client_cpu_s, server: self._server_s() - server_before}
        if client == server:
            own[client] += client_cpu_s
        others = {core: max(0.0, after[core][0] - before[core][0] - own[core]) / window_s for core in own}
        steal = sum(after[core][1] - before[core][1] for core in own) / window_s
        server_first = os.sched_getscheduler(self._pid) == os.SCHED_FIFO
        return Noise(window_s, others[client], others[server], steal, self._client_first, server_first)

    def _server_s(self) -> float:
        return process_cpu_s(self._pid) + time.process_time()


def process_cpu_s(pid: int) -> float:
    """User and system seconds of a process and its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _cores() -> dict[int, tuple[float, float]]:
    """(busy, stolen) seconds of every core since boot."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _, _, irq, softirq, steal = (int(v) / TICKS for v in values[:8])
            found[int(name[3:])] = (user + nice + system + irq + softirq, steal)
    return found
