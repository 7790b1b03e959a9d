"""Triton kernels for CUDA: paged attention, the writing of the cache, and the fused operations.

Triton is imported by the modules here and nowhere else, so that a machine without a GPU never loads it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreting() -> bool:
    """Whether Triton runs kernels in Python on the CPU: TRITON_INTERPRET=1, read when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def available() -> bool:
    """Whether Triton is installed. Where it is not, warns once: on a GPU that is a mistake of the install."""
    if importlib.util.find_spec("triton") is None:
        message = "Triton is not installed, using the slower torch kernels: pip install -e '.[gpu]'"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
