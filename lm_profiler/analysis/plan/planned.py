"""What a run needs on one device, as its step was rehearsed, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

from lm_profiler.analysis.hardware.roofline import Work, floor_of, matmul_dtype, rates_of
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.run import Floor, MemoryCauses, MemoryLevels, ModelFacts, Rates

ROOM = 0.9  # share of a device's memory that surely holds a run: the rest is the driver's context, workspaces and gaps

# options that decide what a step needs; those of ``model`` where it is ours
SETTINGS = (
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "data.batch_size",
    "data.context_length",
    "model.attention",
    "model.activation_checkpointing",
    "model.checkpoint_every",
    "model.optimizer",
)


@dataclass(frozen=True)
class Planned:
    """Bytes and work of one step, by phase."""

    peaks: Mapping[str, int]  # the most at one time
    causes: Mapping[str, MemoryCauses]  # what the peak consisted of
    batch: int | None = None  # samples in a batch; None where that is unknown
    context: int | None = None  # tokens in a sequence; None where that is unknown, or cannot be changed
    # the largest batch, or context, that fits: 0 where none does, None where it was not looked for
    largest: int | None = None
    compiled: bool = False  # whether the run would be compiled: its step was rehearsed as it is without
    work: Mapping[str, Work] = field(default_factory=dict)  # what each phase has to do at least
    float32: str = "unknown"  # how float32 is multiplied: ``highest``, ``high`` (TF32) or ``medium``
    settings: Mapping[str, Any] = field(default_factory=dict)  # of ``SETTINGS``, those that the call has, by name
    held: MemoryLevels | None = None  # what is held at moments of the step
    model: ModelFacts | None = None  # of the module
    largest_unknown: str | None = None  # why the largest was not found, where it was looked for
    steps: Sequence[int] = ()  # The peak of each step that was rehearsed. What is told is the largest of them.
    taken_for_one: Sequence[str] = ()  # lines that made a float of a number that nobody knew: it was taken to be 1
    buckets: int | None = None  # bytes of DDP's buckets, in the rest of each phase's peak; None where there are none
    workspaces: int | None = None  # bytes that libraries keep to work in, in each phase's peak; None on the CPU
    # what the allocator of a GPU takes of it for these steps; None on the CPU, where nobody reserves
    reserved: int | None = None
    ranks: int = 1  # the number of ranks of the run; rank 0 was rehearsed
    # bytes that the collectives of each phase put on a rank's link
    sent: Mapping[str, int] = field(default_factory=dict)
    split_by: str | None = None  # the strategy that splits the module over the ranks; None where each holds all of it
    timeline: MemoryTimeline | None = None  # every allocation of the step

    @property
    def phase(self) -> str:
        """The one with the largest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak(self) -> int:
        """The peak of the step, in bytes."""
        return max(self.peaks.values())

    @property
    def needs(self) -> int:
        """Bytes of the smallest device that surely holds it."""
        return needed(self.peak, self.reserved)

    @property
    def growth(self) -> int | None:
        """Bytes by which each step that was rehearsed needed more than the one before, at least; None if one did not.

        By chance so few batches grow as well, but not evenly.
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
    """Bytes of the smallest device that surely holds it: a tenth of it is beyond the peak, nothing beyond ``reserved``.

    The one figure by which runs are told to fit and compared.
    """
    return max(ceil(peak / ROOM), reserved or 0)


def fits(planned: Planned, has: int) -> bool | None:
    """Return whether the run fits into ``has`` bytes: not where it needs more than all of them; between, nobody can
    tell.

    Nor of steps that grow: one of those that follow may not fit.
    """
    if planned.needs <= has:
        return True if planned.growth is None else None
    return False if planned.certain > has else None


@dataclass(frozen=True)
class PlannedFloors:
    """The floors of a step by phase, with the rates that they rest on.

    ``sent_s``: Seconds for which a phase's collectives keep a rank's link busy; empty where its rate is not stated.
    """

    by_phase: dict[str, Floor]
    rates: Rates
    sent_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, phase: str) -> float | None:
        """Return the least seconds of ``phase``: at best the link is busy while the device computes."""
        alone_s = self.by_phase[phase].seconds if phase in self.by_phase else None
        known = [each for each in (alone_s, self.sent_s.get(phase)) if each is not None]
        return max(known, default=None)

    @property
    def seconds(self) -> float | None:
        """Seconds of the step: the sum of the floors that are known, for phases follow one another; None where none
        is."""
        known = [self.of(phase) or 0.0 for phase in {*self.by_phase, *self.sent_s}]
        return sum(known) if any(known) else None

    @property
    def unknown(self) -> list[str]:
        """Phases whose floor is not in the step's."""
        return [phase for phase in self.by_phase if self.of(phase) is None]


def planned_floors(planned: Planned, device: str, link_bytes_per_s: float | None = None) -> PlannedFloors:
    """Return the floors of ``planned`` on the GPU of that name; where the table of peaks does not know it, no floor is
    known. What ranks send counts if the rate of their links is given."""
    dtypes = {dtype for work in planned.work.values() for dtype in work.flops or {}}
    rates = rates_of(device, dict.fromkeys(sorted(dtypes)), None, matmul_dtype("32", planned.float32))
    sent_s = {phase: count / link_bytes_per_s for phase, count in planned.sent.items()} if link_bytes_per_s else {}
    return PlannedFloors({phase: floor_of(work, rates, None) for phase, work in planned.work.items()}, rates, sent_s)
