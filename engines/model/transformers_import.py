"""The one door to transformers.

transformers asks whether a distribution called `kernels` is installed, and if so imports names from the
module `kernels`. In this project that module is our own package. So where the distribution is installed, its
answer is made "no" before anything of transformers asks: it then runs as it does everywhere without that
optional distribution."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def import_transformers() -> ModuleType:
    """The module transformers, safe beside our package `kernels`. Takes seconds the first time."""
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    installed = import_utils._is_package_available

    def without_kernels(name: str, *args: Any, **kwargs: Any) -> Any:
        # Asked as a name that no distribution has, so that the answer has the form this version gives.
        return installed("kernels-distribution-hidden" if name == "kernels" else name, *args, **kwargs)

    import_utils._is_package_available = without_kernels
    try:
        import_utils.is_kernels_available()  # it remembers its first answer
    finally:
        import_utils._is_package_available = installed
    return importlib.import_module("transformers")
