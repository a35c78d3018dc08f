"""Keeps this process from changing files, so that the run that is rehearsed finds them as they were.

Python calls audit hooks before it opens or changes a file, and an exception of a hook prevents it. A hook cannot be
removed. Libraries that write without Python are not seen, except ``torch.save``; neither are other programs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES_ONE = {"os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime"}
_CHANGES_TWO = {"os.rename", "os.link", "os.symlink"}
# events whose second argument is the descriptor of an open folder, or -1: ``shutil.rmtree`` removes so
_IN_A_FOLDER = {"os.remove", "os.rmdir"}

_TEMPORARY = {"tempfile.mkstemp", "tempfile.mkdtemp"}
# variables that name the caches of libraries, which make missing files again
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")


class WouldChange(PermissionError):
    """Raised instead of changing a file: as on a read-only disk, with which many programs can cope."""


def leave_files() -> None:
    """For the rest of this process allow writes only to its own temporary files and to caches."""
    free = {Path(home).resolve() for home in ("/dev", "/proc", *(os.environ.get(name) or "/dev" for name in _CACHES))}
    free.add(Path("~/.cache").expanduser().resolve())

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in _TEMPORARY:
            free.add(Path(given[0]).resolve())  # a new name, so nobody else's file
        elif (event == "open" and _writes(*given)) or event in _CHANGES_ONE:
            within = given[1] if event in _IN_A_FOLDER else -1
            _check(given[0], free, "." if within == -1 else f"/proc/self/fd/{within}")
        elif event in _CHANGES_TWO:
            _check(given[0], free)
            _check(given[1], free)

    tempfile.gettempdir()  # finds its folder by writing into candidates once: before the hook
    sys.addaudithook(hook)
    torch.save = _save


def _writes(named: Any, mode: Any, flags: int | None) -> bool:
    """Return whether the file is opened for writing. Not so a folder, which ``tempfile`` names
    where it opens a file in it with an opener."""
    return bool((flags or 0) & _WRITES) and not (isinstance(named, (str, bytes)) and Path(os.fsdecode(named)).is_dir())


def _check(named: Any, free: set[Path], within: str = ".") -> None:
    if not isinstance(named, (str, bytes)):  # a file that is open
        return
    path = Path(within, os.fsdecode(named)).resolve()
    if free.isdisjoint((path, *path.parents)) and "__pycache__" not in path.parts:
        raise _refused(path.name)


def _save(obj: object, f: Any, *_: Any, **__: Any) -> None:
    """Replace ``torch.save``, which writes without Python: refuse."""
    raise _refused(Path(f).name if isinstance(f, (str, os.PathLike)) else "a file")


def _refused(name: str) -> WouldChange:
    return WouldChange(f"it would write {name!r}, which is left to the run")
