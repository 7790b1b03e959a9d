"""`python -m harness.dashboard --serve results/`: all runs below a folder in a browser, live."""

from harness.dashboard.serve.app import ServeError, make_app, serve

__all__ = ["ServeError", "make_app", "serve"]
