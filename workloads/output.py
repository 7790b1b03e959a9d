"""Files that the commands write: refused before the work begins, then there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from workloads.errors import WorkloadError

_unfinished: set[Path] = set()


def refuse(option: str, path: str | Path | None, *, replace: bool = False) -> None:
    """Raises WorkloadError for a path that `write` could not write to, so that nobody waits for a fit that
    then has no place. None is no path."""
    if path is None:
        return
    path = Path(path)
    try:
        there = path.exists()
        if there and not (replace and path.is_file()):
            kind = "exists" if path.is_file() else "is a folder" if path.is_dir() else "is no regular file"
            advice = "; remove it or choose another name" if path.is_file() else "; needs the name of a file"
            raise WorkloadError(f"{option}={path}: {kind}{advice}")
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(0, f"{folder} is no folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, f"no permission in {folder}")
    except WorkloadError:
        raise
    except (OSError, ValueError) as exc:  # a name may be too long, or have a null byte
        raise _cannot(option, path, exc) from exc


def write(option: str, path: str | Path, fill: Callable[[Path], object], *, replace: bool = False) -> None:
    """Let `fill` write a file beside `path`, then give it that name; folders are made. Raises WorkloadError,
    which leaves nothing behind."""
    refuse(option, path, replace=replace)
    path = Path(path)
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    _unfinished.add(partial)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fill(partial)
        if not replace and path.exists():  # another command has been faster
            raise WorkloadError(f"{option}={path}: exists; remove it or choose another name")
        os.replace(partial, path)
    except OSError as exc:
        raise _cannot(option, path, exc) from exc
    finally:
        partial.unlink(missing_ok=True)
        _unfinished.discard(partial)


def whole(path: Path, data: bytes) -> None:
    """Replace a file in one rename: a reader sees the old one or the new one, and nothing is left behind. A
    device, a pipe or a folder is not replaced. Raises OSError, whose filename is the path."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk names no file


def write_text(option: str, path: str | Path, text: str, *, replace: bool = False) -> None:
    """`write` for text, as UTF-8; a file's name that is no UTF-8 appears in it with escapes."""
    data = text.encode("utf-8", "backslashreplace")
    write(option, path, lambda partial: partial.write_bytes(data), replace=replace)


def clean() -> None:
    """Remove what has not been finished: for a signal, on the way out."""
    while _unfinished:
        _unfinished.pop().unlink(missing_ok=True)


def _cannot(option: str, path: Path, exc: Exception) -> WorkloadError:
    reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
    return WorkloadError(f"{option}={path}: cannot be written ({reason})")
