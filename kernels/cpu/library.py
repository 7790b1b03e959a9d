"""The compiled kernels through ctypes: signatures, and the one place that decides whether they are there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from dataclasses import dataclass

import torch

from kernels.cpu.build import BuildError, CacheError, build
from kernels.cpu.isa import candidates

DTYPES = (torch.float32, torch.bfloat16)

_int, _i32, _i64, _f32, _ptr = ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "bm_paged_attention": [_int, _ptr, _i64, _ptr, _ptr, _ptr, _ptr, _ptr, _i32, _ptr, _i64]
    + [_i32] * 7
    + [_f32, _i32, _i32, _i32],
    "bm_supported": [],
    "bm_read": [_ptr, _i64, _ptr, _i32],
    "bm_write_kv": [_int, _ptr, _i64, _ptr, _i64, _ptr, _ptr, _ptr, _i64, _i32, _i32, _i32, _i64, _i32],
    "bm_rms_norm": [_int, _ptr, _i64, _i64, _ptr, _i64, _ptr, _ptr, _i64, _i64, _i64, _i32, _i32, _f32, _i32],
    "bm_rope_write_kv": [_int]
    + [_ptr, _i64] * 3
    + [_ptr, _ptr, _i64, _ptr, _ptr, _ptr, _ptr, _i64]
    + [_i32] * 4
    + [_i64, _i32, _i32],
    "bm_linear_way": [_int],
    "bm_linear_pack": [_int, _ptr, _i64, _i64, _int, _ptr],
    "bm_linear": [_int, _ptr, _i64, _ptr, _ptr, _ptr] + [_i64] * 4 + [_i32] * 2,
    "bm_argmax": [_int, _ptr, _i64, _ptr, _i64, _i64, _i32],
    "bm_layers": [_ptr, _ptr, _ptr],
    "bm_silu_mul": [_int, _ptr, _i64, _ptr, _i64, _i32, _i32],
}


@dataclass(frozen=True)
class Library:
    """The functions of one compiled library, typed, and the instruction set that it was compiled for."""

    isa: str
    functions: ctypes.CDLL


@functools.cache
def load(isa: str) -> Library:
    """The library for one of kernels.cpu.isa.ISAS; compiled when it is not in the cache yet. Raises
    BuildError.

    torch is imported first, so its OpenMP runtime serves our parallel regions as well: one pool of
    threads."""
    path = build(isa)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # so that a damaged file does not outlive its cause
        raise BuildError(f"cannot load the compiled kernels: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    loaded.bm_linear_size.argtypes, loaded.bm_linear_size.restype = [_i64, _i64, _int], _i64
    if loaded.bm_supported():
        raise BuildError(f"the system does not let this process use {isa}")
    return Library(isa, loaded)


@functools.cache
def best() -> Library:
    """The library that serves this process: the first of kernels.cpu.isa.candidates that compiles. Raises
    BuildError, and ValueError for a setting that cannot hold."""
    errors = []
    for isa in candidates():
        try:
            return load(isa)
        except CacheError:
            raise
        except BuildError as error:
            errors.append(error)
    raise errors[-1]


def library() -> ctypes.CDLL:
    """The functions of `best()`."""
    return best().functions


@functools.cache
def available() -> bool:
    """Whether the C++ kernels run here. Where they do not, warns once and says why."""
    try:
        best()
    except BuildError as error:
        message = f"C++ kernels unavailable, using the slower torch ones: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
