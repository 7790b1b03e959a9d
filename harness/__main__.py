"""`python -m harness`: see harness.cli."""

import contextlib
import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """A Ctrl-C while modules are still being loaded: nothing has begun. (KeyboardInterrupt would come out of
    an extension as ImportError, or end in a traceback.)"""
    os.write(2, b"interrupted before the load began; nothing was measured\n")
    os._exit(3)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from harness.cli import main

    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    # A KeyboardInterrupt that passed through exec() (every dataclass has one) makes CPython end itself by
    # SIGINT at its exit, whatever code was asked for.
    os._exit(code)
