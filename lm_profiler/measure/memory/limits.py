"""Reads how much memory the limits of control groups and ``ulimit`` leave to this process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_MOUNTED, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("", "memory.max", "memory.current", "")
# names of file pages in ``memory.stat``, which the kernel reclaims before it refuses memory
_GIVEN_BACK = ("active_file", "inactive_file")


def left_bytes() -> int | None:
    """Return the bytes that the strictest limit leaves; None without a limit."""
    return min((left for left in (*_groups(), _address_space()) if left is not None), default=None)


def _groups() -> Iterator[int | None]:
    """Yield what is left in this process's control group and in each one above it (cgroups(7))."""
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:  # no Linux
        return
    # A scheduler nests its jobs several groups deep, and may set the limit at any level.
    for number, controllers, path in lines:
        if number == "0" or "memory" in controllers.split(","):
            kind = _V2 if number == "0" else _V1
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):  # a container sees only the part that is mounted
                yield _left(_MOUNTED / kind[0] / group, *kind[1:])


def _left(group: Path, limit: str, used: str, prefix: str) -> int | None:
    try:
        most, now = (int((group / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not there, or "max"
        return None
    return max(most - now + sum(int(stat.get(prefix + kind, 0)) for kind in _GIVEN_BACK), 0)


def _address_space() -> int | None:
    """Return what ``ulimit -v`` leaves of the address space; None without that limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if most == resource.RLIM_INFINITY else max(most - int(psutil.Process().memory_info().vms), 0)
