"""Every figure of a run, derived from its records alone: a small file for each noun; `summary` joins them."""

from harness.metrics.run import Run, load_run
from harness.metrics.summary import build_summary, save_summary, write_summary

__all__ = ["Run", "build_summary", "load_run", "save_summary", "write_summary"]
