"""Files that appear whole or not at all, and folders that no second run can take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex


def write_whole(path: Path, content: str | bytes, private: bool = False) -> None:
    """Write ``content`` (text as UTF-8) aside and rename it to ``path``, so that no reader ever sees half a file.

    A link stays one: what it points to is written. What is there and no plain file, a pipe or a device, is written
    into, and never replaced. What is ``private`` can be read by its owner only.

    Raises:
        OSError: the folder cannot be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    aside = target.with_name(f".{target.name}.{token_hex(4)}")
    try:
        aside.touch(0o600 if private else 0o666, exist_ok=False)
        aside.write_bytes(data)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def claim_run_dir(parent: Path) -> Path:
    """Make the first free ``version_<n>`` below ``parent``; ``mkdir`` decides who of two runs gets it.

    Raises:
        OSError: ``parent`` cannot be made or written to.
    """
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(p.name[8:]) for p in parent.glob("version_*") if p.name[8:].isdecimal()]
    number = max(taken, default=-1) + 1
    while True:
        with suppress(FileExistsError):
            (folder := parent / f"version_{number}").mkdir()
            return folder
        number += 1


def from_here(path: Path) -> Path:
    """``path`` as a person in the current folder would write it: relative where it lies below."""
    try:
        return path.relative_to(Path.cwd())
    except (OSError, ValueError):  # the current folder is gone; or it lies elsewhere
        return path
