"""The engine in a process of its own, a child of the server. Started and ended here by the server; run as
`python -m engines.server.engine_process FD`, it is the child.

The child imports torch, the server never does, and neither can hold up the other's interpreter. The socket
between them is also the lifeline: where it closes, the other side has gone. The child belongs to the server's
process group and ignores what a terminal sends to the group: the server decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.config import ConfigError, EngineConfig, thread_count
from engines.server.channel import Channel, socket_pair
from engines.server.wire import Died, Message, Ready, Start, Unfit

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FACTS = (
    *(
        "device",
        "dtype",
        "dtype_measured",
        "threads",
        "cpu_affinity",
        "linear",
        "attention",
        "determinism",
        "parameters",
    ),
    *("graphs", "compile"),
)
"""Of the runner, on the ready line and in meta.json."""
EXIT_S = 2.0
"""How long a process whose socket has closed may take to be gone."""
PR_SET_PDEATHSIG = 1


class EngineDied(RuntimeError):
    """The engine process failed before it was ready. The message is one line."""


class EngineProcess:
    """The server's side: one child, from start to certain end. Raises ConfigError for engine.threads, OSError
    when no child can be started."""

    def __init__(self, config: Mapping[str, Any], engine: EngineConfig, records: Path | None) -> None:
        env = os.environ | _openmp(engine)
        ours, theirs = socket_pair()
        command = [sys.executable, "-m", "engines.server.engine_process", str(theirs.fileno())]
        # A Ctrl-C during the start is for us; the child takes over this mask and has its own handlers first.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output is for the server's one line
                    pass_fds=[theirs.fileno()],
                    env=env,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        self.channel = Channel(ours)
        self.channel.send(Start(dict(config), None if records is None else str(records), os.getpid()))

    def wait_ready(self) -> Ready:
        """Raises ConfigError for a setting that cannot work, EngineDied for anything else."""
        message = _next(self.channel)
        if isinstance(message, Ready):
            return message
        self.channel.end()
        ended = self.how_it_ended()
        if isinstance(message, Unfit):
            raise ConfigError(message.message)
        raise EngineDied(message.reason if isinstance(message, Died) else ended)

    def how_it_ended(self) -> str:
        """For a child whose socket has closed."""
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "its process has closed the connection"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    def end(self, patience_s: float) -> str | None:
        """Wait for the end that closing the channel brings; what the engine has failed at meanwhile, or None.
        A pass that takes longer is cut off, and what the records hold so far is on file."""
        deadline = time.monotonic() + patience_s
        failure = None
        while not self.channel.ended and (left_s := deadline - time.monotonic()) > 0:
            self.channel.wait(left_s)
            self.channel.flush()
            for message in self.channel.receive():
                failure = message.reason if isinstance(message, Died) else failure
        try:
            if self._process.wait(max(0.0, deadline - time.monotonic())) and failure is None:
                # it had no time for last words, nor for its records
                failure = f"the engine has stopped: {self.how_it_ended()}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.channel.close()
        return failure


def _openmp(engine: EngineConfig) -> dict[str, str]:
    """How many threads OpenMP starts; how they wait is engines.runner's. Raises ConfigError."""
    return {"OMP_NUM_THREADS": str(thread_count(engine.threads, engine.cpu_affinity))}


def _next(channel: Channel) -> Message | None:
    """The next message, waiting for it; None when the other side has gone."""
    while not channel.ended:
        channel.wait(None)
        channel.flush()
        if messages := channel.receive():
            (message,) = messages  # nobody says two things before it is answered
            return message
    return None


# -- the child --


def main() -> int:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    _die_with_parent()
    start = _next(channel)
    if not isinstance(start, Start) or os.getppid() != start.server_pid:
        return 1
    try:
        return _serve(channel, start)
    except ConfigError as error:
        channel.send(Unfit(str(error)))
        return 2
    except BaseException as error:
        channel.send(Died(f"{type(error).__name__}: {error}"))
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return 1


def _serve(channel: Channel, start: Start) -> int:
    """Build what the configuration names and run it to its end. Raises ConfigError."""
    from engines.routes import routes_of, sized_for_all
    from engines.runner import build_runner
    from engines.server.engine_loop import LAST_WORDS_S, EngineLoop
    from engines.server.recordings import Recordings

    config = start.config
    routes = routes_of(config)
    engine_config, size = routes[-1].engine, sized_for_all(routes)
    runner = build_runner(config["model"], size, config["device"], config["dtype"], config["seed"])
    records = None if start.records is None else Path(start.records)
    recordings = Recordings(config, routes, runner, records)
    loaded = runner.loaded
    info = runner.info()
    facts = {
        "model": loaded.name,
        "tokenizer": loaded.tokenizer_ref,
        "vocab_size": min(loaded.config.vocab, loaded.tokenizer.vocab_size),
        "eos_token_ids": list(loaded.tokenizer.eos_token_ids),
        "max_model_len": engine_config.max_model_len,
        "num_kv_blocks": runner.num_kv_blocks,
        "block_size": engine_config.block_size,
        "scheduler": engine_config.scheduler,
        "routes": [route.name for route in routes],
        "engine_pid": os.getpid(),
        "overlap": engine_config.overlap,
    } | {key: info[key] for key in FACTS}
    gc.collect()
    gc.freeze()  # weights and modules stay for good: no collection has to look at them again
    now = recordings.now
    channel.send(Ready(facts, loaded.tokenizer.description(), now.engines.stats()))
    failure = EngineLoop(now.engines, now.log, channel, recordings.next).run()
    try:
        recordings.end(failed=failure is not None)
    except OSError as error:
        channel.send(Died(f"--records: cannot be written ({error.strerror or error})"))
        channel.drain(LAST_WORDS_S)
        return 1
    finally:
        runner.close()
    return 0 if failure is None else 1


def _die_with_parent() -> None:
    """Linux: not even a pass that never ends outlives the server. Elsewhere the end of the channel does."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
