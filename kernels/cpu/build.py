"""Compile the C++ kernels on first use, once per (source, instruction set, compiler), into the user's cache.

The library goes to $BATCHMARK_CACHE/kernels/<digest>/ (default ~/.cache/batchmark). Two processes may
compile at once: each writes a file of its own and renames it into place. It ends with a checksum of itself,
and one that is not whole is compiled again: mapping half a library would end the process with SIGBUS. $CXX
names the compiler, with arguments if need be ("ccache g++"); else g++, c++ and clang++ are tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from kernels.cpu.isa import ISAS, NATIVE, machine

SOURCE = Path(__file__).parent
SOURCES = ("attention.cpp", "fused.cpp", "layers.cpp", "linear.cpp", "read.cpp")
HEADERS = ("calls.h", "layout.h", "simd.h", "rows.h", "rows_vector.h", "rows_matrix.h", "rows_few.h")
# -mtune=generic: compilers that do not know the newest CPU tune 512-bit code for its predecessors (8 % here).
# -ffp-contract stays at the compiler's default: a product that is added at once becomes one fused operation.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-mtune=generic",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wno-psabi",
)
LIBRARY = "libbatchmark_kernels.so"
SCRATCH = "tmp"
"""What names of libraries begin with that are being written."""
TIMEOUT_S = 300
LEAST_FREE = 4 << 20
"""Bytes of disk: with less than that left, a compiler that failed has failed for want of room."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here. The message is one line that says why."""


class CacheError(BuildError):
    """No instruction set can be compiled here: there is no place to put the library."""


def cache_dir() -> Path:
    """Where compiled kernels are kept."""
    root = os.environ.get("BATCHMARK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "batchmark") / "kernels"


def find_compiler() -> list[str]:
    """The command that runs the C++ compiler: its path, and the arguments that $CXX gives it. Raises
    BuildError."""
    named = os.environ.get("CXX")
    try:
        commands = [shlex.split(named)] if named else [["g++"], ["c++"], ["clang++"]]
    except ValueError as error:
        raise BuildError(f"CXX={named}: {error}") from None
    for command in commands:
        path = shutil.which(command[0]) if command else None
        if path:
            return [path, *command[1:]]
    raise BuildError(f"CXX={named}: no such compiler" if named else "no C++ compiler in PATH")


def build(isa: str) -> Path:
    """The library compiled for one of kernels.cpu.isa.ISAS: from the cache, or compiled now (some
    seconds). Raises BuildError."""
    compiler = find_compiler()
    directory = cache_dir() / _digest(compiler, isa)
    library = directory / LIBRARY
    if _is_whole(library):
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory.parent)
        handle, name = tempfile.mkstemp(prefix=SCRATCH, suffix=".so", dir=directory)
        os.close(handle)
    except OSError as error:
        raise CacheError(f"cannot write {directory}: {error.strerror}; set BATCHMARK_CACHE") from error
    scratch = Path(name)
    try:
        _run([*compiler, *FLAGS, *ISAS[isa].flags, *(str(SOURCE / source) for source in SOURCES), "-o", name])
        _seal(scratch)
        scratch.chmod(0o755)
        scratch.replace(library)
    except (BuildError, OSError) as error:
        if shutil.disk_usage(directory).free < LEAST_FREE:
            raise CacheError(
                f"no room in {directory} for the compiled kernels; set BATCHMARK_CACHE"
            ) from error
        if isinstance(error, OSError):
            raise CacheError(f"cannot write {library}: {error.strerror}; set BATCHMARK_CACHE") from error
        raise
    finally:
        scratch.unlink(missing_ok=True)
    return library


def _seal(library: Path) -> None:
    """Append the checksum; loaders pass over what follows the last section."""
    with library.open("ab") as file:
        file.write(hashlib.sha256(library.read_bytes()).digest())


def _is_whole(library: Path) -> bool:
    size = hashlib.sha256().digest_size
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _sweep(folder: Path) -> None:
    """Remove what compilations have left that were killed."""
    for left in folder.glob(f"*/{SCRATCH}*.so"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * TIMEOUT_S:
                left.unlink()


def _digest(compiler: list[str], isa: str) -> str:
    flags = " ".join((*FLAGS, *ISAS[isa].flags))
    parts = [
        _run([*compiler, "--version"]),
        *compiler,
        flags,
        machine() if isa == NATIVE else platform.machine(),
    ]
    parts += [(SOURCE / name).read_text() for name in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        message = lines[0] if lines else "no message"
        raise BuildError(f"{command[0]} failed with exit {done.returncode}: {message}")
    return done.stdout
