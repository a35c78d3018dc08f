"""Reads peak memory, of a device's allocator or of the process, and how much memory is left."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from resource import RUSAGE_SELF, getrusage
from typing import Any

import psutil
import torch

from lm_profiler.measure.clocks.tape import OUTSIDE
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import UNKNOWN, Peaks, largest

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in a unit of getrusage(2)'s maximum resident set size


class Probe:
    """Reads peak memory since the last reset, and what tensors hold now where that is known."""

    resettable = True  # whether peaks count from the last reset on; otherwise from the beginning of the process
    # the allocator's retries (how often it emptied its cache) and segments (how often it asked the driver for memory)
    # up to the last reading; empty if it has no such counts
    counts: Sequence[int] = ()

    def usage(self) -> Any:
        """Return the process's resource usage, as getrusage(2) has it."""
        return getrusage(RUSAGE_SELF)

    def reset(self) -> None:
        """Restart the peaks at the bytes held now."""

    def peaks(self) -> Peaks:
        """Return the peaks since the last reset, for each of ``MEMORY``."""
        raise NotImplementedError

    def held(self) -> int | None:
        """Return the bytes that tensors hold now; None if the allocator does not report it, as on the CPU."""
        return None


@dataclass(eq=False)
class DeviceProbe(Probe):
    """Reads the caching allocator of ``device``.

    On CUDA it reads the nested statistics, which takes a few microseconds; the flat dictionary of ``memory_stats``
    takes ten times that, too long for each step.
    """

    device: torch.device

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peaks(self) -> Peaks:
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            if not stats:  # nothing was allocated yet
                return 0, 0, None
            self.counts = stats["num_alloc_retries"], stats["num_device_alloc"]
            return stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"], None
        allocator = torch.accelerator
        return allocator.max_memory_allocated(self.device), allocator.max_memory_reserved(self.device), None

    def held(self) -> int | None:
        return torch.accelerator.memory_allocated(self.device)


class ProcessProbe(Probe):
    """Reads the process's peak resident memory since it began.

    Linux could reset that peak (proc(5), ``clear_refs``), but a user's own code may report it. ``getrusage`` takes a
    microsecond, but a process that a larger one started inherits that one's peak, which survives fork and exec
    (getrusage(2)). Then ``VmHWM`` is read, which takes twenty times as long.
    """

    _STATUS = Path("/proc/self/status")

    resettable = False

    def __init__(self) -> None:
        self._usage: Any = None
        own = self._own_peak()
        # Both count pages at slightly different times: 1 MiB of difference is no inherited peak.
        self._inherits = own is not None and getrusage(RUSAGE_SELF).ru_maxrss * _RSS_UNIT > own + 2**20

    def usage(self) -> Any:
        """Return the resource usage of the process; the reading of the last ``peaks`` is returned once."""
        usage, self._usage = self._usage, None  # within training a system call costs several microseconds
        return getrusage(RUSAGE_SELF) if usage is None else usage

    def reset(self) -> None:
        """Discard the last reading; the peak cannot be reset."""
        self._usage = None

    def peaks(self) -> Peaks:
        if self._inherits:
            return None, None, self._own_peak()
        usage = self._usage = getrusage(RUSAGE_SELF)
        return None, None, usage.ru_maxrss * _RSS_UNIT

    def _own_peak(self) -> int | None:
        if not self._STATUS.exists():  # not Linux
            return None
        for line in self._STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


def probe_of(device: torch.device) -> Probe:
    """Return the probe of ``device``'s allocator; if it has none, the probe of the process."""
    if device.type == "cpu":
        return ProcessProbe()
    probe = DeviceProbe(device)
    try:
        probe.peaks()
    except (AttributeError, RuntimeError):
        return ProcessProbe()
    return probe


class PartPeaks:
    """Finds the peak memory of each part of a step: an observer that reads and resets the peak at each mark.

    Where peaks cannot be reset, a part's peak is known only if it exceeds all before it. Reading takes too long for a
    timed step, so this runs in the ``memory`` stage.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._peaks: dict[int, Peaks] = {}
        self._part: int | None = None
        self._whole = self._before = UNKNOWN

    def __call__(self, code: int) -> None:
        if self._part is not None and self._part != OUTSIDE:
            peaks = self._probe.peaks()
            self._whole = largest((self._whole, peaks))
            if self._probe.resettable or peaks != self._before:
                self._peaks[self._part] = largest((self._peaks.get(self._part, UNKNOWN), peaks))
        self._part = code
        self._probe.reset()
        if not self._probe.resettable:
            self._before = self._probe.peaks()

    def take_step(self) -> Peaks:
        """Return the peaks of the step that has just ended."""
        whole, self._whole, self._part = self._whole, UNKNOWN, None
        return whole

    def by_part(self) -> dict[str, Peaks]:
        """Return the peaks of each part whose peak is known, over all observed steps."""
        return {part: self._peaks[code] for code, part in enumerate(PARTS) if code in self._peaks}


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that a run could take on ``device`` now; on the CPU within the limits of this process."""
    if device.type != "cpu":
        known = free_and_total(device)
        return None if known is None else known[0]
    available, left = int(psutil.virtual_memory().available), left_bytes()
    return available if left is None else min(available, left)


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return free and total bytes of ``device`` from its driver; None if it does not report them."""
    try:
        free, total = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, RuntimeError):
        return None
    return free, total


_MOUNTED, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# per version of control groups: folder, files of the limit and of the usage, prefix in ``memory.stat``
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("", "memory.max", "memory.current", "")
# names of file pages in ``memory.stat``, which the kernel reclaims before it refuses memory
_GIVEN_BACK = ("active_file", "inactive_file")


def left_bytes(mounted: Path = _MOUNTED, own: Path = _OWN) -> int | None:
    """Return the bytes that the strictest limit (control groups, ``ulimit -v``) leaves; None without a limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    addresses = None if most == resource.RLIM_INFINITY else max(most - int(psutil.Process().memory_info().vms), 0)
    return min((left for left in (*_groups(mounted, own), addresses) if left is not None), default=None)


def _groups(mounted: Path, own: Path) -> Iterator[int | None]:
    """Yield what is left in this process's control group and in each one above it (cgroups(7))."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # no Linux
        return
    # A scheduler nests its jobs several groups deep, and may set the limit at any level.
    for number, controllers, path in lines:
        if number == "0" or "memory" in controllers.split(","):
            kind = _V2 if number == "0" else _V1
            innermost = PurePosixPath(path.lstrip("/"))
            for group in (innermost, *innermost.parents):  # a container sees only the part that is mounted
                yield _left(mounted / kind[0] / group, *kind[1:])


def _left(group: Path, limit: str, used: str, prefix: str) -> int | None:
    try:
        most, now = (int((group / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(most - now + sum(int(stat.get(prefix + kind, 0)) for kind in _GIVEN_BACK), 0)
