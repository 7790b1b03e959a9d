"""The highest rate at which an engine keeps its SLO, its cost, and where one strategy overtakes another."""
