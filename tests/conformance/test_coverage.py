"""The table of README.md: every item is there, and so is every test that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPARISON = {12, 16, 17}
ITEMS = {f"2.{k}" for k in range(1, 32) if k not in COMPARISON} | {"5a", "5b"}


def rows() -> dict[str, list[str]]:
    """item -> the tests that the table names for it."""
    found = {}
    for line in (HERE / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"2\.\d+|5[ab]", cells[0]):
            found[cells[0]] = re.findall(r"`([\w/]+\.py::\w+)`", cells[2])
    return found


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_item_has_a_test_that_exists() -> None:
    table = rows()
    assert set(table) == ITEMS
    named = [(item, test) for item, tests in table.items() for test in tests]
    assert len(named) >= len(ITEMS)
    for item, test in named:
        file, _, name = test.partition("::")
        path = (ROOT if file.startswith("tests/") else HERE) / file
        assert path.exists(), f"{item}: {test}"
        assert name in functions(path), f"{item}: {test}"


def test_every_test_here_is_of_an_item() -> None:
    listed = {test for tests in rows().values() for test in tests}
    here = {
        f"{path.name}::{name}"
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for name in functions(path)
        if name.startswith("test_")
    }
    assert len(here) > 35
    assert here <= listed, sorted(here - listed)
