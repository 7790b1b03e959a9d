"""What a user runs: configuration, load generator, records, metrics, comparison, gate, dashboard."""

__version__ = "0.1.0"
