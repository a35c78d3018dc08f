"""``memory_timeline.<source>.json``: every allocation and free of one step, by cause, and the largest of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import model_validator

from lm_profiler.record.files import write_whole
from lm_profiler.record.run_record import MemoryCauses, Newer, Part, json_of, read_as

# The causes, each with its title, in the order of the stack. ``activations`` are tensors for backward, or
# recomputed by checkpointing; ``workspaces`` are cuBLAS's; the rest is freed within its phase, or is the batch. The
# last three add up to ``MemoryCauses.activations_and_rest``.
_CAUSES = ("parameters", "gradients", "optimizer_states", "buffers", "workspaces", "activations", "rest")
HELD = {cause: cause.replace("_", " ") for cause in _CAUSES}

# sources of timelines, with their titles
SOURCES = {"planned": "planned, rehearsed without data", "measured": "measured, from the allocator's history"}


class Allocation(Part):
    """One storage, or ``count`` equal ones. None is unknown, or made before the step."""

    bytes: int  # bytes of each
    count: int = 1
    cause: str
    phase: str | None = None  # the phase that made it; None if it existed before the step
    shape: list[int] | None = None
    dtype: str | None = None
    name: str | None = None  # the operator that made it; for a parameter, its gradient or its states, the tensor's name
    # the path of the module whose forward or backward made it; ``*`` for the indices of equal layers
    module: str | None = None
    line: str | None = None  # the innermost line of the module's code: file and number


class MemoryTimeline(Part):
    """The memory of one step, in bytes: what was held when it began, and each change after that, in order."""

    schema_version: Literal[1] = 1
    source: Annotated[Literal["planned", "measured"], Newer]
    causes: list[str]  # the causes to which ``events`` refer by number
    start: list[int]  # bytes of each cause when the step begins
    phases: list[tuple[str, int]]  # each phase, and the number of events before it
    # the number of a cause, and the bytes by which it grew; negative where memory was freed
    events: list[tuple[int, int]]
    largest: list[Allocation]  # the largest allocations that were alive at the peak
    # what autograd saved for backward, without parameters: equal storages in one row, the most bytes first
    saved: list[Allocation]
    saved_bytes: int  # bytes of all storages that autograd saved, without parameters
    # the residual stream, of batch, context and width: the sum of three dimensions that occurs
    # most often among the activations
    residual: Allocation | None = None
    set_up: dict[str, int] | None = None  # bytes of each cause before the first step, once model and optimizers exist

    @model_validator(mode="after")
    def _whole(self) -> MemoryTimeline:
        if len(self.start) != len(self.causes) or any(not 0 <= at < len(self.causes) for at, _ in self.events):
            raise ValueError(f"events: expected causes among {self.causes}, and a start for each")
        if any(not 0 <= at <= len(self.events) for _, at in self.phases):
            raise ValueError(f"phases: expected them among {len(self.events)} events")
        return self

    @cached_property
    def totals(self) -> list[int]:
        """Bytes of all causes, before the first event and after each."""
        return [*accumulate((by for _, by in self.events), initial=sum(self.start))]

    @property
    def peak_at(self) -> int:
        return max(range(len(self.totals)), key=self.totals.__getitem__)

    @property
    def peak(self) -> int:
        return max(self.totals)

    def held_after(self, events: int) -> dict[str, int]:
        held = [*self.start]
        for at, by in self.events[:events]:
            held[at] += by
        return dict(zip(self.causes, held, strict=True))

    def moments(self) -> dict[str, MemoryCauses]:
        """Return what is held after set-up, and before and after the optimizer's step, if known."""
        held = {} if self.set_up is None else {"set_up": self.set_up}
        names = [phase for phase, _ in self.phases]
        # An optimizer may work before its closure too, and so before there are gradients.
        gradients_from = names.index("backward") if "backward" in names else 0
        steps = [number for number, phase in enumerate(names) if phase == "optimizer" and number >= gradients_from]
        if steps:
            after = self.phases[steps[-1] + 1 :] or [("", len(self.events))]
            held["before_optimizer"] = self.held_after(self.phases[steps[0]][1])
            held["after_optimizer"] = self.held_after(after[0][1])
        return {moment: _coarse(of) for moment, of in held.items()}

    def curves(self, most: int = 4000) -> tuple[list[int], Mapping[str, list[int]]]:
        """Return at most ``most`` places on the axis of events, and the bytes of each cause there."""
        levels = {}
        for number, cause in enumerate(self.causes):
            changes = (by if at == number else 0 for at, by in self.events)
            levels[cause] = [*accumulate(changes, initial=self.start[number])]
        width = -(-len(self.totals) // most)
        stretches = (range(at, min(at + width, len(self.totals))) for at in range(0, len(self.totals), width))
        places = [max(stretch, key=self.totals.__getitem__) for stretch in stretches]
        return places, {cause: [of[at] for at in places] for cause, of in levels.items() if any(of)}

    def shaded(self) -> list[tuple[str, int, int]]:
        """Return each phase that has events, with the places where it begins and ends; neighbours are joined."""
        shaded: list[tuple[str, int, int]] = []
        ends = [at for _, at in self.phases[1:]] + [len(self.events)]
        for (phase, begins), end in zip(self.phases, ends, strict=True):
            if begins == end or phase == "other":
                continue
            if shaded and shaded[-1][0] == phase and shaded[-1][2] == begins:
                begins = shaded.pop()[1]
            shaded.append((phase, begins, end))
        return shaded


def _coarse(held: Mapping[str, int]) -> MemoryCauses:
    known = {cause: held.get(cause, 0) for cause in MemoryCauses.model_fields}
    return MemoryCauses(**known | {"activations_and_rest": sum(held.values()) - sum(known.values())})


def write_timeline(timeline: MemoryTimeline, folder: Path) -> None:
    """Write ``timeline`` next to the record of the run in ``folder``."""
    write_whole(timeline_file(folder, timeline.source), json_of(timeline) + "\n")


def timeline_file(folder: Path, source: str) -> Path:
    """Return the path of the timeline of ``source`` of the run in ``folder``."""
    return folder / f"memory_timeline.{source}.json"


def read_timelines(folder: Path) -> list[MemoryTimeline]:
    """Read the timelines of the run in ``folder``, the planned one first."""
    files = [file for source in SOURCES if (file := timeline_file(folder, source)).is_file()]
    return [read_as(file, MemoryTimeline, "a memory timeline") for file in files]
