"""Reads a trace that torch.profiler wrote of any program, and finds its steps and phases.

A phase is a range with a known name: one of our instruments, one of the program itself (such as "forward"), or one of
torch (``Optimizer.step#…``, an autograd node). All other time has no phase.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_profiler.analysis.trace.large_trace import (
    MOST_EVENTS,
    TooManyEvents,
    TracePart,
    chosen_part,
    events_in_part,
    limited_events,
)
from lm_profiler.analysis.trace.packed_trace import (
    PackedTrace,
    Range,
    innermost,
    outermost,
)
from lm_profiler.analysis.trace.pieces import TracedWork, traced_work
from lm_profiler.analysis.trace.range_names import STEP_PREFIX
from lm_profiler.analysis.trace.trace_file import (
    Event,
    ReportPosition,
    ignore_position,
    trace_events,
)
from lm_profiler.analysis.trace.trace_processes import (
    SeveralProcesses,
    TraceProcess,
    chosen_process,
    events_of_process,
)
from lm_profiler.record.parts import PHASES
from lm_profiler.record.trace_answer import StepSource

# beginnings of the names of torch's own ranges, with their phases
_TORCH_RANGES = {
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "zero_grad",
    "enumerate(DataLoader)#": "data",
    "DistributedDataParallel.forward": "forward",
    "FullyShardedDataParallel.forward": "forward",
    "autograd::engine::evaluate_function: ": "backward",
}

# names of a program's own ranges, possibly with other signs around them; version 0.2 wrote "phase: forward"
_OWN_NAMES = re.compile(r"\W*(?:phase: )?(?P<phase>\w+?)(?:[ _](?:pass|step))?\W*")
_OTHER_WORDS = {
    "fwd": "forward",
    "bwd": "backward",
    "dataloader": "data",
    "data_loading": "data",
}

_NUMBER_AT_END = r"[\s_#:.\[\(-]*\d*[\]\)]*"
_MOST_NAMES = 5  # the most ranges that a message lists


@dataclass(frozen=True)
class AnyTrace:
    """The work in the steps of a trace, and the metadata of the trace."""

    path: Path
    work: TracedWork
    step_source: StepSource
    step_name: str | None  # the name of the range that the user requested as step
    # the name of the device, as its driver reports it; None if the trace has no device, or several kinds
    device_name: str | None
    rank: int | None
    world_size: int | None
    # describes the part that is shown, if the trace is too large
    part_words: str | None = None
    # for a file with several processes: the one that is shown, and all of them
    process: TraceProcess | None = None
    processes: Sequence[TraceProcess] = ()


def read_any_trace(
    path: Path,
    step_name: str | None = None,
    most_events: int = MOST_EVENTS,
    process_name: str | None = None,
    report_position: ReportPosition = ignore_position,
) -> AnyTrace:
    """Read the trace in ``path``.

    Args:
        path: the file. If it is large, it is read several times.
        step_name: the name of the ranges that are its steps; None for the profiler's own steps.
        most_events: of a trace with more events, only the first steps are read.
        process_name: the process to read of a file with several; None for the one with steps and the most work.
        report_position: is called with the number of bytes read so far, in each reading.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a whole trace, has no such range or process, or nothing ran in its steps.
    """
    is_step = _step_names(step_name)
    metadata: dict[str, Any] = {}
    processes: Sequence[TraceProcess] = ()
    process = None
    try:
        packed, part = _read_packed(
            path,
            is_step,
            metadata=metadata,
            most_events=most_events,
            process=None,
            report_position=report_position,
        )
    except SeveralProcesses as error:
        processes = error.processes
        process = chosen_process(processes, process_name)
        packed, part = _read_packed(
            path, is_step, metadata, most_events, process, report_position
        )
    if process is None and process_name is not None:
        _check_process(packed, process_name)
    source = _choose_steps(packed, part, is_step, step_name)
    work = traced_work(packed)
    if not work.pieces:
        raise ValueError("nothing ran in its steps")

    distributed = metadata.get("distributedInfo")
    # in a file of several processes this is about only one of them
    if not isinstance(distributed, dict) or process is not None:
        distributed = {}
    return AnyTrace(
        path=path,
        work=work,
        step_source=source,
        step_name=step_name,
        device_name=_device_name(metadata.get("deviceProperties"), packed.devices),
        rank=_whole_number(distributed.get("rank")),
        world_size=_whole_number(distributed.get("world_size")),
        part_words=None if part is None else part.words,
        process=process,
        processes=processes,
    )


def _choose_steps(
    packed: PackedTrace,
    part: TracePart | None,
    is_step: Callable[[str], bool],
    step_name: str | None,
) -> StepSource:
    """Set the steps of ``packed``, and its phases if it has none; return where the steps come from.

    Args:
        packed: the trace. If its steps are named by the user, the time between them is removed.
        part: the part of the trace that was read, which has steps of its own; None for all of it.
        is_step: returns whether a range is a step, by its name.
        step_name: the name of the ranges that are its steps; None for the profiler's own steps.
    """
    if step_name is not None:
        packed.steps = _steps_named(packed, is_step, step_name)
    if part is not None:
        packed.steps = part.steps
    if not packed.phases:
        packed.phases = named_phases(packed)
    if step_name is not None:
        packed.remove_stretches(_time_between(packed))
    packed.steps = [step for step in packed.steps if step.end > step.start]
    if not packed.steps:
        packed.steps = [_whole_trace(packed)]
        return "whole"
    return "ProfilerStep" if step_name is None else "range"


def _whole_trace(packed: PackedTrace) -> Range:
    """Return the whole trace as one step; raise ValueError if it takes no time."""
    begin, end = packed.extent()
    if end <= begin:
        raise ValueError("its events take no time")
    return Range(begin, end, "the whole trace")


def processes_in(path: Path, most_events: int = MOST_EVENTS) -> Sequence[TraceProcess]:
    """Return the processes whose work is in ``path``; empty for a trace of a single process.

    Raises the same errors as ``read_any_trace``.
    """
    try:
        _read_packed(path, _step_names(step_name=None), {}, most_events)
    except SeveralProcesses as error:
        return error.processes
    return ()


def part_notes(traces: Iterable[AnyTrace]) -> list[str]:
    """Return a note for each of ``traces`` of which only a part was read."""
    notes = []
    for trace in traces:
        if trace.part_words is not None:
            notes.append(f"{trace.path.name}: {trace.part_words}")
    return notes


def _read_packed(
    path: Path,
    is_step: Callable[[str], bool],
    metadata: dict[str, Any],
    most_events: int,
    process: TraceProcess | None = None,
    report_position: ReportPosition = ignore_position,
) -> tuple[PackedTrace, TracePart | None]:
    """Return the trace, or if it is too large its first steps, and a description of that part (None: all).

    If ``process`` is given, only its events are read. The fields of the file beside its events are put into
    ``metadata``.
    """
    try:
        all_events = _events_in_file(path, metadata, process, report_position)
        events = limited_events(all_events, most_events)
        return PackedTrace(events, any_program=True), None
    except TooManyEvents:
        # read again to choose the part, and then to keep its events
        all_events = _events_in_file(path, {}, process, report_position)
        part = chosen_part(all_events, is_step, most_events)
    all_events = _events_in_file(path, metadata, process, report_position)
    events = events_in_part(all_events, part)
    return PackedTrace(events, any_program=True), part


def _events_in_file(
    path: Path,
    metadata: dict[str, Any],
    process: TraceProcess | None,
    report_position: ReportPosition,
) -> Iterator[Event]:
    """Yield the events in ``path``; if ``process`` is given, only its events."""
    events = trace_events(path, metadata, report_position)
    if process is None:
        return events
    return events_of_process(events, process)


def _check_process(packed: PackedTrace, process_name: str) -> None:
    """Raise ValueError if the process of the trace, of which there is only one, has another name."""
    names = sorted({process for process, _ in packed.threads})
    if process_name not in names:
        raise ValueError(
            f"the trace has no process {process_name!r}; it has {', '.join(names)}"
        )


def _step_names(step_name: str | None) -> Callable[[str], bool]:
    """Return a function that takes the name of a range, and returns whether the range is a step.

    Names of steps are those of the profiler, or ``step_name``, possibly with a number.
    """
    if step_name is None:
        return lambda name: name.startswith(STEP_PREFIX)
    pattern = re.compile(re.escape(step_name) + _NUMBER_AT_END)
    return lambda name: pattern.fullmatch(name) is not None


def _steps_named(
    packed: PackedTrace, is_step: Callable[[str], bool], step_name: str
) -> list[Range]:
    """Return the ranges that are steps; of nested ones only the outermost."""
    ranges = [*packed.ranges, *packed.steps]
    steps = outermost(annotation for annotation in ranges if is_step(annotation.name))
    if not steps:
        raise ValueError(f"it has no range {step_name!r}{_names_text(packed.ranges)}")
    return steps


def _time_between(packed: PackedTrace) -> list[tuple[int, int]]:
    """Return the stretches between the steps, from when the device has finished a step to when the next one begins."""
    done = packed.device_done_after([step.end for step in packed.steps])
    stretches = []
    for step_done, following in zip(done, packed.steps[1:], strict=False):
        if step_done < following.start:
            stretches.append((step_done, following.start))
    return stretches


def _names_text(ranges: Iterable[Range]) -> str:
    """Return the end of a message that lists the most frequent names of ranges."""
    counts = Counter(annotation.name for annotation in ranges)
    names = [repr(name) for name, _ in counts.most_common(_MOST_NAMES)]
    if not names:
        return "; it has no ranges at all (torch.profiler.record_function makes them)"
    return f"; it has {', '.join(names)}"


def named_phases(packed: PackedTrace) -> list[Range]:
    """Return the stretches of time in ranges with the name of a phase, ordered by start; the innermost range counts."""
    ranges = []
    for annotation in packed.ranges:
        phase = phase_named(annotation.name)
        if phase is not None:
            ranges.append(Range(annotation.start, annotation.end, phase))

    # torch's own ranges, some of which are operators in the trace; by the number of their name
    phase_of_number: dict[int, str] = {}
    for number, name in enumerate(packed.names):
        if name is not None and name.startswith(tuple(_TORCH_RANGES)):
            phase_of_number[number] = phase_named(name) or ""
    for start, end, number in packed.operators_named(list(phase_of_number)):
        ranges.append(Range(start, end, phase_of_number[number]))
    return innermost(ranges)


def phase_named(range_name: str) -> str | None:
    """Return the phase of a range of any program, by its name; None if it is not one of a phase.

    >>> [phase_named(name) for name in ("## backward ##", "Optimizer.step#AdamW.step", "phase: rollout")]
    ['backward', 'optimizer', None]
    """
    for beginning, phase in _TORCH_RANGES.items():
        if range_name.startswith(beginning):
            return phase
    match = _OWN_NAMES.fullmatch(range_name)
    if match is None:
        return None
    word = match["phase"].lower()
    word = _OTHER_WORDS.get(word, word)
    return word if word in PHASES else None


def _device_name(properties: Any, devices: Sequence[str]) -> str | None:
    """Return the model of the devices on which kernels ran; None if it is unknown, or if the models differ.

    Args:
        properties: the metadata of the trace about all devices of the machine.
        devices: the numbers of the devices on which kernels ran; empty for all devices.
    """
    if not isinstance(properties, list):
        return None
    names = set()
    for device in properties:
        if not isinstance(device, dict) or not isinstance(device.get("name"), str):
            continue
        if not devices or str(device.get("id")) in devices:
            names.add(device["name"])
    return names.pop() if len(names) == 1 else None


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
