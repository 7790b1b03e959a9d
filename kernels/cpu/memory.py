"""How fast this machine reads memory: a plain vectorised read, the bound that kernels are held against."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.library import library


def read(x: torch.Tensor) -> None:
    """Load every byte of a contiguous CPU tensor once, on torch.get_num_threads() threads. Raises
    ValueError."""
    if not x.is_cpu or not x.is_contiguous():
        raise ValueError("read: needs a contiguous tensor on the CPU")
    total = ctypes.c_float()
    library().bm_read(
        x.data_ptr(), x.numel() * x.element_size() // 4, ctypes.addressof(total), torch.get_num_threads()
    )
