"""Reads the allocator's history and counters, and why an allocation failed."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lm_profiler.measure.boundary import message_of
from lm_profiler.measure.memory.peaks import available_bytes, free_and_total
from lm_profiler.record.files import write_whole
from lm_profiler.record.run_record import AllocatorReading, OutOfMemory
from lm_profiler.torch_names import HISTORY, RECORD_HISTORY


@dataclass(eq=False)
class MemoryHistory:
    """Records every allocation on CUDA with its Python stack, for https://pytorch.org/memory_viz.

    Recording costs microseconds per allocation, so it has its own stage. C++ frames are left out: resolving them
    makes a dump a hundred times slower.
    """

    record: Callable[..., object]  # torch's function that starts and stops recording
    # returns what was recorded, for all devices of this process
    snapshot: Callable[[], object]
    # the number of last events that are kept, at several KB of host memory each
    max_entries: int = 100_000
    _is_recording: bool = field(default=False, init=False)

    def start(self) -> None:
        """Record from now on what allocates and frees memory, with Python's stacks."""
        self.record(
            enabled="all", context="all", stacks="python", max_entries=self.max_entries
        )
        self._is_recording = True

    def dump(self, path: Path) -> Any:
        """Write what was recorded to ``path``, whole or not at all, and return it; works even when out of memory."""
        recorded = self.snapshot()
        write_whole(path, pickle.dumps(recorded))
        return recorded

    def stop(self) -> None:
        if self._is_recording:
            self._is_recording = False
            self.record(enabled=None)


def memory_history_of(device: torch.device) -> MemoryHistory | None:
    """Return a recorder for ``device``; None if the allocator keeps no history (only CUDA's does)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    record = RECORD_HISTORY.find_or(None)
    snapshot = HISTORY.find_or(None)
    if record is None or snapshot is None:
        return None
    return MemoryHistory(record, snapshot)


def allocator_facts(device: torch.device) -> AllocatorReading | None:
    """Return the state of ``device``'s allocator; None without one. Call it between stages, before peaks are reset."""
    if device.type == "cpu":
        return None
    try:
        stats = torch.accelerator.memory_stats(device)
    except (AttributeError, RuntimeError):
        return None
    free, total = free_and_total(device) or (0, None)
    return facts_of(stats, None if total is None else total - free)


# the pool id in torch's snapshot of a segment that belongs to no graph and to no pool of a user
_NO_POOL = (0, 0)


def graph_pool_bytes(device: torch.device) -> int | None:
    """Return the bytes that ``device``'s allocator keeps for CUDA graphs; None if it keeps none.

    A graph's replay uses this memory without the allocator, whose allocated bytes and peaks leave it out. A user's pool
    (``torch.cuda.MemPool``) is numbered like a graph's, and is in the sum. CUDA's own allocator (cudaMallocAsync) has
    no such pools, and no snapshot.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    pool_bytes = 0
    for segment in torch.cuda.memory_snapshot():
        is_on_device = segment["device"] == device.index
        is_in_pool = tuple(segment["segment_pool_id"]) != _NO_POOL
        if is_on_device and is_in_pool:
            pool_bytes += segment["total_size"]
    return pool_bytes or None


def facts_of(stats: Mapping[str, Any], driver_used: int | None) -> AllocatorReading:
    """Return torch's ``memory_stats`` as a record.

    ``fragmentation`` is the peak of reserved memory minus the peak of allocated memory. The two may be of different
    instants, so it is the most memory that can have been reserved but not allocated when allocated memory peaked.
    Blocks that the allocator keeps for reuse are included.
    """
    allocated = stats.get("allocated_bytes.all.peak")
    reserved = stats.get("reserved_bytes.all.peak")
    fragmentation = None
    if allocated is not None and reserved is not None:
        fragmentation = reserved - allocated
    # CUDA's own allocator (cudaMallocAsync) leaves at zero the counts that only torch's has: they are unknown then.
    requested = stats.get("requested_bytes.all.peak")
    lacks_torchs_counts = bool(allocated) and not requested
    torchs_counts = {} if lacks_torchs_counts else stats
    return AllocatorReading(
        allocated_peak=allocated,
        requested_peak=torchs_counts.get("requested_bytes.all.peak"),
        active_peak=stats.get("active_bytes.all.peak"),
        reserved_peak=reserved,
        inactive_split_peak=torchs_counts.get("inactive_split_bytes.all.peak"),
        fragmentation=fragmentation,
        driver_used=driver_used,
        alloc_retries=torchs_counts.get("num_alloc_retries"),
        ooms=torchs_counts.get("num_ooms"),
    )


_SIZE = r"([\d.]+) (bytes|[KMGT]i?B)"
_UNITS = {"b": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MESSAGES = {  # messages of CUDA, HIP and XPU; then of cudaMallocAsync; then of MPS, the CPU's allocator and numpy
    "requested": rf"[Tt]ried to allocate {_SIZE}|Requested\s*: {_SIZE}|Unable to allocate {_SIZE}",
    "free": rf"of which {_SIZE} is free|Free \(according to CUDA\)\s*: {_SIZE}",
    "total": rf"total capacity of {_SIZE}|Device limit\s*: {_SIZE}",
    "allocated": rf"{_SIZE} is allocated by PyTorch|Currently allocated\s*: {_SIZE}|MPS allocated: {_SIZE}",
    "fragmented": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "allowed": rf"{_SIZE} allowed;|max allowed: {_SIZE}",
}
# The CPU's allocator raises a plain RuntimeError; CUDA's has its own type. cuBLAS and cuDNN name their status.
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that memory ran out, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = message_of(error).lower()
    return any(words in message for words in _OUT_OF_MEMORY)


def oom_cause(error: BaseException, device: torch.device) -> OutOfMemory | None:
    """Return the sizes in the message of an out-of-memory error, with two decimals; None for any other error.

    On the CPU free and total memory are read now, since the error lacks them: the failed allocation took none.
    """
    if not is_out_of_memory(error):
        return None
    message = message_of(error)
    sizes = {
        name: _size_in_message(pattern, message) for name, pattern in _MESSAGES.items()
    }
    if device.type == "cpu":
        sizes["free"] = available_bytes(device)
        sizes["total"] = int(psutil.virtual_memory().total)
    return OutOfMemory(**sizes)


def _size_in_message(pattern: str, message: str) -> int | None:
    """Return the bytes that ``pattern`` finds in ``message``: a number and its unit; None if it finds nothing."""
    match = re.search(pattern, message)
    if match is None:
        return None
    # Of the alternatives in the pattern, one has matched; the groups of the others are None.
    number, unit = (group for group in match.groups() if group is not None)
    return round(float(number) * 1024.0 ** _UNITS[unit[0]])
