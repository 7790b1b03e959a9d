"""From a recorded trace to a preset that draws traffic like it: `fit_trace`, and how near it comes: `check`.

Each part of the traffic has a file: lengths, arrivals, prefixes (what prompts share) and sessions. Each says
what it took from the trace; `goodness` compares what the preset draws with the trace itself.
"""
