"""A process that leaves files as they are: the run that is rehearsed finds what it would have found without.

Python tells its audit hooks before it opens or changes a file, and what a hook raises stops it. A hook cannot be taken
away again. Libraries that write without Python are not heard, but for ``torch.save``; neither are other programs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OF_ONE = {"os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime"}
_OF_TWO = {"os.rename", "os.link", "os.symlink"}
_IN_A_FOLDER = {"os.remove", "os.rmdir"}
"""Whose second argument is an open folder, or -1: so whole folders are removed."""

_TEMPORARY = {"tempfile.mkstemp", "tempfile.mkdtemp"}
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")
"""Variables that name folders of libraries whose files are made again wherever they are missing."""


class WouldChange(PermissionError):
    """As on a disk that cannot be written to, which many programs can do with."""


def leave_files() -> None:
    """From now on, for the rest of this process: nothing is written but temporary files of its own, and caches."""
    free = {Path(home).resolve() for home in ("/dev", "/proc", *(os.environ.get(name) or "/dev" for name in _CACHES))}
    free.add(Path("~/.cache").expanduser().resolve())

    def heard(event: str, given: tuple[Any, ...]) -> None:
        if event in _TEMPORARY:
            free.add(Path(given[0]).resolve())  # its name is nobody else's
        elif (event == "open" and _writes(*given)) or event in _OF_ONE:
            within = given[1] if event in _IN_A_FOLDER else -1
            _check(given[0], free, "." if within == -1 else f"/proc/self/fd/{within}")
        elif event in _OF_TWO:
            _check(given[0], free)
            _check(given[1], free)

    tempfile.gettempdir()  # it tries folders by writing into them, once
    sys.addaudithook(heard)
    torch.save = _save


def _writes(named: Any, mode: Any, flags: int | None) -> bool:
    """A folder cannot be written to: ``tempfile`` names one where it opens a file by a function of its own."""
    return bool((flags or 0) & _WRITES) and not (isinstance(named, (str, bytes)) and Path(os.fsdecode(named)).is_dir())


def _check(named: Any, free: set[Path], within: str = ".") -> None:
    if not isinstance(named, (str, bytes)):  # a file that is open
        return
    path = Path(within, os.fsdecode(named)).resolve()
    if free.isdisjoint((path, *path.parents)) and "__pycache__" not in path.parts:
        raise _refused(path.name)


def _save(obj: object, f: Any, *_: Any, **__: Any) -> None:
    """In the place of ``torch.save``: tensors without data are not worth a file."""
    raise _refused(Path(f).name if isinstance(f, (str, os.PathLike)) else "a file")


def _refused(name: str) -> WouldChange:
    return WouldChange(f"it would write {name!r}, which is left to the run")
