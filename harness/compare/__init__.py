"""`python -m harness.compare`: arms on one schedule, in interleaved rounds (docs/comparing.md)."""
