"""`python -m engines.explain RUN ID`: one request's life. The records of client and engine belong together
for it, so the work is done where both are read (harness/explain.py); this is only its name beside the
engines."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from harness.explain import main

    sys.exit(main())
