"""The highest rate at which an engine keeps its SLO, what it costs, and where one strategy overtakes another."""
