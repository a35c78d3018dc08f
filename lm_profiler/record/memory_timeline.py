"""The file ``memory_timeline.<source>.json``: all allocations of one step by cause, and the largest of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import model_validator

from lm_profiler.record.files import write_whole
from lm_profiler.record.run_record import MemoryCauses, Newer, Part, json_of, read_part

# The causes, in the order in which pictures stack them. ``activations`` are tensors stored for backward, or recomputed
# by checkpointing; ``workspaces`` are those of cuBLAS; ``rest`` is freed within its phase, or is the batch. The sum of
# the last three is ``MemoryCauses.activations_and_rest``.
_CAUSES = (
    "parameters",
    "gradients",
    "optimizer_states",
    "buffers",
    "workspaces",
    "activations",
    "rest",
)
CAUSE_TITLES = {cause: cause.replace("_", " ") for cause in _CAUSES}

# sources of timelines, with their titles
SOURCES = {
    "planned": "planned, rehearsed without data",
    "measured": "measured, from the allocator's history",
}


class Allocation(Part):
    """One storage, or ``count`` equal ones. None means unknown, or allocated before the step."""

    bytes: int  # the bytes of each storage
    count: int = 1
    cause: str
    # the phase that allocated it; None if it existed before the step
    phase: str | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    # the operator that allocated it; for a parameter, its gradient or its states, the name of the tensor
    name: str | None = None
    # the path of the module whose forward or backward pass allocated it, with ``*`` for the indices of equal layers
    module: str | None = None
    line: str | None = None  # the innermost line of the module's code: file and number


class BlockMemory(Part):
    """The memory of one block of a module with ``count`` equal blocks: the one in the middle."""

    module: str  # the path of the blocks, with ``*`` for their index
    count: int  # the number of such blocks
    saved_bytes: int  # bytes that the block saves for backward
    # the largest of these storages, with equal ones in one row
    saved: list[Allocation]
    gradients_bytes: int  # gradients of the block's parameters


class MemoryTimeline(Part):
    """The memory of one step in bytes: the memory held when it began, and each change after that."""

    schema_version: Literal[1] = 1
    source: Annotated[Literal["planned", "measured"], Newer]
    causes: list[str]  # the causes; ``events`` refer to them by their index
    start: list[int]  # bytes of each cause when the step begins
    phases: list[tuple[str, int]]  # each phase, and the number of events before it
    # the changes in order: the index of a cause, and the bytes by which it grew (negative: bytes freed)
    events: list[tuple[int, int]]
    largest: list[Allocation]  # the largest allocations that existed at the peak
    # the storages that autograd saved for backward, without parameters, the largest first, with equal ones in one row
    saved: list[Allocation]
    saved_bytes: int  # bytes of all these storages
    # the residual stream (batch, context, width): the sum with three dimensions that is most frequent among activations
    residual: Allocation | None = None
    # one of the blocks, if the module has equal blocks
    block: BlockMemory | None = None
    # bytes of each cause before the first step, after model and optimizers were created
    set_up: dict[str, int] | None = None

    @model_validator(mode="after")
    def _check_numbers(self) -> MemoryTimeline:
        """Raise ValueError if an event refers to a cause, or a phase to an event, that does not exist."""
        are_causes_known = all(
            0 <= cause < len(self.causes) for cause, _ in self.events
        )
        if len(self.start) != len(self.causes) or not are_causes_known:
            raise ValueError(
                f"events, start: expected numbers of {len(self.causes)} causes, and a start value for each cause"
            )
        are_phases_known = all(
            0 <= events_before <= len(self.events) for _, events_before in self.phases
        )
        if not are_phases_known:
            raise ValueError(
                f"phases: expected each phase to begin after 0 to {len(self.events)} events"
            )
        return self

    @cached_property
    def totals(self) -> list[int]:
        """The bytes of all causes together, before the first event and after each event."""
        changes = [change for _, change in self.events]
        return list(accumulate(changes, initial=sum(self.start)))

    @property
    def peak_at(self) -> int:
        return max(range(len(self.totals)), key=self.totals.__getitem__)

    @property
    def peak(self) -> int:
        return max(self.totals)

    def bytes_after(self, events: int) -> dict[str, int]:
        """Return the bytes of each cause after this number of ``events``."""
        held_bytes = list(self.start)
        for cause, change in self.events[:events]:
            held_bytes[cause] += change
        return dict(zip(self.causes, held_bytes, strict=True))

    def moments(self) -> dict[str, MemoryCauses]:
        """Return the memory after set-up, and before and after the optimizer's step, if these are known."""
        moments = {}
        if self.set_up is not None:
            moments["set_up"] = _memory_causes(self.set_up)
        phase_names = [phase for phase, _ in self.phases]
        # Only after backward has begun: an optimizer may also run code before its closure, without gradients.
        first_backward = (
            phase_names.index("backward") if "backward" in phase_names else 0
        )
        optimizer_phases = []
        for number, name in enumerate(phase_names):
            if name == "optimizer" and number >= first_backward:
                optimizer_phases.append(number)
        if not optimizer_phases:
            return moments

        _, events_before = self.phases[optimizer_phases[0]]
        events_after = len(self.events)
        next_phase = optimizer_phases[-1] + 1
        if next_phase < len(self.phases):
            _, events_after = self.phases[next_phase]
        moments["before_optimizer"] = _memory_causes(self.bytes_after(events_before))
        moments["after_optimizer"] = _memory_causes(self.bytes_after(events_after))
        return moments

    def curves(
        self, most_places: int = 4000
    ) -> tuple[list[int], Mapping[str, list[int]]]:
        """Return at most ``most_places`` positions among the events, and the bytes of each cause at these."""
        width = ceil(len(self.totals) / most_places)
        places = []
        for begin in range(0, len(self.totals), width):
            # for each stretch of events, the position with the most bytes
            end = min(begin + width, len(self.totals))
            places.append(max(range(begin, end), key=self.totals.__getitem__))

        curves = {}
        for number, cause in enumerate(self.causes):
            # An event is the number of a cause, and the bytes by which the memory of the cause changes.
            changes = [
                change if changed == number else 0 for changed, change in self.events
            ]
            levels = list(accumulate(changes, initial=self.start[number]))
            if any(levels):
                curves[cause] = [levels[place] for place in places]
        return places, curves

    def phase_spans(self) -> list[tuple[str, int, int]]:
        """Return each phase with events, and the positions of its start and end; successive equal phases are joined."""
        stretches: list[tuple[str, int, int]] = []
        phase_ends = [begin for _, begin in self.phases[1:]] + [len(self.events)]
        for (phase, begin), end in zip(self.phases, phase_ends, strict=True):
            if begin == end or phase == "other":
                continue
            if stretches:
                previous_phase, previous_begin, previous_end = stretches[-1]
                if previous_phase == phase and previous_end == begin:
                    begin = previous_begin
                    stretches.pop()
            stretches.append((phase, begin, end))
        return stretches


def _memory_causes(held_bytes: Mapping[str, int]) -> MemoryCauses:
    """Return the bytes by the causes of ``MemoryCauses``; all other causes count as the rest."""
    causes = {cause: held_bytes.get(cause, 0) for cause in MemoryCauses.model_fields}
    causes["activations_and_rest"] = sum(held_bytes.values()) - sum(causes.values())
    return MemoryCauses(**causes)


def write_timeline(timeline: MemoryTimeline, folder: Path) -> None:
    """Write ``timeline`` next to the record of the run in ``folder``."""
    write_whole(timeline_file(folder, timeline.source), json_of(timeline) + "\n")


def timeline_file(folder: Path, source: str) -> Path:
    """Return the path of the timeline of ``source`` of the run in ``folder``."""
    return folder / f"memory_timeline.{source}.json"


def read_timelines(folder: Path) -> list[MemoryTimeline]:
    """Read the timelines of the run in ``folder``, the planned one first."""
    timelines = []
    for source in SOURCES:
        file = timeline_file(folder, source)
        if file.is_file():
            timelines.append(read_part(file, MemoryTimeline, "a memory timeline"))
    return timelines
