"""Separates the processes of a trace, because some tools merge the traces of all ranks into one file.

An event of the host states its process, but the event of a kernel states only its device. The process that launched the
kernels of a device is found by labels that a tool gave to both (``[TP01] 4242`` and ``[TP01] 0``). Without labels it is
found by the launches: those of the right process have the same correlation numbers as the kernels, precede them, and
are of the same type (a copy is launched by a call for copies).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm_profiler.analysis.trace.trace_file import Event, OperatorEvents
from lm_profiler.record.figure import count_text

# A process with less than this share of all work is not one: it comes from a few damaged events.
_FEW = 0.05
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NUMBER_AT_END = re.compile(r"\d+\W*\Z")
_COPY_WORDS = ("memcpy", "memset")
_MOST_NAMES = 8  # the most processes that a message lists


class Track(NamedTuple):
    """A device of one rank, identified by the process and the device that the events of its kernels state."""

    process: str
    device: str


class Launch(NamedTuple):
    """When the host launched something on the device, and the name of the call."""

    start: int
    call_name: str


class DeviceWork(NamedTuple):
    """Something that ran on the device; its launch has the same correlation number."""

    start: int
    name: str
    correlation: int


# by process, then by correlation number
LaunchesByProcess = Mapping[str, Mapping[int, Launch]]
WorkByTrack = Mapping[Track, Sequence[DeviceWork]]


class TraceProcess(NamedTuple):
    """A process with events in a trace, and the devices on which it launched kernels."""

    name: str  # the name of the process, as in the file
    steps: int
    launches: int
    operators: int
    tracks: tuple[Track, ...] = ()
    # whether its devices are only assumed, from the order of the devices and the processes
    is_assumed: bool = False

    @property
    def text(self) -> str:
        """The name with counts, for messages."""
        work = count_text(self.operators, "operator")
        if self.launches:
            work = f"{self.launches:,} launches"
        return f"{self.name} ({count_text(self.steps, 'step')}, {work})"


class SeveralProcesses(ValueError):
    """Raised if a trace holds the work of several processes. The message names them."""

    def __init__(self, processes: Sequence[TraceProcess]) -> None:
        self.processes = processes
        super().__init__(f"it holds the work of {process_names(processes)}")


@dataclass
class ProcessCounts:
    """The numbers of steps, launches and operators of each process, counted while a trace is read."""

    steps: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)

    def names(self, has_device: bool) -> list[str]:
        """Return the sorted names of the processes that have both steps and work, or a relevant share of all work.

        A process with steps alone is left out, because a tool may write steps under a process of its own.
        """
        work = self.launches if has_device else self.operators
        least_work = _FEW * work.total()
        names = {process for process, count in work.items() if count > least_work}
        for process in self.steps:
            if self.launches[process] or self.operators[process]:
                names.add(process)
        return sorted(names, key=_number_order)

    def with_devices(
        self,
        names: Sequence[str],
        launches: LaunchesByProcess,
        work: WorkByTrack,
    ) -> list[TraceProcess]:
        """Return the processes called ``names``, with their devices.

        A device that may belong to several processes is assigned to none. If a process launched work but has no device,
        it shares one with others, and no device is assigned at all.
        """
        owners, is_assumed = _processes_of_tracks(names, launches, work)
        # launches do not matter if nothing ran on a device
        launch_counts = self.launches if work else Counter[str]()
        launching_names = {name for name in names if launch_counts[name]}
        is_device_shared = not launching_names.issubset(owners.values())
        if is_device_shared:
            owners = {}
        processes = []
        for name in names:
            tracks = tuple(track for track in work if owners.get(track) == name)
            processes.append(
                TraceProcess(
                    name=name,
                    steps=self.steps[name],
                    launches=launch_counts[name],
                    operators=self.operators[name],
                    tracks=tracks,
                    is_assumed=is_assumed,
                )
            )
        return processes


def process_names(processes: Sequence[TraceProcess]) -> str:
    """Return the number of ``processes`` and the names of the first ones, for a message."""
    texts = [process.text for process in processes[:_MOST_NAMES]]
    hidden = len(processes) - len(texts)
    if hidden:
        texts.append(f"{hidden} more")
    return f"{len(processes)} processes: {', '.join(texts)}"


def chosen_process(processes: Sequence[TraceProcess], name: str | None) -> TraceProcess:
    """Return the process called ``name``; if it is None, the one with steps and the most work.

    Raises:
        ValueError: there is no process of that name, or it launched work but its device is unknown.
    """
    if name is None:
        process = max(processes, key=_importance_key)
    else:
        with_name = [process for process in processes if process.name == name]
        if not with_name:
            raise ValueError(
                f"the trace has no process {name!r}; it has {process_names(processes)}"
            )
        [process] = with_name
    if process.launches and not process.tracks:
        raise ValueError(
            f"the trace has the work of {process_names(processes)}, but does not show which process launched which "
            "kernels: expected one trace for each rank"
        )
    return process


def _importance_key(process: TraceProcess) -> tuple[bool, int]:
    """Return a sort key: processes with steps come after those without, and those with the most work last."""
    return process.steps > 0, process.launches + process.operators


def events_of_process(
    events: Iterable[Event], process: TraceProcess
) -> Iterator[Event]:
    """Yield the ``events`` of ``process`` and of its devices, and events too damaged to state a process."""
    own_callers: dict[str, bool] = {}  # by the text of an operator's caller
    for event in events:
        if isinstance(event, OperatorEvents):
            yield from _own_operators(event, process, own_callers)
        elif not isinstance(event, Mapping):
            yield event
        elif str(event.get("cat")) in _DEVICE_CATEGORIES:
            if track_of(event) in process.tracks:
                yield event
        elif str(event.get("pid")) == process.name:
            yield event


def _own_operators(
    events: OperatorEvents, process: TraceProcess, own_callers: dict[str, bool]
) -> Iterator[OperatorEvents]:
    """Yield the operators that ``process`` called, if any.

    ``own_callers`` is a cache: whether the caller is ``process``, by the text of the caller.
    """
    chosen_indices = []
    for index, caller in enumerate(events.callers):
        if caller not in own_callers:
            caller_fields = json.loads(f"{{{caller}}}", strict=False)
            own_callers[caller] = str(caller_fields["pid"]) == process.name
        if own_callers[caller]:
            chosen_indices.append(index)
    if not chosen_indices:
        return
    columns: list[Any] = []
    for column in events:
        columns.append([column[index] for index in chosen_indices])
    yield OperatorEvents(*columns)


def track_of(event: Mapping[str, Any]) -> Track:
    """Return the track of an event on the device."""
    process = str(event.get("pid"))
    arguments = event.get("args")
    if not isinstance(arguments, Mapping):
        return Track(process, process)
    return Track(process, str(arguments.get("device", process)))


def _processes_of_tracks(
    names: Sequence[str],
    launches: LaunchesByProcess,
    work: WorkByTrack,
) -> tuple[dict[Track, str], bool]:
    """Return the process of each track, if it is known, and whether this is only assumed from their order.

    Three ways are tried until all tracks have a process: by labels, by launches, and by order.
    """
    owners = _owners_by_label(names, work)
    if len(owners) == len(work):
        return owners, False
    candidates = {}
    for track, pieces in work.items():
        candidates[track] = _likely_owners(names, launches, pieces)
    has_track_each = len(names) == len(work)
    if has_track_each:
        _leave_to_others(candidates)
    owners = {}
    for track, track_candidates in candidates.items():
        if len(track_candidates) == 1:
            owners[track] = track_candidates[0]
    if len(owners) == len(work) or not has_track_each:
        return owners, False
    return _owners_in_order(names, candidates, owners)


def _owners_in_order(
    names: Sequence[str],
    candidates: Mapping[Track, Sequence[str]],
    owners: dict[Track, str],
) -> tuple[dict[Track, str], bool]:
    """Return ``owners`` with the other tracks and processes paired in order, and whether this was possible."""
    tracks = [track for track in candidates if track not in owners]
    tracks.sort(key=_track_order)
    free_names = [name for name in names if name not in owners.values()]
    if len(free_names) != len(tracks):
        return owners, False
    all_owners = dict(owners)
    for track, name in zip(tracks, free_names, strict=True):
        if name not in candidates[track]:
            return owners, False
        all_owners[track] = name
    return all_owners, True


def _owners_by_label(names: Sequence[str], tracks: Iterable[Track]) -> dict[Track, str]:
    """Return the process of each track whose label (see ``_label_of_process``) is that of exactly one process."""
    processes_by_label: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        processes_by_label[_label_of_process(name)].append(name)
    owners = {}
    for track in tracks:
        label = _label_of_process(track.process)
        processes = processes_by_label.get(label, [])
        if label and len(processes) == 1:
            owners[track] = processes[0]
    return owners


def _label_of_process(process_name: str) -> str:
    """Return the text before the number in the name of a process, such as ``[TP01]``; empty if there is none."""
    return _NUMBER_AT_END.sub("", process_name).strip()


def _likely_owners(
    names: Sequence[str],
    launches: LaunchesByProcess,
    pieces: Sequence[DeviceWork],
) -> list[str]:
    """Return the processes whose launches fit most of the work ``pieces``: several if they fit equally many."""
    fitting_counts = {}
    for name in names:
        launches_by_number = launches.get(name, {})
        count = 0
        for piece in pieces:
            launch = launches_by_number.get(piece.correlation)
            if launch is not None and _may_launch(launch, piece):
                count += 1
        fitting_counts[name] = count
    highest_count = max(fitting_counts.values(), default=0)
    if not highest_count:
        return []
    return [name for name, count in fitting_counts.items() if count == highest_count]


def _may_launch(launch: Launch, piece: DeviceWork) -> bool:
    """Return whether ``launch`` may have launched ``piece``: it is earlier, and both or neither of them are copies."""
    if launch.start > piece.start:
        return False
    call_name = launch.call_name.lower()
    work_name = piece.name.lower()
    for word in _COPY_WORDS:
        is_call_for_copies = word in call_name
        is_copy = work_name.startswith(word)
        if is_call_for_copies != is_copy:
            return False
    return True


def _leave_to_others(candidates: dict[Track, list[str]]) -> None:
    """If a track has only one candidate left, remove it from all other tracks; repeat until nothing changes."""
    settled: set[Track] = set()
    while True:
        settled_track = None
        for track, names in candidates.items():
            if len(names) == 1 and track not in settled:
                settled_track = track
        if settled_track is None:
            return
        settled.add(settled_track)
        [owner] = candidates[settled_track]
        for names in candidates.values():
            if len(names) > 1 and owner in names:
                names.remove(owner)


def _track_order(track: Track) -> tuple[tuple[int, str], tuple[int, str]]:
    return _number_order(track.process), _number_order(track.device)


def _number_order(text: str) -> tuple[int, str]:
    """Return a sort key with which numbers come in numerical order, before other texts."""
    if text.isdecimal():
        return len(text.lstrip("0")), text
    return 1 << 16, text
