from harness.cli import guard
from harness.peers.command import main

if __name__ == "__main__":
    raise SystemExit(guard(main))
