from harness.capacity.command import main
from harness.cli import guard

if __name__ == "__main__":
    raise SystemExit(guard(main))
