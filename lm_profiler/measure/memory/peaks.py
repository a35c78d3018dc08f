"""Reads peak memory, of a device's allocator or of the process, and how much memory is available."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

import psutil
import torch

from lm_profiler.measure.clocks.tape import OUTSIDE
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import UNKNOWN, Peaks, largest_peaks

# bytes in a unit of getrusage(2)'s maximum resident set size
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_PROCESS_STATUS = Path("/proc/self/status")  # only on Linux


class Probe:
    """Reads peak memory since the last reset, and the bytes that tensors hold now if they are known."""

    resettable = True  # whether peaks count from the last reset on; otherwise from the start of the process
    # how often the allocator has emptied its cache (retries), and taken memory from the driver (segments), up to the
    # last reading; empty if it does not count that
    counts: Sequence[int] = ()

    def usage(self) -> Any:
        """Return the process's resource usage, as getrusage(2) returns it."""
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

    On CUDA it reads the nested statistics, which takes a few microseconds. The flat dictionary of ``memory_stats``
    takes ten times as long, which is too long for each step.
    """

    device: torch.device

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peaks(self) -> Peaks:
        """Return the peaks of allocated and reserved bytes. The third value, for resident memory, is None here."""
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            if not stats:  # nothing was allocated yet
                return 0, 0, None
            self.counts = stats["num_alloc_retries"], stats["num_device_alloc"]
            return (
                stats["allocated_bytes"]["all"]["peak"],
                stats["reserved_bytes"]["all"]["peak"],
                None,
            )
        allocated_bytes = torch.accelerator.max_memory_allocated(self.device)
        reserved_bytes = torch.accelerator.max_memory_reserved(self.device)
        return allocated_bytes, reserved_bytes, None

    def held(self) -> int | None:
        return torch.accelerator.memory_allocated(self.device)


class ProcessProbe(Probe):
    """Reads the process's peak resident memory since it began.

    Linux could reset that peak (proc(5), ``clear_refs``), but the user's own code may report it. ``getrusage`` takes a
    microsecond, but its peak survives fork and exec (getrusage(2)): a process inherits the peak of a larger process
    that started it. In that case ``VmHWM`` is read, which takes twenty times as long.
    """

    resettable = False

    def __init__(self) -> None:
        self._usage: Any = None
        self._inherits_peak = False
        peak_bytes = self._status_peak()
        if peak_bytes is not None:
            reported_bytes = getrusage(RUSAGE_SELF).ru_maxrss * _RSS_UNIT
            # The two are updated at slightly different times, so a difference of 1 MiB is no inherited peak.
            self._inherits_peak = reported_bytes > peak_bytes + 2**20

    def usage(self) -> Any:
        """Return the resource usage of the process.

        After ``peaks``, return its reading once: within training a system call costs several microseconds.
        """
        usage = self._usage
        self._usage = None
        if usage is None:
            return getrusage(RUSAGE_SELF)
        return usage

    def reset(self) -> None:
        """Discard the last reading; the peak cannot be reset."""
        self._usage = None

    def peaks(self) -> Peaks:
        """Return None for the peaks of an allocator, and the peak of resident memory."""
        if self._inherits_peak:
            return None, None, self._status_peak()
        self._usage = getrusage(RUSAGE_SELF)
        return None, None, self._usage.ru_maxrss * _RSS_UNIT

    def _status_peak(self) -> int | None:
        """Return the process's own peak in bytes, as the kernel's file of its status has it."""
        return _read_sizes(["VmHWM"]).get("VmHWM")


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

    If peaks cannot be reset, a part's peak is known only if it exceeds all previous ones. Reading takes too long for a
    timed step, so this runs in the ``memory`` stage.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._peaks: dict[int, Peaks] = {}
        # the current part; None before a step's first mark
        self._part: int | None = None
        self._step_peaks = UNKNOWN
        # the peaks when the current part began, if they cannot be reset
        self._peaks_at_begin = UNKNOWN

    def __call__(self, code: int) -> None:
        """Read the peak of the part that a mark ends, and restart it for the part ``code``, which begins."""
        if self._part is not None and self._part != OUTSIDE:
            peaks = self._probe.peaks()
            self._step_peaks = largest_peaks((self._step_peaks, peaks))
            # a peak that cannot be reset is of this part only if it has risen
            is_of_this_part = self._probe.resettable or peaks != self._peaks_at_begin
            if is_of_this_part:
                self._peaks[self._part] = largest_peaks(
                    (self._peaks.get(self._part, UNKNOWN), peaks)
                )
        self._part = code
        self._probe.reset()
        if not self._probe.resettable:
            self._peaks_at_begin = self._probe.peaks()

    def take_step(self) -> Peaks:
        """Return the peaks of the step that has just ended."""
        step_peaks = self._step_peaks
        self._step_peaks = UNKNOWN
        self._part = None
        return step_peaks

    def by_part(self) -> dict[str, Peaks]:
        """Return the peaks of each part whose peak is known, over all observed steps."""
        return {
            part: self._peaks[code]
            for code, part in enumerate(PARTS)
            if code in self._peaks
        }


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that a run could use on ``device`` now; on the CPU within the limits of this process."""
    if device.type != "cpu":
        memory = free_and_total(device)
        return None if memory is None else memory[0]
    available = int(psutil.virtual_memory().available)
    within_limits = left_bytes()
    if within_limits is None:
        return available
    return min(available, within_limits)


def unreclaimable_bytes(status_file: Path = _PROCESS_STATUS) -> int | None:
    """Return the resident bytes of this process except for those of mapped files; None if this is not Linux.

    The kernel drops the pages of files when memory is short, so reading a mapped file is no leak. Systems that do not
    count these pages have no ``RssFile``: there all resident bytes are returned.
    """
    sizes = _read_sizes(("VmRSS", "RssFile"), status_file)
    if "VmRSS" not in sizes:
        return None
    return sizes["VmRSS"] - sizes.get("RssFile", 0)


def bytes_below_peak(status_file: Path = _PROCESS_STATUS) -> int:
    """Return how much resident memory this process can add without a new peak; 0 if that is unknown."""
    sizes = _read_sizes(("VmRSS", "VmHWM"), status_file)
    if len(sizes) < 2:
        return 0
    return max(sizes["VmHWM"] - sizes["VmRSS"], 0)


def _read_sizes(
    names: Sequence[str], status_file: Path = _PROCESS_STATUS
) -> dict[str, int]:
    """Return the bytes of the quantities ``names`` in the kernel's file of a process's status, if it has them."""
    try:
        text = status_file.read_text()
    except OSError:  # not Linux, or the process has no file descriptor left
        return {}
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, amount = line.partition(":")
        if name in names:
            sizes[name] = int(amount.removesuffix("kB")) * 1024
    return sizes


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return free and total bytes of ``device`` from its driver; None if it does not report them."""
    try:
        free, total = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, RuntimeError):
        return None
    return free, total


_MOUNTED = Path("/sys/fs/cgroup")
_GROUPS_OF_PROCESS = Path("/proc/self/cgroup")


class _GroupVersion(NamedTuple):
    """The files in which a version of control groups reports the memory of a group."""

    folder: str
    limit: str  # name of a file, as is ``usage``
    usage: str
    prefix: str  # the prefix of names in ``memory.stat``


_V1 = _GroupVersion(
    folder="memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    prefix="total_",
)
_V2 = _GroupVersion(folder="", limit="memory.max", usage="memory.current", prefix="")
# names of file pages in ``memory.stat``, which the kernel reclaims before it refuses memory
_RECLAIMED = ("active_file", "inactive_file")


def left_bytes(
    mounted: Path = _MOUNTED, groups_file: Path = _GROUPS_OF_PROCESS
) -> int | None:
    """Return the bytes that the strictest limit (control groups, ``ulimit -v``) leaves; None without a limit."""
    bytes_left = list(_bytes_left_in_groups(mounted, groups_file))
    address_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_limit != resource.RLIM_INFINITY:
        used_addresses = int(psutil.Process().memory_info().vms)
        bytes_left.append(max(address_limit - used_addresses, 0))
    return min(bytes_left, default=None)


def _bytes_left_in_groups(mounted: Path, groups_file: Path) -> Iterator[int]:
    """Yield the bytes that each limit leaves: of this process's control group and of its ancestors (cgroups(7))."""
    try:
        lines = [line.split(":", 2) for line in groups_file.read_text().splitlines()]
    except OSError:  # no Linux
        return
    # A scheduler nests its jobs several groups deep, and may set the limit at any level.
    for number, controllers, path in lines:
        is_v2 = number == "0"
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        version = _V2 if is_v2 else _V1
        innermost = PurePosixPath(path.lstrip("/"))
        for group in (innermost, *innermost.parents):
            # In a container only a part of the hierarchy is mounted, so a folder may not exist.
            bytes_left = _bytes_left_in_group(mounted / version.folder / group, version)
            if bytes_left is not None:
                yield bytes_left


def _bytes_left_in_group(group: Path, version: _GroupVersion) -> int | None:
    """Return how many bytes a control group may still use; None if it has no limit."""
    try:
        limit_bytes = int((group / version.limit).read_text())
        used_bytes = int((group / version.usage).read_text())
        stat = dict(
            line.split() for line in (group / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):  # no such file, or "max"
        return None
    reclaimable_bytes = sum(
        int(stat.get(version.prefix + name, 0)) for name in _RECLAIMED
    )
    return max(limit_bytes - used_bytes + reclaimable_bytes, 0)
