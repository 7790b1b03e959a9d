"""Memory as the CPU sees it: a plain vectorised read, the bound that kernels are held against, and large
pages for what is read at random."""

from __future__ import annotations

import ctypes
import sys

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


def advise_huge_pages(x: torch.Tensor) -> None:
    """Ask Linux to back a CPU tensor that nobody wrote yet with large pages (2 MB on x86): blocks lie
    anywhere, and with small pages every other one misses the table of translations. A hint: where it cannot
    be followed, nothing changes."""
    if sys.platform != "linux":
        return
    page, advice = 2 << 20, 14  # MADV_HUGEPAGE
    start = -(-x.data_ptr() // page) * page
    length = (x.data_ptr() + x.numel() * x.element_size()) // page * page - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
