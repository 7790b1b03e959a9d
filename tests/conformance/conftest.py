"""One script server for all of them, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.load import backends
from tests.support.script_process import ScriptProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ScriptProcess]:
    with ScriptProcess() as process:
        yield process


@pytest.fixture(scope="session", params=backends())
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
