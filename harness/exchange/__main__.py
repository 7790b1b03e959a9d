import sys

from harness.exchange.command import main

if __name__ == "__main__":
    sys.exit(main())
