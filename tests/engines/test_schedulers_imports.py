"""A scheduler is arithmetic: it can be simulated in virtual time, without a model and without a server."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *(ROOT / "engines" / "schedulers").glob("*.py"),
        *(ROOT / "engines" / "queues").glob("*.py"),
        *(ROOT / "engines" / name for name in ("lanes.py", "shares.py", "deadlines.py")),
    ]
)


def test_schedulers_load_without_torch_and_asyncio() -> None:
    heavy = ("torch", "asyncio", "pyarrow")
    code = f"import sys, engines.schedulers; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_schedulers_read_no_clock_and_no_request(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert imported
    assert not imported & {
        "time",
        "datetime",
        "random",
        "torch",
        "asyncio",
        "engines.request",
        "engines.engine",
    }
