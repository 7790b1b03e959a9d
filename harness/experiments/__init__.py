"""Published results as experiments that anybody can rerun with one line: docs/experiments.md has them all."""
