"""The configuration: YAML data that every package may read, and the one function that composes it."""
