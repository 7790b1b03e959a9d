"""How far the load generator's own figures can be trusted here: `python -m harness.calibrate`, see --help and
docs/measuring.md."""
