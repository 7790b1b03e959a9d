"""`python -m harness.gate`: see harness.gate.command."""

import sys

from harness.cli import guard
from harness.gate.command import main

if __name__ == "__main__":
    sys.exit(guard(main))
