"""The verb ``plan``: the memory that a run would need, also on a device that this machine does not have."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm_profiler.analysis.plan.planned import (
    ANY_GPU,
    Alternative,
    Capacity,
    Plan,
    Planned,
    PlannedFloors,
    capacity,
    fits,
    planned_floors,
)
from lm_profiler.analysis.remedies.catalogue import combined_remedies, remedies
from lm_profiler.analysis.remedies.remedy import MemoryCandidate
from lm_profiler.cli.surroundings import quiet_libraries
from lm_profiler.cli.verbs.shared import (
    choose_answer_format,
    show,
    writable,
    write,
    write_json,
)
from lm_profiler.measure.boundary import print_message
from lm_profiler.models.config import ambiguous_size_notes
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Collection
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.report.pictures.over_time import memory_timelines, titled_timelines
from lm_profiler.report.pictures.plots import (
    SUFFIXES,
    TIMELINE,
    check_picture,
    save_figure,
)
from lm_profiler.report.run.plan_table import (
    allocation_tables,
    plan_table,
    remedy_table,
)
from lm_profiler.report.tables.table import Table
from lm_profiler.usage_error import UsageError, expect

if TYPE_CHECKING:
    from lm_profiler.cli.rehearse import Unplanned

EXAMPLES = """\
for example:
  lm_profiler plan --config xl_bf16 --device H200
  lm_profiler plan --config demo --memory 8GiB --data.batch_size=64
  lm_profiler plan --config demo --plot memory_timeline --output memory.png
  lm_profiler plan --config xl_bf16 --device H200 --trainer.devices=8 --trainer.strategy=fsdp --bandwidth=450e9"""

_LIMIT_S = 600.0  # seconds of CPU time for one rehearsal

_PARALLEL = 2  # rehearsals that run at the same time; each keeps one core busy

# the unit of a size without its "b" → its bytes
_UNITS = {
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}

# the largest ``--memory`` that is accepted: 1024 TiB, a hundred times the memory of any machine
_MAX_BYTES = 1 << 50


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the memory that each phase of a training step needs, and the largest batch and context that fit.

    Nothing is trained, and no GPU is needed: the step is rehearsed on tensors without data.

    Args:
        device: The GPU, by a name such as H100 or "A100 80GB"; if not given, this machine.
        memory: Memory of the device, such as 80GiB, if it differs from the usual size.
        bandwidth: Bytes per second that each of several devices can send to the others, such as 450e9 for an H100's
            NVLink; if not given, the floor of the step excludes communication.
        allocations: Also print the largest allocations at the peak, the tensors saved for backward, and the memory at
            three moments.
        plot: memory_timeline draws the bytes in use over one step by cause; with --output FILE.svg, .png, .pdf or
            .html.
        format: terminal, markdown, latex, typst, or json with all figures; if not given, it follows from the suffix of
            output.
        output: Write the plot, or the tables if there is no plot, to this file.
        options: Options of fit.
    """

    device: str | None = None
    memory: str | None = None
    bandwidth: float | None = None
    allocations: bool = False
    plot: str | None = None
    format: str | None = None
    output: Path | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        is_valid = self.bandwidth is None or 0 < self.bandwidth < math.inf
        expect(is_valid, "bandwidth", "bytes per second, such as 450e9", self.bandwidth)
        expect(self.plot in (None, TIMELINE), "plot", TIMELINE, self.plot)
        tables_file = self.output if self.plot is None else None
        object.__setattr__(
            self, "format", choose_answer_format(self.format, tables_file)
        )
        if self.plot is not None:
            if self.output is None:
                raise UsageError(
                    f"plot: expected --output FILE, given none; end FILE with {', '.join(SUFFIXES)}"
                )
            check_picture(self.output)
        if self.output is not None:
            expect(
                self.output.parent.is_dir(),
                "output",
                "a file in a folder that exists",
                str(self.output),
            )


def run(options: Options) -> int:
    """Print or write the plan; return the exit code: 1 if ``fit`` would refuse the run, or it cannot be planned."""
    file = options.output if options.plot is None else None
    tables = list[Table]()
    # On a terminal each table is shown as soon as it is known, because rehearsing remedies takes a while.
    is_for_terminal = file is None and options.format == "terminal"
    show_table = show if is_for_terminal else tables.append
    try:
        answer = planned(options, show_table)
    except CannotPlan as error:
        for line in str(error).splitlines():
            print_message(line)
        return FAILED
    if options.format == "json":
        write_json(answer, file)
    elif tables:
        write(Collection(), tables, options.format or "terminal", file)
    return FAILED if answer.fits is False else OK


class CannotPlan(Exception):
    """A run that cannot be rehearsed; the message has the reason."""


def planned(options: Options, show_table: Callable[[Table], object]) -> Plan:
    """Return the plan; ``show_table`` gets each table as soon as it is known.

    Raises:
        UsageError: the call is wrong.
        CannotPlan: the run cannot be rehearsed.
    """
    device = _device_capacity(options)
    # as ``fit`` does, because a user's module may be there
    sys.path.append(str(Path.cwd()))
    questions = [
        _Question(options=(), maximized="batch"),
        _Question(options=(), maximized="context"),
    ]
    answers = _rehearse_each(options.options, device, questions)
    batch_plan, context_plan = [_require_plan(answer) for answer in answers]
    largest_context = context_plan.largest
    for line in ambiguous_size_notes([batch_plan.settings.get("model.size", "")]):
        print_message(line)

    def floors_of(rehearsed: Planned) -> PlannedFloors:
        return planned_floors(
            rehearsed, device=device.name, link_bytes_per_s=options.bandwidth
        )

    floors = floors_of(batch_plan)
    show_table(plan_table(batch_plan, largest_context, device, floors))
    if batch_plan.timeline is not None:
        _show_timeline(batch_plan.timeline, options, show_table)

    does_fit = fits(batch_plan, device.bytes)
    alternatives: list[Alternative] = []
    if not does_fit:
        smaller = _smaller_settings(
            batch_plan, largest_context, options.options, device
        )
        rows = [
            (remedy, rehearsed, floors_of(rehearsed)) for remedy, rehearsed in smaller
        ]
        show_table(remedy_table(rows, device))
        for remedy, rehearsed, floors_of_remedy in rows:
            alternative = Alternative(
                options=remedy.words,
                changes=remedy.changes,
                needs_bytes=rehearsed.needs_bytes,
                fits=fits(rehearsed, device.bytes),
                floor_s=floors_of_remedy.seconds,
            )
            alternatives.append(alternative)
    if not options.allocations:
        batch_plan = replace(batch_plan, timeline=None)
    return Plan(
        planned=batch_plan,
        device=device,
        fits=does_fit,
        needs_bytes=batch_plan.needs_bytes,
        largest_context=largest_context,
        floor_s=floors.seconds,
        smaller=alternatives,
    )


def _require_plan(answer: Planned | Unplanned) -> Planned:
    """Return the plan; raise UsageError or CannotPlan if there is none."""
    if isinstance(answer, Planned):
        return answer
    if answer.is_wrong_call:
        raise UsageError(answer.reason)
    raise CannotPlan(f"cannot be planned: {answer.reason}")


def _smaller_settings(
    batch_plan: Planned,
    largest_context: int | None,
    options: Sequence[str],
    device: Capacity,
) -> list[tuple[MemoryCandidate, Planned]]:
    """Return remedies for a run that does not fit, with their plans; combinations if no single remedy is enough.

    Each remedy takes a rehearsal.
    """
    rehearsed = _rehearsed_remedies(
        remedies(batch_plan, largest_context), options, device
    )
    one_is_enough = any(fits(plan, device.bytes) for _, plan in rehearsed)
    if not one_is_enough:
        rehearsed += _rehearsed_remedies(combined_remedies(batch_plan), options, device)
    return rehearsed


def _rehearsed_remedies(
    candidates: Sequence[MemoryCandidate], options: Sequence[str], device: Capacity
) -> list[tuple[MemoryCandidate, Planned]]:
    """Return the remedies that could be rehearsed, with their plans; the module or the Trainer may refuse some."""
    questions = [
        _Question(candidate.words, maximized="nothing") for candidate in candidates
    ]
    answers = _rehearse_each(options, device, questions)
    rehearsed: list[tuple[MemoryCandidate, Planned]] = []
    for candidate, answer in zip(candidates, answers, strict=True):
        if isinstance(answer, Planned):
            rehearsed.append((candidate, answer))
    return rehearsed


class _Question(NamedTuple):
    """A rehearsal with further options. It may search for the largest ``batch`` or ``context``, or for ``nothing``."""

    options: Sequence[str]
    maximized: str


def _rehearse_each(
    options: Sequence[str], device: Capacity, questions: Sequence[_Question]
) -> Iterator[Planned | Unplanned]:
    """Rehearse the call once for each question; a few run at a time."""
    # Importing it imports torch, which --help does not need.
    from lm_profiler.cli.rehearse import start_rehearsal, wait_for_plan

    quiet_libraries()
    for start in range(0, len(questions), _PARALLEL):
        rehearsals = []
        for question in questions[start : start + _PARALLEL]:
            call = ["fit", *options, *question.options]
            rehearsals.append(
                start_rehearsal(
                    call, device.gpu, question.maximized, device.bytes, _LIMIT_S
                )
            )
        try:
            for rehearsal in rehearsals:
                yield wait_for_plan(rehearsal)
        finally:
            for rehearsal in rehearsals:
                rehearsal.end()


def _show_timeline(
    timeline: MemoryTimeline, options: Options, show_table: Callable[[Table], object]
) -> None:
    """Print the allocations of ``timeline``, and draw it, if the options request this."""
    if options.allocations:
        for table in allocation_tables(timeline):
            has_heading = bool(table.above[0])
            if has_heading:
                table = replace(table, above=["", *table.above])
            show_table(table)
    if options.plot is not None and options.output is not None:
        with writable(options.output):
            save_figure(
                partial(memory_timelines, titled_timelines([timeline])), options.output
            )
        print_message(f"written to {options.output}")


def _device_capacity(options: Options) -> Capacity:
    """Return the name and the memory of the device that the options name, or else those of this machine's device."""
    memory_bytes = None
    if options.memory is not None:
        memory_bytes = size_bytes(options.memory, "memory", "80GiB")
    if options.device is not None:
        device = capacity(options.device)
        return device if memory_bytes is None else replace(device, bytes=memory_bytes)
    if memory_bytes is not None:
        return Capacity("a GPU", memory_bytes, gpu=ANY_GPU)
    return _own_device()


def _own_device() -> Capacity:
    """Return this machine's first GPU, or its CPU, with the memory that is free."""
    import torch

    from lm_profiler.cli.rehearse import gpu_of
    from lm_profiler.measure.device.environment import device_name
    from lm_profiler.measure.memory.peaks import available_bytes

    device = (
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
    name = device_name(device)
    free_bytes = available_bytes(device)
    if free_bytes is None:
        raise UsageError(
            f"memory: expected a size such as 80GiB, because {name} does not report its memory"
        )
    return Capacity(name, free_bytes, is_free=True, gpu=gpu_of(device))


def size_bytes(
    text: str, option: str, example: str, max_bytes: int = _MAX_BYTES
) -> int:
    """Return the bytes of ``text``, the value of ``option``; UsageError unless it is a size up to ``max_bytes``."""
    max_tib = max_bytes >> 40
    message = f"{option}: expected a size such as {example}, at most {max_tib}TiB, given {text[:100]!r}"
    # a number, and a unit such as ``GiB``, ``G`` or ``MB``
    match = re.fullmatch(
        r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE
    )
    if match is None:
        raise UsageError(message)
    number, unit = float(match[1]), match[2].casefold()
    if unit not in _UNITS or not 1 <= number * _UNITS[unit] <= max_bytes:
        raise UsageError(message)
    return int(number * _UNITS[unit])


VERBS = {"plan": (Options, EXAMPLES, run)}
