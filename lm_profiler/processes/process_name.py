"""Names a process so that others can ask later whether it still runs, also one whose number another got since."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil

_APART_S = 5.0  # how far two readings of one process's begin may be apart, where the time of day was set meanwhile


def process_name() -> str:
    """Return the host, the namespace of process numbers (a container has its own), the number, and when it began."""
    return f"{_where()} {os.getpid()} {psutil.Process().create_time():.0f}"


def is_gone(name: str) -> bool:
    """Return whether the process of this ``process_name`` has ended; False where it ran elsewhere or has no name."""
    where, _, known = name.partition(" ")
    if where != _where():
        return False
    number, began_s = known.split()
    with suppress(psutil.Error):
        process = psutil.Process(int(number))
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return zombie or abs(process.create_time() - float(began_s)) > _APART_S
    return True


def _where() -> str:
    namespace = ""
    with suppress(OSError):  # not Linux
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}/{namespace}"
