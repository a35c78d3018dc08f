"""What a run needs on one device, as its step was rehearsed, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_profiler.analysis.hardware.floors import Work
from lm_profiler.record.run import MemoryCauses, MemoryLevels, ModelFacts

ROOM = 0.9
"""Share of a device's memory that surely holds a run: the rest is the driver's context, workspaces and gaps."""

SETTINGS = (
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "data.batch_size",
    "data.context_length",
    "model.attention",
    "model.activation_checkpointing",
    "model.optimizer",
)
"""Options that decide what a step needs; those of ``model`` where it is ours."""


@dataclass(frozen=True)
class Planned:
    """Bytes and work of one step, by phase.

    Attributes:
        peaks: The most at one time.
        causes: What the peak consisted of.
        batch: Samples in a batch; None where that is unknown.
        context: Tokens in a sequence; None where that is unknown, or cannot be changed.
        largest: The largest batch, or context, that fits: 0 where none does, None where it was not looked for.
        compiled: Whether the run would be compiled: its step was rehearsed as it is without.
        work: What each phase has to do at least.
        float32: How float32 is multiplied: ``highest``, ``high`` (TF32) or ``medium``.
        settings: Of ``SETTINGS``, those that the call has, by name.
        held: What is held at moments of the step.
        model: Of the module.
        largest_unknown: Why the largest was not found, where it was looked for.
        steps: The peak of each step that was rehearsed. What is told is the largest of them.
        reserved: What the allocator of a GPU takes of it for these steps; None on the CPU, where nobody reserves.
    """

    peaks: Mapping[str, int]
    causes: Mapping[str, MemoryCauses]
    batch: int | None = None
    context: int | None = None
    largest: int | None = None
    compiled: bool = False
    work: Mapping[str, Work] = field(default_factory=dict)
    float32: str = "unknown"
    settings: Mapping[str, Any] = field(default_factory=dict)
    held: MemoryLevels | None = None
    model: ModelFacts | None = None
    largest_unknown: str | None = None
    steps: Sequence[int] = ()
    reserved: int | None = None

    @property
    def phase(self) -> str:
        """The one with the largest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak(self) -> int:
        """Of the step."""
        return max(self.peaks.values())

    @property
    def certain(self) -> int:
        """Of the step in any case: a compiler may keep fewer activations."""
        causes = self.causes.get(self.phase) if self.compiled else None
        return self.peak - (0 if causes is None else causes.activations_and_rest or 0)


def needed(peak: int, reserved: int | None) -> int:
    """What has to be within ``room``: the peak; and all that is ``reserved`` has to be within the device."""
    return max(peak, round(ROOM * (reserved or 0)))


def room(has: int) -> float:
    """What a run may take of a device that ``has`` so many bytes, for ``fits`` to be true of it."""
    return ROOM * has


def fits(planned: Planned, has: int) -> bool | None:
    """Whether the run fits into ``has`` bytes: not where it needs more than all of them; between, nobody can tell."""
    return True if needed(planned.peak, planned.reserved) <= room(has) else False if planned.certain > has else None
