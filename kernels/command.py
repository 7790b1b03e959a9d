"""How a command of kernels or engines ends when it is interrupted, or when nobody reads it any more."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

PASS, REGRESSION, USAGE, INVALID = 0, 1, 2, 3


def guard(command: Callable[[], int]) -> int:
    """Run it; Ctrl-C, SIGTERM, a closed or full standard output become an exit code and at most one line."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted: nothing is reported", file=sys.stderr)
        return INVALID
    except BrokenPipeError:  # `| head`
        _mute()
        return PASS
    except OSError as error:
        _mute()
        print(f"error: {error.strerror or error}", file=sys.stderr)
        return INVALID


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _mute() -> None:
    """What the interpreter still flushes at its end leads nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
