"""What a run needs on one device, as its step was rehearsed; how much a GPU has; and whether that fits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import Any

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.analysis.hardware.roofline import Work, floor_of, matmul_dtype, rates_of
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.run_record import Floor, MemoryCauses, MemoryLevels, ModelFacts, Rates
from lm_profiler.usage_error import UsageError

ROOM = 0.9  # share of a device's memory that surely holds a run: the rest is the driver's context, workspaces and gaps

# options that decide what a step needs; those of ``model`` where it is ours
SETTINGS = (
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "data.batch_size",
    "data.context_length",
    "model.size",
    "model.attention",
    "model.activation_checkpointing",
    "model.checkpoint_every",
    "model.optimizer",
)


@dataclass(frozen=True)
class Planned:
    """Bytes and work of one step, by phase."""

    peaks: Mapping[str, int]  # the most bytes in use at one time
    causes: Mapping[str, MemoryCauses]  # what each peak consisted of
    batch: int | None = None  # samples in a batch; None where that is unknown
    context: int | None = None  # tokens in a sequence; None where that is unknown, or cannot be changed
    # the largest batch, or context, that fits: 0 where none does, None where it was not looked for
    largest: int | None = None
    compiled: bool = False  # whether the run would be compiled: its step was rehearsed uncompiled
    work: Mapping[str, Work] = field(default_factory=dict)  # what each phase has to do at least
    float32: str = "unknown"  # how float32 is multiplied: ``highest``, ``high`` (TF32) or ``medium``
    settings: Mapping[str, Any] = field(default_factory=dict)  # of ``SETTINGS``, those that the call has, by name
    held: MemoryLevels | None = None  # what is held at moments of the step
    model: ModelFacts | None = None  # of the module
    largest_unknown: str | None = None  # why the largest was not found, where it was looked for
    steps: Sequence[int] = ()  # the peak of each rehearsed step; the largest is reported
    taken_for_one: Sequence[str] = ()  # lines that converted an unknown number to a float: it was taken to be 1
    buckets: int | None = None  # bytes of DDP's buckets, in the rest of each phase's peak; None without buckets
    gathered: int = 0  # most bytes at one time of weights gathered from other ranks, in the rest
    workspaces: int | None = None  # bytes of library workspaces, in each phase's peak; None on the CPU
    # bytes that a GPU's allocator reserves for these steps; None on the CPU
    reserved: int | None = None
    ranks: int = 1  # the number of ranks of the run; rank 0 was rehearsed
    # bytes that the collectives of each phase put on a rank's link
    sent: Mapping[str, int] = field(default_factory=dict)
    split_by: str | None = None  # the strategy that splits the module over the ranks; None where each holds all of it
    timeline: MemoryTimeline | None = None  # every allocation of the step

    @property
    def phase(self) -> str:
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def needs(self) -> int:
        return needed(self.peak, self.reserved)

    @property
    def growth(self) -> int | None:
        """Least bytes by which each rehearsed step needed more than the one before; None if one did not.

        So few batches may also grow by chance, but not evenly.
        """
        more = [after - before for before, after in pairwise(self.steps)]
        steadily = len(more) >= _SURELY_GROWS and 0 < max(more) <= 2 * min(more)
        return min(more) if steadily else None

    @property
    def certain(self) -> int:
        """The bytes that the step needs in any case: a compiler may keep fewer activations."""
        causes = self.causes.get(self.phase) if self.compiled else None
        return self.peak - (0 if causes is None else causes.activations_and_rest or 0)


_SURELY_GROWS = 3  # steps one after the other that need more than the one before


def needed(peak: int, reserved: int | None) -> int:
    """Return the least memory that surely holds the run: a tenth of it is beyond the peak, none beyond ``reserved``."""
    return max(ceil(peak / ROOM), reserved or 0)


def fits(planned: Planned, has: int) -> bool | None:
    """Return whether the run fits into ``has`` bytes; None if that is unknown, as when steps grow."""
    if planned.needs <= has:
        return True if planned.growth is None else None
    return False if planned.certain > has else None


@dataclass(frozen=True)
class PlannedFloors:
    """The floors of a step by phase, with the rates that they rest on."""

    by_phase: dict[str, Floor]
    rates: Rates
    # seconds for which a phase's collectives keep a rank's link busy; empty where its rate is not stated
    sent_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, phase: str) -> float | None:
        """Return the least seconds of ``phase``: at best the link is busy while the device computes."""
        alone_s = self.by_phase[phase].seconds if phase in self.by_phase else None
        known = [each for each in (alone_s, self.sent_s.get(phase)) if each is not None]
        return max(known, default=None)

    @property
    def seconds(self) -> float | None:
        """Seconds of the step: the sum of the floors that are known; None where none is."""
        known = [self.of(phase) or 0.0 for phase in {*self.by_phase, *self.sent_s}]
        return sum(known) if any(known) else None

    @property
    def unknown(self) -> list[str]:
        """Phases whose floor is missing in the step's."""
        return [phase for phase in self.by_phase if self.of(phase) is None]


@dataclass(frozen=True)
class Alternative:
    """A setting that would need less, as its step was rehearsed."""

    options: Sequence[str]
    changes: str | None  # what it changes besides memory; None is nothing
    needs_bytes: int
    fits: bool | None
    floor_s: float | None


@dataclass(frozen=True)
class Plan:
    """What the verb ``plan`` answers for one device."""

    planned: Planned
    device: Capacity
    fits: bool | None  # None if that is unknown, as when steps grow
    needs_bytes: int  # the least that surely holds the run
    largest_context: int | None  # the largest context that fits; ``planned.largest`` is the largest batch
    floor_s: float | None  # of the step; None where no peaks of the device are known
    smaller: Sequence[Alternative]  # settings that would need less, if the run may not fit


def planned_floors(planned: Planned, device: str, link_bytes_per_s: float | None = None) -> PlannedFloors:
    """Return the floors of ``planned`` on the GPU of that name, as far as the table of peaks knows it.

    What ranks send counts if the rate of their links is given.
    """
    dtypes = {dtype for work in planned.work.values() for dtype in work.flops or {}}
    rates = rates_of(device, dict.fromkeys(sorted(dtypes)), None, matmul_dtype("32", planned.float32))
    sent_s = {phase: count / link_bytes_per_s for phase, count in planned.sent.items()} if link_bytes_per_s else {}
    return PlannedFloors({phase: floor_of(work, rates, None) for phase, work in planned.work.items()}, rates, sent_s)


# the compute capability to plan for where it is unknown: libraries' workspaces are largest on it
ANY_GPU = (9, 0)

_NEAR = 0.7  # how alike two words must be (``difflib``'s ratio) for one to be proposed for the other

_SHOWN = 5  # names in a message

# words that people leave out; without them a name still means one product
_BRANDS = {"nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "generation", "sxm"}

# words that distinguish products with the same number: nobody leaves them out
_OTHER_PRODUCT = {"ti", "super", "laptop"}

_ON_A_BOARD = {"NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"}  # SXM boards, though their names do not say so


@dataclass(frozen=True)
class Capacity:
    """The memory of a GPU, of which a run gets some per cent less."""

    name: str  # as its driver calls it
    bytes: int
    is_free: bool = False  # whether the bytes are what this machine has left now, and not all that there is
    gpu: tuple[int, int] | None = None  # its compute capability; None is the CPU


def capacity(given: str) -> Capacity:
    """Return the GPU of the table that is called ``given``, with or without its brand, or has all of its words.

    Raises:
        UsageError: none is (``4090``, ``a100 80gb`` are), or several that differ in memory or speed; it names them.
    """
    wanted = _words(given)
    rows = {name: row for row in ROWS for name in row.names if row.gib is not None}
    named = [name for name in rows if _words(name) - _BRANDS == wanted - _BRANDS]
    own = wanted - _BRANDS
    meant = named or [
        name for name in rows if own and wanted <= _words(name) and not (_words(name) - wanted) & _OTHER_PRODUCT
    ]
    if len({(row.gib, row.gpu, row.tf32, row.bfloat16, row.float16) for row in map(rows.__getitem__, meant)}) > 1:
        raise UsageError(f"device: expected one GPU, given {given[:100]!r}, which may be {_listed(meant)}")
    if meant:
        row = rows[meant[0]]
        return Capacity(meant[0], int((row.gib or 0) * (1 << 30)), gpu=row.gpu)
    alike = {name: _alike(given, name) for name in rows}
    near = sorted((name for name in rows if alike[name] >= _NEAR), key=lambda name: -alike[name])
    hint = f"did you mean {', '.join(near[:3])}?" if near else "or say --memory 80GiB"
    raise UsageError(f"device: expected a GPU such as A100 80GB, given {given[:100]!r}; {hint}")


def smallest_gpu(needs_bytes: int) -> Capacity | None:
    """Return the GPU of the table with the least memory that is at least ``needs_bytes``; None where none has it.

    Of several with equal memory it is the one that multiplies fastest in bfloat16.
    """
    rows = [row for row in ROWS if row.gib is not None and row.gib * (1 << 30) >= needs_bytes]
    if not rows:
        return None
    row = min(rows, key=lambda row: (row.gib, -(row.bfloat16 or 0.0)))
    assert row.gib is not None
    return Capacity(row.names[0], int(row.gib * (1 << 30)), gpu=row.gpu)


def _listed(names: list[str]) -> str:
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} others"] if len(names) > _SHOWN else [])]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def _alike(given: str, name: str) -> float:
    return max(difflib.SequenceMatcher(None, given.casefold(), word).ratio() for word in _words(name))


def _words(name: str) -> set[str]:
    words = {*re.split(r"[\s_-]+", name.casefold().strip())} - {"", "nvidia"}
    on_a_board = name in _ON_A_BOARD or any(word.startswith("sxm") for word in words)
    return words | {"sxm"} if on_a_board else words


_MOST = 12  # sizes that are tried


def largest_that_fits(begin: int, needed: int, room: float) -> Generator[int, int, int]:
    """Ask for the needs of sizes besides ``begin``, which needs ``needed`` bytes; return the largest within ``room``.

    What a step needs is a convex function of its batch, and of its context: the most of several sums, each of which
    grows in proportion, or as a square. So a line through two sizes that fit meets ``room`` too late, and one through a
    size that fits and one that does not, too early: from both sides the search closes in. Where blocks of memory make
    both miss, so that two turns have not halved what is open, the middle and a little less than ``room`` are tried in
    turns. 0 where not even 1 fits.
    """
    known, widths, stuck = {0: 0, begin: needed}, [inf] * 3, 0  # without a batch at least nothing is needed
    for turn in range(_MOST):
        fitting = sorted(n for n, bytes_ in known.items() if bytes_ <= room)
        above = known.keys() - fitting
        low, high = fitting[-1], min(above, default=64 * fitting[-1])
        if high - low <= 1:
            return low
        widths.append(high - low if low and above else inf)
        if 2 * widths[-1] > widths[-3] < inf:
            stuck += 1
            n = (low + high) // 2 if stuck % 2 else _meets(known, low, high, 0.998 * room)
        elif turn % 2 or not above:  # half, where nothing fits yet: a step also has a fixed need
            n = _meets(known, fitting[-2], low, room) if low else high // 2
        else:
            n = _meets(known, low, high, room)
        n = min(max(n, low + 1), high - 1)
        known[n] = yield n
    return max(n for n, bytes_ in known.items() if bytes_ <= room)


def _meets(known: Mapping[int, int], a: int, b: int, room: float) -> int:
    rise = known[b] - known[a]
    return int(a + (room - known[a]) * (b - a) / rise) if rise else 64 * b
