"""The verb ``plan``: the memory that a run would need, also on a device that this machine does not have."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lm_profiler.analysis.plan.planned import (
    ANY_GPU,
    Alternative,
    Capacity,
    Plan,
    Planned,
    capacity,
    fits,
    planned_floors,
)
from lm_profiler.analysis.remedies.catalogue import combined_remedies, remedies
from lm_profiler.analysis.remedies.remedy import Smaller
from lm_profiler.cli.surroundings import quiet_libraries
from lm_profiler.cli.verbs.shared import choose_answer_format, show, writable, write, write_json
from lm_profiler.measure.boundary import say
from lm_profiler.models.config import other_meanings
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Collection
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.report.pictures.over_time import memory_timelines, titled_timelines
from lm_profiler.report.pictures.plots import SUFFIXES, TIMELINE, check_picture, save_figure
from lm_profiler.report.run.plan_table import allocation_tables, plan_table, remedy_table
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

_AT_ONCE = 2  # rehearsals that run at the same time; each keeps one core busy

_SIZES = {f"{prefix}{kind}": base**n for n, prefix in enumerate("kmgt", 1) for kind, base in (("", 1000), ("i", 1024))}

_MOST_BYTES = 1 << 50  # the largest ``--memory`` that is accepted: 1024 TiB, a hundred times what any machine has


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the memory that each phase of a training step would take, and the largest batch and context that fit.

    Nothing is trained, and no GPU is needed: the step is rehearsed on tensors without data.

    Args:
        device: The GPU, by a name such as H100 or "A100 80GB"; if not given, this machine.
        memory: Memory of the device, such as 80GiB, instead of its usual size.
        bandwidth: Bytes per second that each of several devices can send to others, such as 450e9 for an H100's NVLink;
            if not given, the floor of the step excludes communication.
        allocations: Add the largest allocations at the peak, what is saved for backward, and three moments.
        plot: memory_timeline, the bytes in use over one step by cause; with --output FILE.svg, .png, .pdf or .html.
        format: terminal, markdown, latex, typst, or json with all figures; if not given, by output's suffix.
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
        known = self.bandwidth is None or 0 < self.bandwidth < math.inf
        expect(known, "bandwidth", "bytes a second, such as 450e9", self.bandwidth)
        expect(self.plot in (None, TIMELINE), "plot", TIMELINE, self.plot)
        tables_to = self.output if self.plot is None else None
        object.__setattr__(self, "format", choose_answer_format(self.format, tables_to))
        if self.plot is not None:
            if self.output is None:
                raise UsageError(f"plot: expected --output FILE too, given none; end FILE with {', '.join(SUFFIXES)}")
            check_picture(self.output)
        if self.output is not None:
            expect(self.output.parent.is_dir(), "output", "a file in a folder that is there", str(self.output))


def run(options: Options) -> int:
    """Print or write the plan; return the exit code: 1 where ``fit`` would refuse the run, or it cannot be planned."""
    file = options.output if options.plot is None else None
    tables = list[Table]()
    # On a terminal each table is shown as soon as it is known: remedies take a while.
    is_shown = file is None and options.format == "terminal"
    try:
        answer = planned(options, show if is_shown else tables.append)
    except CannotPlan as error:
        for line in str(error).splitlines():
            say(line)
        return FAILED
    if options.format == "json":
        write_json(answer, file)
    elif tables:
        write(Collection(), tables, options.format or "terminal", file)
    return FAILED if answer.fits is False else OK


class CannotPlan(Exception):
    """A run that cannot be rehearsed; the message says why."""


def planned(options: Options, shown: Callable[[Table], object]) -> Plan:
    """Return the plan; ``shown`` gets each table as soon as it is known.

    Raises:
        UsageError: the call is wrong.
        CannotPlan: the run cannot be rehearsed.
    """
    device = _device(options)
    sys.path.append(str(Path.cwd()))  # as fit does: a user's module is there
    known = []
    for answer in _rehearsed(options.options, device, [((), "batch"), ((), "context")]):
        if not isinstance(answer, Planned):
            if answer.wrong:
                raise UsageError(answer.reason)
            raise CannotPlan(f"cannot be planned: {answer.reason}")
        known.append(answer)
    batch, context = known
    for line in other_meanings([batch.settings.get("model.size", "")]):
        say(line)
    floors = partial(planned_floors, device=device.name, link_bytes_per_s=options.bandwidth)
    shown(plan_table(batch, context.largest, device, floors(batch)))
    if batch.timeline is not None:
        _show_timeline(batch.timeline, options, shown)
    smaller = list[Alternative]()
    if not fits(batch, device.bytes):
        tried = _tried(remedies(batch, context.largest), options.options, device)
        # Combinations are rehearsed only where no single remedy is enough: each costs a rehearsal.
        if not any(fits(planned, device.bytes) for _, planned in tried):
            tried += _tried(combined_remedies(batch), options.options, device)
        shown(remedy_table([(way, planned, floors(planned)) for way, planned in tried], device))
        smaller = [
            Alternative(way.words, way.changes, of.needs, fits(of, device.bytes), floors(of).seconds)
            for way, of in tried
        ]
    kept = batch if options.allocations else replace(batch, timeline=None)
    return Plan(kept, device, fits(batch, device.bytes), batch.needs, context.largest, floors(batch).seconds, smaller)


def _tried(ways: Sequence[Smaller], options: Sequence[str], device: Capacity) -> list[tuple[Smaller, Planned]]:
    """Return the remedies that could be rehearsed, with their plans; module or Trainer may refuse some."""
    answers = zip(ways, _rehearsed(options, device, [(way.words, "nothing") for way in ways]), strict=True)
    return [(way, answer) for way, answer in answers if isinstance(answer, Planned)]


def _rehearsed(
    options: Sequence[str], device: Capacity, questions: Sequence[tuple[Sequence[str], str]]
) -> Iterator[Planned | Unplanned]:
    """Rehearse the call once for each question, its further options and what to maximize; two run at a time."""
    from lm_profiler.cli.rehearse import ask, told  # torch is imported only where a plan is made, not for --help

    quiet_libraries()
    for at in range(0, len(questions), _AT_ONCE):
        calls = [(["fit", *options, *more], what) for more, what in questions[at : at + _AT_ONCE]]
        asked = [ask(call, device.gpu, what, device.bytes, _LIMIT_S) for call, what in calls]
        try:
            yield from map(told, asked)
        finally:
            for each in asked:
                each.end()


def _show_timeline(timeline: MemoryTimeline, options: Options, shown: Callable[[Table], object]) -> None:
    if options.allocations:
        for table in allocation_tables(timeline):
            shown(replace(table, above=["", *table.above]) if table.above[0] else table)
    if options.plot is not None and options.output is not None:
        with writable(options.output):
            save_figure(partial(memory_timelines, titled_timelines([timeline])), options.output)
        say(f"written to {options.output}")


def _device(options: Options) -> Capacity:
    """Return the name and the memory of the device that the options ask for; without any, of this machine's."""
    given = None if options.memory is None else size_bytes(options.memory, "memory", "80GiB")
    if options.device is not None:
        known = capacity(options.device)
        return known if given is None else replace(known, bytes=given)
    if given is not None:
        return Capacity("a GPU", given, gpu=ANY_GPU)
    import torch

    from lm_profiler.cli.rehearse import gpu_of
    from lm_profiler.measure.device.environment import device_name
    from lm_profiler.measure.memory.peaks import available_bytes

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    free = available_bytes(device)
    if free is None:
        raise UsageError(f"memory: expected a size such as 80GiB, for {device_name(device)} does not report its memory")
    return Capacity(device_name(device), free, is_free=True, gpu=gpu_of(device))


def size_bytes(text: str, option: str, example: str, most: int = _MOST_BYTES) -> int:
    """Return ``text``, the value of ``option``, as bytes; UsageError: it is not a size up to ``most``."""
    read = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = None if read is None else _SIZES.get(read[2].casefold())
    if read is None or unit is None or not 1 <= float(read[1]) * unit <= most:
        raise UsageError(f"{option}: expected a size such as {example}, at most {most >> 40}TiB, given {text[:100]!r}")
    return int(float(read[1]) * unit)


VERBS = {"plan": (Options, EXAMPLES, run)}
