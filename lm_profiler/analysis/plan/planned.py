"""Decides whether a run fits into the memory of a device, from a rehearsal of its step and a table of GPUs."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import Any

from lm_profiler.analysis.hardware.peak_table import ROWS, Row
from lm_profiler.analysis.hardware.roofline import (
    Work,
    floor_of,
    matmul_dtype,
    rates_of,
)
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.run_record import (
    Floor,
    MemoryCauses,
    MemoryLevels,
    ModelFacts,
    Rates,
)
from lm_profiler.usage_error import UsageError, did_you_mean

# The share of a device's memory that the peak may take if the run is to count as fitting. The rest is for the driver's
# context, workspaces and fragmentation.
ROOM = 0.9

# the options on which the memory of a step depends; those of ``model`` are of our own models
SETTINGS = (
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "data.batch_size",
    "data.context_length",
    "model.size",
    "model.attention",
    "model.activation_checkpointing",
    "model.checkpoint_every",
    "model.loss",
    "model.optimizer",
)


@dataclass(frozen=True)
class Planned:
    """The memory and the work of one step, as it was rehearsed."""

    peaks: Mapping[str, int]  # by phase, the most bytes in use at one time
    causes: Mapping[str, MemoryCauses]  # by phase, the causes of the bytes at its peak
    batch: int | None = None  # samples per batch; None if unknown
    # tokens per sequence; None if unknown, or if the number cannot be changed
    context: int | None = None
    # the largest batch (or context) that fits: 0 if none does, None if it was not searched for
    largest: int | None = None
    # whether the run would be compiled; the rehearsed step is not
    compiled: bool = False
    # the least work of each phase
    work: Mapping[str, Work] = field(default_factory=dict)
    # the names of operators and functions whose FLOPs have no formula
    uncounted: Sequence[str] = ()
    # the precision of float32 matmuls: ``highest``, ``high`` (TF32) or ``medium``
    float32: str = "unknown"
    # the values of those ``SETTINGS`` that the call has
    settings: Mapping[str, Any] = field(default_factory=dict)
    held: MemoryLevels | None = None  # the memory at certain moments of the step
    model: ModelFacts | None = None  # facts about the module
    # why the search for ``largest`` found nothing
    largest_unknown: str | None = None
    # the peak of each rehearsed step; the largest is reported
    steps: Sequence[int] = ()
    # lines of code that converted an unknown number to a float, for which 1 was assumed
    taken_for_one: Sequence[str] = ()
    # bytes of DDP's buckets, which are part of the rest in each phase; None without buckets
    buckets: int | None = None
    # the most bytes at one time of weights gathered from other ranks, which are part of the rest
    gathered: int = 0
    # bytes of library workspaces, which are part of each phase's peak; None on the CPU
    workspaces: int | None = None
    # bytes that a GPU's allocator reserves for these steps; None on the CPU
    reserved: int | None = None
    ranks: int = 1  # the number of ranks of the run; only rank 0 was rehearsed
    # by phase, the bytes that its collectives send over a rank's link
    sent: Mapping[str, int] = field(default_factory=dict)
    # the strategy that shards the module over the ranks; None if each rank has the whole module
    split_by: str | None = None
    timeline: MemoryTimeline | None = None  # all allocations of the step

    @property
    def phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank has all weights, but updates only its part of them and sends the result."""
        return self.split_by is None and "optimizer" in self.sent

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def needs_bytes(self) -> int:
        """The least memory with which the run counts as fitting."""
        return needed_bytes(self.peak, self.reserved)

    @property
    def growth(self) -> int | None:
        """The least bytes by which each rehearsed step needs more than the one before; None if they do not grow evenly.

        Growth by chance (of larger and larger batches) would not be even.
        """
        increases = [following - step for step, following in pairwise(self.steps)]
        if len(increases) < _SURELY_GROWS:
            return None
        is_even = 0 < max(increases) <= 2 * min(increases)
        return min(increases) if is_even else None

    @property
    def least_bytes(self) -> int:
        """The bytes that the step needs in any case: without activations if compiled, because it may keep fewer."""
        causes = self.causes.get(self.phase)
        if not self.compiled or causes is None:
            return self.peak
        return self.peak - (causes.activations_and_rest or 0)


_SURELY_GROWS = 3  # so many successive increases are growth, not chance


def needed_bytes(peak: int, reserved: int | None) -> int:
    """Return the least memory with which the run counts as fitting, a tenth of which is a margin above ``peak``.

    ``reserved`` needs no margin, because it includes fragmentation already.
    """
    return max(ceil(peak / ROOM), reserved or 0)


def fits(planned: Planned, capacity_bytes: int) -> bool | None:
    """Return whether the run fits into ``capacity_bytes``; None if unknown, for example because steps grow."""
    if planned.least_bytes > capacity_bytes:
        return False
    if planned.needs_bytes <= capacity_bytes and planned.growth is None:
        return True
    return None


@dataclass(frozen=True)
class PlannedFloors:
    """The floors (least times) of a step by phase, and the rates from which they were computed."""

    by_phase: dict[str, Floor]
    rates: Rates
    # by phase, the seconds for which its collectives occupy a rank's link; empty if the link's rate was not stated
    sent_s: Mapping[str, float] = field(default_factory=dict)

    def least_s(self, phase: str) -> float | None:
        """Return the least seconds of ``phase``, if communication and computation overlap completely."""
        known_s = []
        floor = self.by_phase.get(phase)
        if floor is not None and floor.seconds is not None:
            known_s.append(floor.seconds)
        if phase in self.sent_s:
            known_s.append(self.sent_s[phase])
        return max(known_s, default=None)

    @property
    def seconds(self) -> float | None:
        """The floor of the step: the sum of the known floors of its phases; None if none is known."""
        floors_s = [
            self.least_s(phase) or 0.0 for phase in {*self.by_phase, *self.sent_s}
        ]
        return sum(floors_s) if any(floors_s) else None

    @property
    def unknown(self) -> list[str]:
        """The phases without a known floor, which are missing in the step's floor."""
        return [phase for phase in self.by_phase if self.least_s(phase) is None]


@dataclass(frozen=True)
class Alternative:
    """A setting that would need less memory, according to its own rehearsal."""

    options: Sequence[str]
    changes: str | None  # what the setting changes in training; None for nothing
    needs_bytes: int
    fits: bool | None
    floor_s: float | None


@dataclass(frozen=True)
class Plan:
    """The result of the verb ``plan`` for one device."""

    planned: Planned
    device: Capacity
    # whether the run fits into the device; None if unknown, for example because steps grow
    fits: bool | None
    needs_bytes: int  # the least memory with which the run counts as fitting
    # the largest context that fits; ``planned.largest`` is the largest batch
    largest_context: int | None
    # the floor of the step; None if the peaks of the device are unknown
    floor_s: float | None
    # settings that need less memory, if the run may not fit
    smaller: Sequence[Alternative]


def planned_floors(
    planned: Planned, device: str, link_bytes_per_s: float | None = None
) -> PlannedFloors:
    """Return the least time that each phase of ``planned`` can take on the GPU called ``device`` (its roofline floor).

    The floors are unknown if the table of peaks lacks the GPU. Communication is included if the rate of the links is
    given.
    """
    dtypes: set[str] = set()
    for work in planned.work.values():
        dtypes.update(work.flops or {})
    rates = rates_of(
        device,
        dict.fromkeys(sorted(dtypes)),  # no rate was measured
        copied_bytes_per_s=None,
        float32_as=matmul_dtype("32", planned.float32),
    )
    floors = {
        phase: floor_of(work, rates, took_s=None)
        for phase, work in planned.work.items()
    }
    sent_s: dict[str, float] = {}
    if link_bytes_per_s:
        for phase, sent_bytes in planned.sent.items():
            sent_s[phase] = sent_bytes / link_bytes_per_s
    return PlannedFloors(floors, rates, sent_s)


# the compute capability that is assumed if it is unknown: the workspaces of libraries are largest with it
ANY_GPU = (9, 0)

_MOST_NAMES = 5  # the most names that a message lists

# words that users often omit; without them a name still means the same product
_BRANDS = {"nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "generation", "sxm"}

# words that distinguish products with the same number, so that they must not be omitted
_OTHER_PRODUCT = {"ti", "super", "laptop"}

# SXM boards whose names do not contain SXM
_ON_A_BOARD = {"NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"}


@dataclass(frozen=True)
class Capacity:
    """The memory of a GPU, or of the machine; a run can use a few percent less than that."""

    name: str  # the name of the GPU, as its driver reports it
    bytes: int
    # whether the bytes are those that are free now, and not the whole memory
    is_free: bool = False
    # the compute capability of the GPU; None for the CPU
    gpu: tuple[int, int] | None = None


def capacity(device_name: str) -> Capacity:
    """Return the GPU of the table that ``device_name`` means, such as ``4090`` or ``a100 80gb``.

    Words of its name, such as the brand, may be missing.

    Raises:
        UsageError: it means no GPU, or several that differ in memory or speed, which the message lists.
    """
    rows: dict[str, Row] = {}  # by each name of a GPU with known memory
    for row in ROWS:
        if row.gib is not None:
            rows.update(dict.fromkeys(row.names, row))
    names = _names_meant(device_name, list(rows))
    different_gpus = {_speed_and_memory(rows[name]) for name in names}
    if len(different_gpus) > 1:
        raise UsageError(
            f"device: expected one GPU, given {device_name[:100]!r}, which may be {_enumeration(names)}"
        )
    if names:
        name = names[0]
        return Capacity(name, _bytes_of(rows[name]), gpu=rows[name].gpu)
    words = {word for name in rows for word in name.split()}
    remedy = did_you_mean(device_name, sorted(words))
    raise UsageError(
        f"device: expected a GPU such as A100 80GB, given {device_name[:100]!r}{remedy}; or give --memory 80GiB"
    )


def _names_meant(device_name: str, names: Sequence[str]) -> list[str]:
    """Return the names with the same words as ``device_name`` (except brands), or else those with all of its words.

    A name with a further word for another product, such as ``ti``, is not meant.
    """
    wanted = _words_of_name(device_name)
    wanted_without_brands = wanted - _BRANDS
    if not wanted_without_brands:
        return []
    same_names = []
    longer_names = []
    for name in names:
        words = _words_of_name(name)
        is_other_product = bool((words - wanted) & _OTHER_PRODUCT)
        if words - _BRANDS == wanted_without_brands:
            same_names.append(name)
        elif wanted <= words and not is_other_product:
            longer_names.append(name)
    return same_names or longer_names


def _speed_and_memory(row: Row) -> tuple[Any, ...]:
    """Return what a plan depends on: rows with equal values need not be told apart."""
    return (row.gib, row.gpu, row.tf32, row.bfloat16, row.float16)


def _bytes_of(row: Row) -> int:
    return int((row.gib or 0) * (1 << 30))


def smallest_gpu(needed_bytes: int) -> Capacity | None:
    """Return the smallest GPU of the table with at least ``needed_bytes``; None if there is none.

    Of GPUs with equal memory, it is the one with the highest bfloat16 peak.
    """
    rows = []
    for row in ROWS:
        if row.gib is not None and _bytes_of(row) >= needed_bytes:
            rows.append(row)
    if not rows:
        return None
    row = min(rows, key=_memory_then_speed)
    return Capacity(row.names[0], _bytes_of(row), gpu=row.gpu)


def _memory_then_speed(row: Row) -> tuple[float, float]:
    """Return a key that sorts GPUs by memory, and of equal memory the fastest first."""
    return (row.gib or 0.0, -(row.bfloat16 or 0.0))


def _enumeration(names: Sequence[str]) -> str:
    """Return two or more names in a sentence: ``A, B or C``. Of many, the first are named and the others counted."""
    parts = list(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        parts.append(f"{len(names) - _MOST_NAMES} others")
    return f"{', '.join(parts[:-1])} or {parts[-1]}"


def _words_of_name(name: str) -> set[str]:
    """Return the words of a GPU's name, for a search: ``sxm`` is one of them if the GPU exists only on a board."""
    words = set(re.split(r"[\s_-]+", name.casefold().strip())) - {"", "nvidia"}
    is_on_a_board = name in _ON_A_BOARD or any(word.startswith("sxm") for word in words)
    if is_on_a_board:
        words.add("sxm")
    return words


_MOST_TRIALS = 12  # the most sizes that are tried
_USUAL_GROWTH = 64  # while all known sizes fit, larger ones are tried up to this factor
# If the search is stuck, a line aims at this share of the free bytes instead of all of them.
_A_LITTLE_LESS = 0.998


def largest_that_fits(
    begin: int, needed_bytes: int, free_bytes: float
) -> Generator[int, int, int]:
    """Search for the largest size (batch or context) that fits into ``free_bytes``; return 0 if not even size 1 fits.

    The generator yields sizes, and must be sent the bytes that each needs. Size ``begin`` needs ``needed_bytes``.
    """
    # the bytes that each size needs; size 0 needs at least 0 bytes
    bytes_by_size = {0: 0, begin: needed_bytes}
    # The largest size that fits is between ``low``, which fits, and ``high``, which does not. These are the widths of
    # this interval by turn, with two turns before the first; infinite while one end of the interval is unknown.
    widths = [inf, inf]
    stuck_turns = 0
    for turn in range(_MOST_TRIALS):
        low = _fitting_sizes(bytes_by_size, free_bytes)[-1]
        too_large = [size for size in bytes_by_size if bytes_by_size[size] > free_bytes]
        high = min(too_large, default=_USUAL_GROWTH * low)
        if high - low <= 1:
            return low
        has_both_ends = low > 0 and bool(too_large)
        width = high - low if has_both_ends else inf
        width_two_turns_ago = widths[-2]
        widths.append(width)
        had_both_ends = width_two_turns_ago < inf
        has_halved_in_two_turns = 2 * width <= width_two_turns_ago
        if had_both_ends and not has_halved_in_two_turns:
            stuck_turns += 1
            size = _next_size_if_stuck(
                bytes_by_size, free_bytes, low, high, stuck_turns
            )
        else:
            size = _next_size(bytes_by_size, free_bytes, low, high, turn)
        size = min(max(size, low + 1), high - 1)
        bytes_by_size[size] = yield size
    return _fitting_sizes(bytes_by_size, free_bytes)[-1]


def _next_size(
    bytes_by_size: Mapping[int, int], free_bytes: float, low: int, high: int, turn: int
) -> int:
    """Return a size to try between ``low`` and ``high``, by a line through two sizes whose needs are known.

    The memory of a step is a convex function of its batch, and of its context: the maximum of several sums with terms
    that grow linearly or quadratically. So lines approach the solution from both sides, in alternate turns.
    """
    is_high_known = high in bytes_by_size
    if turn % 2 == 0 and is_high_known:
        # A line through a size that fits and one that does not reaches ``free_bytes`` at too small a size, which fits.
        return _size_that_needs(free_bytes, bytes_by_size, low, high)
    if low > 0:
        # A line through two sizes that fit reaches ``free_bytes`` at too large a size, which does not fit.
        previous = _fitting_sizes(bytes_by_size, free_bytes)[-2]
        return _size_that_needs(free_bytes, bytes_by_size, previous, low)
    # Nothing fits yet. A line from size 0 would ignore the memory that a step needs at any size.
    return high // 2


def _next_size_if_stuck(
    bytes_by_size: Mapping[int, int],
    free_bytes: float,
    low: int,
    high: int,
    stuck_turns: int,
) -> int:
    """Return a size to try if lines no longer halve the interval, because memory grows in blocks.

    It is the middle of the interval, or in every second such turn a line that aims slightly below ``free_bytes``.
    """
    is_turn_of_middle = stuck_turns % 2 == 1
    if is_turn_of_middle:
        return (low + high) // 2
    return _size_that_needs(_A_LITTLE_LESS * free_bytes, bytes_by_size, low, high)


def _fitting_sizes(bytes_by_size: Mapping[int, int], free_bytes: float) -> list[int]:
    """Return the known sizes that fit, the smallest first."""
    return sorted(
        size for size, size_bytes in bytes_by_size.items() if size_bytes <= free_bytes
    )


def _size_that_needs(
    free_bytes: float, bytes_by_size: Mapping[int, int], small: int, large: int
) -> int:
    """Return the size at which a line through the needs of two sizes reaches ``free_bytes``."""
    rise_bytes = bytes_by_size[large] - bytes_by_size[small]
    if rise_bytes == 0:  # the line never reaches ``free_bytes``
        return _USUAL_GROWTH * large
    bytes_left = free_bytes - bytes_by_size[small]
    growth = bytes_left * (large - small) / rise_bytes
    return int(small + growth)
