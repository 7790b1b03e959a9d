"""`python -m harness.compare`: see harness.compare.command."""

import contextlib
import os
import sys

if __name__ == "__main__":
    from harness.compare.command import main

    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as `python -m harness` does: see there
