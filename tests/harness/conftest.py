from __future__ import annotations

import pytest

from tests.support.load import backends


@pytest.fixture(params=backends())
def backend(request: pytest.FixtureRequest) -> str:
    """Each way to move bytes that this machine has, by the name of load.backend."""
    return request.param
