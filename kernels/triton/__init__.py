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
OLDEST = (8, 0)  # compute capability: what the kernels are compiled for in the tests, and newer


def interpreting() -> bool:
    """Whether Triton runs kernels in Python on the CPU: TRITON_INTERPRET=1, read when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unusable(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run there in one line, or None. Does not import Triton."""
    device = torch.device(device)
    if dtype not in DTYPES:
        return f"runs float32, bfloat16 and float16, not {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install -e '.[gpu]' -c constraints.txt"
    if interpreting():
        return None if device.type == "cpu" else f"with TRITON_INTERPRET=1 it runs on cpu, not {device}"
    if device.type != "cuda":
        return f"runs on cuda, not {device}"
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    if (found := torch.cuda.get_device_capability(device)) < OLDEST:
        return f"needs compute capability 8.0 (A100) or newer, this GPU has {found[0]}.{found[1]}"
    return None


@functools.cache
def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether they run there. Where a CUDA device is left to torch, warns once and says why."""
    reason = unusable(device, dtype)
    if reason and torch.cuda.is_available():
        message = f"Triton kernels unavailable, using the slower torch ones: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return reason is None
