"""Keeps the relevant fields of a trace's events in arrays, about 50 bytes per event.

Times are integers of nanoseconds.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.trace.module_events import is_module_event, nested_names
from lm_profiler.analysis.trace.range_names import (
    STEP_PREFIX,
    is_marked_range,
    module_in,
    phase_in,
    repeated_module_in,
)
from lm_profiler.analysis.trace.trace_file import Event, OperatorEvents
from lm_profiler.analysis.trace.trace_processes import (
    DeviceWork,
    Launch,
    ProcessCounts,
    SeveralProcesses,
    TraceProcess,
    Track,
    track_of,
)
from lm_profiler.record.parts import BETWEEN_STEPS, NO_PHASE

Rows = NDArray[np.int64]

# Graphs of torch.compile get this name; the profiler's name also has a digest, which differs between graphs.
COMPILED_GRAPH = "CompiledFxGraph"
_COMPILED = f"## Call {COMPILED_GRAPH}"

# beginnings of the names of collectives on the host; collectives on a device are kernels
_BACKENDS = ("gloo:", "mpi:", "ucc:")

# the name of autograd's range around the run of a node of the graph, and the fields that identify the node
_NODE_RUN = "autograd::engine::evaluate_function"
_NODE_FIELDS = ("Fwd thread id", "Sequence number")
_NODE_NUMBERS = re.compile(r'"(Fwd thread id|Sequence number)": (\d+)')

# the range in which FSDP2 gathers the parameters of a module (``FSDPParamGroup.unshard``); the root has no name in it
_GATHER = re.compile(r"FSDP::all_gather(?: \((.+)\))?")

_KEPT_CATEGORIES = frozenset({"cpu_op", "user_annotation", "fwdbwd"})
_LAUNCH_CATEGORIES = ("_runtime", "_driver")  # ends of categories
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

# the columns of a row of the host's events: see ``PackedTrace.host_rows``
START, LENGTH, THREAD, KIND, VALUE, REST = range(6)

# the kinds of host events
OPERATOR, MODULE, FORWARD_LINK, BACKWARD_LINK, LAUNCH = range(5)
_LINKS = {"s": FORWARD_LINK, "f": BACKWARD_LINK}

NONE = -1  # stands for a number that is unknown or missing
# Later events (after the year 2096) and longer ones (11 days) are damaged. All differences then fit into 64 bits.
_LATEST_US, _LONGEST_US = 4e15, 1e12


class Range(NamedTuple):
    """A named stretch of the host's time."""

    start: int
    end: int
    name: str


class DeviceRow(NamedTuple):
    """One kernel, copy or memset."""

    start: int
    length: int
    name: int  # the number of its name
    correlation: int  # a number that it shares with its launch


class Inputs(NamedTuple):
    """The inputs of an operator, one entry per argument, as the profiler writes them if it records shapes."""

    dims: Sequence[Any]  # the sizes of a tensor; for a list of tensors, a list of them
    types: Sequence[str]
    # only kept for attention, where they show whether it is causal
    values: Sequence[str]


class DamagedEvent(ValueError):
    """Raised if an event lacks a field that its kind must have, or has an impossible value. The message says which."""


class PackedTrace:
    """The relevant part of a trace's events.

    Names and inputs of operators are stored once and referred to by their number, the index in ``names`` and
    ``inputs``. The last entry of each is None, so that NONE (-1) refers to it. Damaged events are left out;
    ``damaged_events`` counts them by the kind of damage.

    Args:
        events: the events of the trace, in any order.
        any_program: whether the trace may be of a program without this profiler. Then only marked ranges belong to its
            instruments. (Version 0.2 did not mark them, and such ranges could be the program's own.)

    Raises:
        SeveralProcesses: the trace has the work of several processes; the error names them and their devices.
    """

    def __init__(self, events: Iterable[Event], any_program: bool = False) -> None:
        packing = _Packing()
        for event in events:
            packing.add(event)
        self._host_rows = packing.host_rows()
        self._device_rows = packing.device_rows()
        processes = packing.processes(self._host_rows, self._device_rows)
        if len(processes) > 1:
            raise SeveralProcesses(processes)

        self.damaged_events = packing.damaged_events
        self.has_marks = packing.has_marks
        self.devices = sorted(packing.devices)
        self.names: list[str | None] = [*packing.name_numbers, None]
        self.inputs: list[Inputs | None] = [*packing.inputs, None]
        self.threads = list(packing.threads)  # process and thread, by their number
        # by start and correlation of a row of the device
        self.groups = packing.groups
        self.collective_names = packing.collective_names
        self.copied_bytes = packing.copied_bytes

        # the host's ranges
        self.ranges = sorted(packing.ranges)
        self.steps = sorted(packing.steps)
        self.collectives = packing.collectives
        self.gathers = packing.gathers
        # repeated passes of modules on the same inputs, named by the module; they may be nested
        self.repeated_passes = sorted(packing.repeated_passes)
        # The runs of nodes of autograd's graph, named by the node. Each operator of forward creates a node, which
        # usually runs once.
        self.node_runs = sorted(packing.node_runs)
        only_marked_ranges = packing.has_marks or any_program
        self.phases = _phases_among(packing.ranges, only_marked_ranges)

        self._name_modules(only_marked_ranges)
        self._remove_time_between_steps()
        self._remove_steps_without_phases()
        self.has_device = len(self._device_rows) > 0

    def _remove_time_between_steps(self) -> None:
        """Remove the time that the instruments marked as outside the steps, such as a validation."""
        stretches = []
        for phase in self.phases:
            if phase.name == BETWEEN_STEPS:
                stretches.append((phase.start, phase.end))
        if stretches:
            self.remove_stretches(stretches)

    def _remove_steps_without_phases(self) -> None:
        """Remove steps that are not of the run: torch's profiler may add one after the last.

        A trace that has no phases at all keeps its steps.
        """
        if not self.phases:
            return
        phase_starts = [phase.start for phase in self.phases]
        steps_with_phases = []
        for step in self.steps:
            if _begins_within(phase_starts, step):
                steps_with_phases.append(step)
        self.steps = steps_with_phases

    def _name_modules(self, only_marked_ranges: bool) -> None:
        """Name modules by path and class, and remove ranges of the program itself that only look like modules.

        With ``only_marked_ranges``, a range that the instruments did not mark is not one of a module. If the
        instruments named no modules, the modules of the profiler's own events are used.
        """
        name_numbers = self._host_rows[:, VALUE]
        is_module = self._host_rows[:, KIND] == MODULE
        modules_of_instruments = []
        modules_of_profiler = []
        for number in np.unique(name_numbers[is_module]).tolist():
            name = self.names[number] or ""
            module = module_in(name, only_marked_ranges)
            if module is not None:
                modules_of_instruments.append(number)
                self.names[number] = module.path
                if module.type_name is not None:
                    self.names[number] = f"{module.path} ({module.type_name})"
            elif is_module_event(name):
                modules_of_profiler.append(number)

        modules = modules_of_instruments or modules_of_profiler
        is_kept = ~is_module | np.isin(name_numbers, modules)
        self._host_rows = self._host_rows[is_kept]
        if not modules_of_instruments and modules_of_profiler:
            self._nest_module_events()

    def _nest_module_events(self) -> None:
        """Name the modules of the profiler's own events by how they are nested, since the events do not state it."""
        rows = self.host_rows()
        is_module = rows[:, KIND] == MODULE
        module_rows = rows[is_module]
        spans = module_rows[:, [START, LENGTH, THREAD]].tolist()
        event_names = [self.names[number] or "" for number in module_rows[:, VALUE]]

        # Each path becomes a name with a number, to which the rows then refer.
        number_by_name = {name: number for number, name in enumerate(self.names[:-1])}
        path_numbers = []
        for path in nested_names(spans, event_names):
            if path not in number_by_name:
                number_by_name[path] = len(self.names) - 1
                self.names.insert(-1, path)  # the last entry stays None
            path_numbers.append(number_by_name[path])
        rows[is_module, VALUE] = path_numbers
        self._host_rows = rows

    def remove_stretches(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Remove ``stretches`` of time, such as a validation, and the events that began in them.

        Later events are moved to earlier times, as if the stretches had not existed. Each stretch is a start and an
        end; they are ordered and do not overlap.
        """
        # an empty stretch at 0, so that each time has a last stretch before it
        starts, ends = np.array([(0, 0), *stretches]).T
        removed_ns = np.cumsum(ends - starts)

        def moved(times: Any) -> Any:
            """Return ``times`` minus the stretches before them; a time within a stretch becomes the stretch's begin."""
            last_stretch = np.searchsorted(starts, times, side="right") - 1
            return np.maximum(times, ends[last_stretch]) - removed_ns[last_stretch]

        def moved_rows(rows: Rows) -> Rows:
            """Return moved ``rows`` of the host or of the device, without those that began in a stretch."""
            row_starts = rows[:, START]
            last_stretch = np.searchsorted(starts, row_starts, side="right") - 1
            began_outside = row_starts >= ends[last_stretch]
            rows = rows[began_outside]
            row_starts = moved(rows[:, START])
            row_ends = moved(rows[:, START] + rows[:, LENGTH])
            other_columns = rows[:, LENGTH + 1 :]
            return np.column_stack((row_starts, row_ends - row_starts, other_columns))

        def moved_ranges(ranges: Sequence[Range]) -> list[Range]:
            """Return moved ``ranges``, without those that are empty now."""
            new_ranges = []
            for name_range in ranges:
                start = int(moved(name_range.start))
                end = int(moved(name_range.end))
                if end > start:
                    new_ranges.append(Range(start, end, name_range.name))
            return new_ranges

        self.steps = moved_ranges(self.steps)
        self.phases = moved_ranges(self.phases)
        self.collectives = moved_ranges(self.collectives)
        self.gathers = moved_ranges(self.gathers)
        self.repeated_passes = moved_ranges(self.repeated_passes)
        self.node_runs = moved_ranges(self.node_runs)
        self._host_rows = moved_rows(self._host_rows)
        self._device_rows = moved_rows(self._device_rows)

    def extent(self) -> tuple[int, int]:
        """Return when the first event began and when the last one ended; ValueError if there are no events."""
        spans = np.vstack((self._host_rows[:, :2], self._device_rows[:, :2]))
        if len(spans) == 0:
            raise ValueError("it has neither operators nor kernels")
        starts, lengths = spans.T
        ends = starts + lengths
        return int(starts.min()), int(ends.max())

    def operators_named(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return [start, end, number of the name] of the operators whose names have these ``numbers``, unordered."""
        start, length, _, kind, value, _ = self._host_rows.T
        is_wanted = (kind == OPERATOR) & np.isin(value, numbers)
        spans = np.column_stack((start, start + length, value))
        wanted_spans: list[list[int]] = spans[is_wanted].tolist()
        return wanted_spans

    def device_done_after(self, moments: Sequence[int]) -> list[int]:
        """Return for each of the sorted ``moments`` when the device had finished all work launched before it."""
        is_launch = self._host_rows[:, KIND] == LAUNCH
        launches = self._host_rows[is_launch][:, [START, VALUE]].tolist()
        launch_by_correlation = {correlation: start for start, correlation in launches}
        works = []  # pairs: when the work was launched, and when it ended
        for start, length, _, correlation in self._device_rows.tolist():
            launch = launch_by_correlation.get(correlation, start)
            works.append((launch, start + length))
        works.sort()

        finish_times = []
        latest_end = 0  # among all work that was launched before the moment
        next_work = 0
        for moment in moments:
            while next_work < len(works):
                launch, end = works[next_work]
                if launch > moment:
                    break
                latest_end = max(latest_end, end)
                next_work += 1
            finish_times.append(max(moment, latest_end))
        return finish_times

    def links(self, kind: int) -> Rows:
        """Return (links, 2) the moment and the number of each link of a ``kind``: FORWARD_LINK or BACKWARD_LINK."""
        is_wanted = self._host_rows[:, KIND] == kind
        links: Rows = self._host_rows[is_wanted][:, [START, VALUE]]
        return links

    def steps_window(self) -> tuple[int, int]:
        """Return when the first step begins and when the last one ends; ValueError if there is no whole step."""
        if not self.steps:
            raise ValueError("the trace has no complete step")
        return self.steps[0].start, max(step.end for step in self.steps)

    def device_rows(self) -> Iterator[DeviceRow]:
        """Yield everything that ran on the device, ordered by start."""
        order = np.argsort(self._device_rows[:, START], kind="stable")
        return map(DeviceRow._make, self._device_rows[order].tolist())

    def host_rows(self) -> Rows:
        """Return (events, 6) start, length, thread, kind, value and rest of the host's events, ordered by start.

        | kind | value | rest |
        | --- | --- | --- |
        | OPERATOR | the number of its name | the number of its inputs |
        | MODULE | the number of its name | NONE |
        | FORWARD_LINK, BACKWARD_LINK | the number of the link | NONE |
        | LAUNCH | its correlation | the number of its name |
        """
        rows = self._host_rows
        # Of events that start at the same moment, ranges come before links and launches, and a longer range comes
        # before the ranges within it. Ranges are operators and modules: their kinds, 0 and 1, become equal.
        range_first = np.maximum(rows[:, KIND], MODULE)
        longest_first = -rows[:, LENGTH]
        # the last key counts most
        order = np.lexsort((longest_first, range_first, rows[:, START]))
        return rows[order]


def _phases_among(ranges: Iterable[Range], only_marked_ranges: bool) -> list[Range]:
    """Return the phases of the instruments among ``ranges``, with the phases' names, ordered by start."""
    phases = []
    for annotation in ranges:
        phase = phase_in(annotation.name, only_marked_ranges)
        if phase is not None:
            phases.append(Range(annotation.start, annotation.end, phase))
    return [piece for piece in innermost(phases) if piece.name != NO_PHASE]


def innermost(ranges: Iterable[Range]) -> list[Range]:
    """Cut nested ``ranges`` into pieces that do not overlap; each piece has the name of the innermost range there."""
    pieces: list[Range] = []
    # the ranges that contain the present moment, the outermost first
    open_ranges: list[Range] = []
    moment = 0  # the pieces are complete up to here

    def add_piece(end: int, name: str) -> None:
        """Add the piece from ``moment`` to ``end``, if it is not empty, and advance ``moment``."""
        nonlocal moment
        if end > moment:
            pieces.append(Range(moment, end, name))
            moment = end

    for next_range in sorted(ranges, key=_outer_first_key):
        while open_ranges and open_ranges[-1].end <= next_range.start:
            innermost_range = open_ranges.pop()
            add_piece(innermost_range.end, innermost_range.name)
        if open_ranges:
            add_piece(next_range.start, open_ranges[-1].name)
        open_ranges.append(next_range)
        moment = next_range.start
    while open_ranges:
        innermost_range = open_ranges.pop()
        add_piece(innermost_range.end, innermost_range.name)
    return pieces


def outermost(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges that do not begin within another one, ordered by start."""
    outer_ranges: list[Range] = []
    for candidate in sorted(ranges, key=_outer_first_key):
        if not outer_ranges or candidate.start >= outer_ranges[-1].end:
            outer_ranges.append(candidate)
    return outer_ranges


def _outer_first_key(name_range: Range) -> tuple[int, int]:
    """Return a sort key: by start, and of equal starts the longest range, which holds the others, first."""
    return name_range.start, -name_range.end


def _begins_within(starts: Sequence[int], step: Range) -> bool:
    """Return whether any of the sorted ``starts`` is within ``step``."""
    return bisect_left(starts, step.start) < bisect_left(starts, step.end)


def _numbering() -> defaultdict[Any, int]:
    """Return a mapping that gives each new key the next number."""
    return defaultdict(count().__next__)


@dataclass
class _Packing:
    """Collects the relevant fields of events, most of them in growing arrays."""

    steps: list[Range] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)  # ranges that may be phases
    collectives: list[Range] = field(default_factory=list)
    gathers: list[Range] = field(default_factory=list)
    repeated_passes: list[Range] = field(default_factory=list)
    node_runs: list[Range] = field(default_factory=list)
    process_counts: ProcessCounts = field(default_factory=ProcessCounts)
    devices: set[str] = field(default_factory=set)  # the numbers of devices
    # The next three are by start and correlation of a row of the device:
    # the process groups of collectives
    groups: dict[tuple[int, int], str] = field(default_factory=dict)
    # the profiler's own names of collectives
    collective_names: dict[tuple[int, int], str] = field(default_factory=dict)
    # the bytes of copies
    copied_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    has_marks: bool = False  # whether the instruments mark the names of their ranges, as they do since version 0.3
    damaged_events: Counter[str] = field(default_factory=Counter)
    # the number of each name
    name_numbers: defaultdict[str, int] = field(default_factory=_numbering)
    inputs: list[Inputs] = field(default_factory=list)
    # the number of each thread, by process and thread
    threads: defaultdict[tuple[str, str], int] = field(default_factory=_numbering)
    tracks: defaultdict[Track, int] = field(default_factory=_numbering)
    # The number of each caller. A caller is the text of an operator's event with name, process and thread, which is the
    # same for many operators.
    _callers: defaultdict[str, int] = field(default_factory=_numbering)
    # the number of each operator's inputs, by their text
    _input_numbers: dict[str, int] = field(default_factory=dict)
    # (4, operators) each: start, length, caller's number, inputs' number
    _operators: list[Rows] = field(default_factory=list)
    # six numbers an event: see ``PackedTrace.host_rows``
    _host: array[int] = field(default_factory=lambda: array("q"))
    # four numbers: start, length, name, correlation
    _device: array[int] = field(default_factory=lambda: array("q"))
    # the number of the track of each of these
    _device_track: array[int] = field(default_factory=lambda: array("q"))

    def add(self, event: Event) -> None:
        """Keep the relevant fields of ``event``; if it is damaged, count the damage."""
        if isinstance(event, OperatorEvents):
            self._add_operators(event)
            return
        try:
            if not isinstance(event, Mapping):
                raise DamagedEvent("no object")
            self._add_decoded(event)
        except DamagedEvent as damage:
            self.damaged_events[str(damage)] += 1

    def processes(self, host_rows: Rows, device_rows: Rows) -> list[TraceProcess]:
        """Return the processes that did the work in the rows; with their devices only if there are several.

        Steps and launches were counted while events were added; operators are counted here.
        """
        process_of_thread = [process for process, _ in self.threads]
        is_operator = host_rows[:, KIND] == OPERATOR
        threads, counts = np.unique(host_rows[is_operator, THREAD], return_counts=True)
        for thread, calls in zip(threads.tolist(), counts.tolist(), strict=True):
            self.process_counts.operators[process_of_thread[thread]] += calls
        names = self.process_counts.names(has_device=len(device_rows) > 0)
        if len(names) < 2:
            return self.process_counts.with_devices(names, launches={}, work={})

        launches = self._launches_by_process(host_rows)
        work = self._work_by_track(device_rows)
        return self.process_counts.with_devices(names, launches, work)

    def _launches_by_process(self, host_rows: Rows) -> dict[str, dict[int, Launch]]:
        """Return the launches of each process, by their correlation numbers."""
        names = list(self.name_numbers)
        process_of_thread = [process for process, _ in self.threads]
        launches: defaultdict[str, dict[int, Launch]] = defaultdict(dict)
        is_launch = host_rows[:, KIND] == LAUNCH
        for start, _, thread, _, correlation, name in host_rows[is_launch].tolist():
            process = process_of_thread[thread]
            launches[process][correlation] = Launch(start, names[name])
        return launches

    def _work_by_track(self, device_rows: Rows) -> dict[Track, list[DeviceWork]]:
        """Return what ran on the device, by track."""
        names = list(self.name_numbers)
        tracks = list(self.tracks)
        work: defaultdict[Track, list[DeviceWork]] = defaultdict(list)
        for row, track in zip(device_rows.tolist(), self._device_track, strict=True):
            start, _, name, correlation = row
            device_work = DeviceWork(start, names[name], correlation)
            work[tracks[track]].append(device_work)
        return work

    def host_rows(self) -> Rows:
        """Return (events, 6) the rows of the host's events: first those that were decoded, then the other operators.

        They are in the order in which they were read; ``PackedTrace.host_rows`` lists the columns.
        """
        no_operators = np.empty((4, 0), np.int64)
        start, length, caller, inputs = np.hstack([no_operators, *self._operators])
        # (callers, 3) the columns that a caller determines: thread, kind and number of the name
        callers = []
        for text in self._callers:
            caller_fields = json.loads(f"{{{text}}}", strict=False)
            thread = self._thread_number(caller_fields)
            name_number = self.name_numbers[caller_fields["name"]]
            callers.append((thread, OPERATOR, name_number))
        caller_columns = np.array(callers, np.int64).reshape(-1, 3)
        operators = np.column_stack((start, length, caller_columns[caller], inputs))
        decoded_events = np.asarray(self._host).reshape(-1, 6)
        return np.vstack((decoded_events, operators))

    def device_rows(self) -> Rows:
        """Return (events, 4) the rows of what ran on the device, in the order in which they were read."""
        return np.asarray(self._device).reshape(-1, 4)

    def _add_operators(self, events: OperatorEvents) -> None:
        """Add operators by the text that the file has for them; a text that occurred before is not decoded again."""
        inputs = []
        for argument_text in events.arguments:
            # what comes before the inputs, such as a sequence number, may differ from call to call
            _, _, input_text = argument_text.partition('"Input ')
            if input_text not in self._input_numbers:
                arguments = json.loads(f"{{{argument_text}}}", strict=False)
                number = self._inputs_number(arguments, is_attention=False)
                self._input_numbers[input_text] = number
            inputs.append(self._input_numbers[input_text])
        callers = [self._callers[text] for text in events.callers]
        starts_ns = nanoseconds(events.starts)
        lengths_ns = nanoseconds(events.lengths)
        self._operators.append(np.array((starts_ns, lengths_ns, callers, inputs)))
        # the runs of nodes of autograd's graph
        for index, caller_text in enumerate(events.callers):
            if _NODE_RUN in caller_text:
                node_fields = dict(_NODE_NUMBERS.findall(events.arguments[index]))
                start = int(starts_ns[index])
                end = start + int(lengths_ns[index])
                self._add_node_run(start, end, node_fields)

    def _add_node_run(self, start: int, end: int, fields: Mapping[str, Any]) -> None:
        """Keep the run of a node of the graph, which two numbers among the ``fields`` identify.

        Nodes without numbers, which all backward passes share, are ignored.
        """
        numbers = [str(fields.get(name)) for name in _NODE_FIELDS]
        has_numbers = all(number.isdecimal() for number in numbers)
        if has_numbers:
            node = " ".join(numbers)
            self.node_runs.append(Range(start, end, node))

    def _add_decoded(self, event: Mapping[str, Any]) -> None:
        """Keep the relevant fields of an event; events of other categories are ignored."""
        category = event.get("cat")
        if not isinstance(category, str):  # null in some
            return
        arguments = event.get("args")
        if not isinstance(arguments, Mapping):
            arguments = {}

        if category == "cpu_op":
            name = _name_of(event)
            inputs = self._inputs_number(arguments, is_attention="attention" in name)
            self._add_host(event, OPERATOR, self.name_numbers[name], inputs)
            if name.startswith(_NODE_RUN):
                start, length = span_of(event)
                self._add_node_run(start, start + length, arguments)
        elif category in _DEVICE_CATEGORIES:
            self._add_on_device(event, arguments)
        elif category == "user_annotation":
            self._add_range(event)
        elif category == "python_function":  # where the profiler records stacks
            name = _name_of(event)
            if is_module_event(name):
                self._add_host(event, MODULE, self.name_numbers[name])
        elif category == "fwdbwd" and str(event.get("ph")) in _LINKS:
            # an end of a link between an operator of forward and its node in backward
            link = _number_in(event.get("id"))
            if link == NONE:
                raise DamagedEvent("a link without its number")
            self._add_host(event, _LINKS[str(event["ph"])], link)
        elif category.endswith(_LAUNCH_CATEGORIES):
            correlation = _number_in(arguments.get("correlation"))
            if correlation != NONE:
                name_number = self.name_numbers[_name_of(event)]
                self._add_host(event, LAUNCH, correlation, name_number)
                self.process_counts.launches[str(event.get("pid"))] += 1

    def _add_on_device(
        self, event: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        """Add the row of a kernel, copy or memset, and its group, collective or bytes if the profiler has them."""
        start, length = span_of(event)
        correlation = _number_in(arguments.get("correlation"))
        name_number = self.name_numbers[_name_of(event)]
        self._device.extend((start, length, name_number, correlation))
        self._device_track.append(self.tracks[track_of(event)])
        self.devices.add(str(arguments.get("device", event.get("pid"))))
        group = arguments.get("Process Group Name")
        collective = arguments.get("Collective name")
        copied_bytes = arguments.get("bytes")
        if isinstance(group, str):
            self.groups[start, correlation] = sys.intern(group)
        if isinstance(collective, str):
            self.collective_names[start, correlation] = sys.intern(collective)
        if not isinstance(copied_bytes, int) or isinstance(copied_bytes, bool):
            return
        if copied_bytes >= 0:
            self.copied_bytes[start, correlation] = copied_bytes

    def _add_range(self, event: Mapping[str, Any]) -> None:
        """Keep a range as a module, a step, a collective, or a phase, depending on its name."""
        name = _name_of(event)
        if is_marked_range(name):
            self.has_marks = True
        may_be_module = any(
            module_in(name, is_marked) is not None for is_marked in (True, False)
        )
        if may_be_module:
            self._add_host(event, MODULE, self.name_numbers[name])
            return
        if name.startswith(_COMPILED):
            self._add_host(event, OPERATOR, self.name_numbers[COMPILED_GRAPH])
            return

        start, length = span_of(event)
        repeated_module = repeated_module_in(name)
        if repeated_module is not None:
            self.repeated_passes.append(Range(start, start + length, repeated_module))
            return
        annotation = Range(start, start + length, name)
        gather = _GATHER.fullmatch(name)
        if name.startswith(STEP_PREFIX):
            self.steps.append(annotation)
            self.process_counts.steps[str(event.get("pid"))] += 1
        elif name.startswith(_BACKENDS):
            self.collectives.append(annotation)
        elif gather is not None:
            module_path = gather[1] or "the root"
            self.gathers.append(Range(annotation.start, annotation.end, module_path))
        else:
            self.ranges.append(annotation)

    def _inputs_number(self, arguments: Mapping[str, Any], is_attention: bool) -> int:
        """Return the number of an operator's inputs; equal inputs are stored once."""
        dims = arguments.get("Input Dims")
        types = arguments.get("Input type")
        values = arguments.get("Concrete Inputs") if is_attention else None
        if not isinstance(dims, list):
            return NONE
        text = repr((dims, types, values))
        if text not in self._input_numbers:
            self._input_numbers[text] = len(self.inputs)
            inputs = Inputs(
                dims, types=_list_or_empty(types), values=_list_or_empty(values)
            )
            self.inputs.append(inputs)
        return self._input_numbers[text]

    def _add_host(
        self, event: Mapping[str, Any], kind: int, value: int, rest: int = NONE
    ) -> None:
        """Add the row of an event of the host: see ``PackedTrace.host_rows``."""
        is_link = kind in (FORWARD_LINK, BACKWARD_LINK)
        start = start_of(event)
        length = 0 if is_link else _length_of(event)
        thread = self._thread_number(event)
        self._host.extend((start, length, thread, kind, value, rest))

    def _thread_number(self, event: Mapping[str, Any]) -> int:
        return self.threads[str(event.get("pid")), str(event.get("tid"))]


def is_relevant(event: Event) -> bool:
    """Return whether a decoded ``event`` is of a kind that is kept."""
    if not isinstance(event, Mapping):
        return False
    category = event.get("cat")
    if not isinstance(category, str):
        return False
    if category == "python_function":
        return is_module_event(str(event.get("name")))
    is_kept = category in _KEPT_CATEGORIES or category in _DEVICE_CATEGORIES
    return is_kept or category.endswith(_LAUNCH_CATEGORIES)


def is_on_device(event: Mapping[str, Any]) -> bool:
    """Return whether ``event`` ran on the device."""
    return event.get("cat") in _DEVICE_CATEGORIES


def nanoseconds(texts: Sequence[str]) -> Rows:
    """Return times in microseconds, written with exactly three decimals, as integers of nanoseconds."""
    without_points = ",".join(texts).replace(".", "")
    return np.fromstring(without_points, np.int64, sep=",")


def _list_or_empty(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _name_of(event: Mapping[str, Any]) -> str:
    """Return the name of an event; raise DamagedEvent if it has none."""
    name = event.get("name")
    if not isinstance(name, str):
        raise DamagedEvent("without a name")
    return name


def span_of(event: Mapping[str, Any]) -> tuple[int, int]:
    """Return the start and the length of an event in nanoseconds."""
    return start_of(event), _length_of(event)


def start_of(event: Mapping[str, Any]) -> int:
    """Return the start of an event in nanoseconds; raise DamagedEvent if it is missing or impossible."""
    start_us = _time_in(event, "ts", _LATEST_US)
    if start_us is None:
        raise DamagedEvent("without a start")
    # A float has too few digits for the product of the start and 1,000.
    return int(start_us) * 1000 + round(start_us % 1 * 1e3)


def _length_of(event: Mapping[str, Any]) -> int:
    """Return the duration of an event in nanoseconds; raise DamagedEvent if it is missing or impossible."""
    length_us = _time_in(event, "dur", _LONGEST_US)
    if length_us is None:
        raise DamagedEvent("without a duration")
    if length_us < 0:
        raise DamagedEvent("with a negative duration")
    return round(length_us * 1e3)


def _time_in(
    event: Mapping[str, Any], field_name: str, limit_us: float
) -> float | None:
    """Return a time of ``event`` in microseconds; None if it is missing, or not below ``limit_us``."""
    microseconds = event.get(field_name)
    if not isinstance(microseconds, (int, float)) or isinstance(microseconds, bool):
        return None
    if not isfinite(microseconds) or abs(microseconds) >= limit_us:
        return None
    return microseconds


def _number_in(correlation: Any) -> int:
    """Return a correlation, or the number of a link, as a signed integer of 64 bits; NONE if it is not a number."""
    if isinstance(correlation, str) and correlation.isdecimal():
        correlation = int(correlation)  # some tools write it as text
    if not isinstance(correlation, int) or isinstance(correlation, bool):
        return NONE
    if not -(2**63) <= correlation < 2**64:
        return NONE
    if correlation >= 2**63:
        return correlation - 2**64  # the same 64 bits, with a sign
    return correlation
