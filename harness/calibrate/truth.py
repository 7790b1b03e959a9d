"""The server of known truth: C++ under tests/support, compiled on demand. Only a clone has it."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.conf import UsageError

FACE = Path(__file__).resolve().parents[2] / "tests" / "support" / "truth_server.py"


@cache
def _module() -> ModuleType:
    """tests/support/truth_server.py by its path: a user's working directory need not be the clone."""
    if not FACE.is_file():
        raise UsageError(f"{FACE}: no such file; calibrate needs the sources: run it from a clone")
    spec = importlib.util.spec_from_file_location("batchmark_truth_server", FACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def truth_server(**options: Any) -> Any:
    """A running TruthServer (tests/support/truth_server.py), a context manager. Raises UsageError when it
    cannot be built or started."""
    module = _module()
    try:
        return module.TruthServer(**options)
    except module.TruthServerError as error:
        raise UsageError(str(error)) from None
