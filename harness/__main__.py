"""`python -m harness`: see harness.cli."""

from harness.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
