"""Peak memory: of the device's allocator, and of the process in the machine's memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, ClassVar, Protocol

import torch

from lm_profiler.measure.clocks.timeline import OUTSIDE
from lm_profiler.measure.memory.limits import left_bytes
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import UNKNOWN, Peaks, largest

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes that getrusage(2) counts maximum resident set sizes in."""


@dataclass(eq=False)
class DeviceProbe:
    """The caching allocator of ``device``.

    On CUDA it reads the nested statistics, which costs a few microseconds; the flat dictionary of ``memory_stats``
    takes ten times that, too much for once a step. ``counts`` are retries and segments up to the last reading: how
    often the cache had to be given back before memory was found, and how often the driver was asked for some.
    """

    device: torch.device
    counts: Sequence[int] = ()
    resettable: ClassVar[bool] = True

    def usage(self) -> Any:
        """The process's, as getrusage(2) has it."""
        return getrusage(RUSAGE_SELF)

    def reset(self) -> None:
        """Peaks count from here on."""
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peaks(self) -> Peaks:
        """The most since the last reset, for each of ``MEMORY``."""
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            if not stats:  # nothing was allocated yet
                return 0, 0, None
            self.counts = stats["num_alloc_retries"], stats["num_device_alloc"]
            return stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"], None
        allocator = torch.accelerator
        return allocator.max_memory_allocated(self.device), allocator.max_memory_reserved(self.device), None

    def held(self) -> int | None:
        """Bytes that tensors hold now."""
        return torch.accelerator.memory_allocated(self.device)


class ProcessProbe:
    """The process's peak resident memory since it began.

    Linux could reset that peak (proc(5), ``clear_refs``), but it is the process's own: whoever trains may report it.

    ``getrusage`` costs a microsecond, but a process that was started by a larger one inherits that one's peak (it
    survives fork and exec, getrusage(2)): then ``VmHWM`` is read, for twenty times that.
    """

    _STATUS = Path("/proc/self/status")

    counts: Sequence[int] = ()
    resettable = False

    def __init__(self) -> None:
        self._usage: Any = None
        own = self._own_peak()
        self._inherits = own is not None and getrusage(RUSAGE_SELF).ru_maxrss * _RSS_UNIT > own + 2**20

    def usage(self) -> Any:
        """The process's, as getrusage(2) has it: what the last peaks were read from, if it is asked for but once."""
        usage, self._usage = self._usage, None  # amid a loop a system call costs several microseconds
        return getrusage(RUSAGE_SELF) if usage is None else usage

    def reset(self) -> None:
        """The peak goes on counting; what was read before is used no more."""
        self._usage = None

    def peaks(self) -> Peaks:
        """The most since the process began, for each of ``MEMORY``."""
        if self._inherits:
            return None, None, self._own_peak()
        usage = self._usage = getrusage(RUSAGE_SELF)
        return None, None, usage.ru_maxrss * _RSS_UNIT

    def held(self) -> None:
        """The CPU's allocator does not say, and pages of freed tensors may stay resident."""

    def _own_peak(self) -> int | None:
        if not self._STATUS.exists():  # not Linux
            return None
        for line in self._STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


class Probe(Protocol):
    """Reads the most memory held since the last reset, and what tensors hold now, where somebody counts it."""

    @property
    def resettable(self) -> bool:
        """Whether peaks count from the last reset on; otherwise from the beginning of the process."""

    @property
    def counts(self) -> Sequence[int]:
        """Retries and segments, where there are any."""

    def usage(self) -> Any:
        """The process's, as getrusage(2) has it."""

    def reset(self) -> None:
        """Peaks count from here on."""

    def peaks(self) -> Peaks:
        """The most since the last reset, for each of ``MEMORY``."""

    def held(self) -> int | None:
        """Bytes that tensors hold now."""


def probe_of(device: torch.device) -> Probe:
    """The probe that has a meaning on ``device``: its allocator's where it has one, else the process's."""
    if device.type == "cpu":
        return ProcessProbe()
    probe = DeviceProbe(device)
    try:
        probe.peaks()
    except (AttributeError, RuntimeError):
        return ProcessProbe()
    return probe


class PartPeaks:
    """Peak memory of each part of a step: an observer of marks that reads and resets at each one.

    Where peaks cannot be reset, that of a part is known only if it was above all before it. Reading costs too much for
    a timed step; it runs in the ``memory`` stage.
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
        """Peaks of the step that has just ended."""
        whole, self._whole, self._part = self._whole, UNKNOWN, None
        return whole

    def by_part(self) -> dict[str, Peaks]:
        """Peaks of each part that occurred and whose peak is known, over all steps observed."""
        return {part: self._peaks[code] for code, part in enumerate(PARTS) if code in self._peaks}


def available_bytes(device: torch.device) -> int | None:
    """Bytes that a run could take on ``device`` now; of the CPU, what this machine and the limits in it have left."""
    if device.type != "cpu":
        known = free_and_total(device)
        return None if known is None else known[0]
    import psutil

    available = int(psutil.virtual_memory().available)
    left = left_bytes()
    return available if left is None else min(available, left)


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Bytes of ``device`` as its driver says; None where it does not."""
    try:
        free, total = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, RuntimeError):
        return None
    return free, total
