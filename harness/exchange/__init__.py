"""Results of other load generators in our summary's shape, and ours in theirs. docs/foreign-results.md.

A figure lands in the field whose definition it has, or it is null with the reason."""
