"""The files of a watched run: windows of steps, events, the status of each rank, and its last steps.

Each rank writes files of its own, so that no rank waits for another. The last steps are binary. The other files are
lines of JSON, or a single JSON document that is replaced as a whole, so that they can be read during the run, even from
another machine.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray
from pydantic import Field, ValidationError, computed_field

from lm_profiler.record.files import (
    Newer,
    Part,
    RecordError,
    json_of,
    read_part,
    read_plain,
)
from lm_profiler.record.parts import TIMED
from lm_profiler.record.run_record import NO_CPU

# A row of the last steps (52 bytes); the seconds are those of each of ``TIMED``, on the device if there is one.
STEP_ROW = np.dtype(
    [("step", "<i8"), ("begin_ns", "<i8"), ("seconds", "<f4", len(TIMED))]
)

# The end of a bucket is 4 % above its beginning, so that quantiles are correct to within 2 %, as in DDSketch (Masson et
# al., VLDB 2019, 12:2195).
_GROWTH = 1.04


class Sketch(Part):
    """A histogram of durations in seconds, with buckets of equal ratio. Two sketches can be merged."""

    count: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = 0.0
    # by k: the number of durations from ``1.04**k`` to ``1.04**(k + 1)`` seconds; shorter than 1 ns counts as 1 ns
    buckets: dict[int, int] = Field(default_factory=dict)

    @staticmethod
    def from_seconds(seconds: NDArray[np.float64]) -> Sketch:
        """Return the sketch of ``seconds``, without unknown ones (NaN)."""
        durations = seconds[~np.isnan(seconds)]
        if not durations.size:
            return Sketch()
        logs = np.log(np.maximum(durations, 1e-9))
        bucket_numbers = np.floor(logs / math.log(_GROWTH)).astype(int)
        return Sketch(
            count=durations.size,
            sum=float(durations.sum()),
            min=float(durations.min()),
            max=float(durations.max()),
            buckets=Counter(bucket_numbers.tolist()),
        )

    def merge(self, sketch: Sketch) -> Sketch:
        """Return the sketch of all durations of this sketch and of ``sketch``."""
        return Sketch(
            count=self.count + sketch.count,
            sum=self.sum + sketch.sum,
            min=min(self.min, sketch.min),
            max=max(self.max, sketch.max),
            buckets=dict(Counter(self.buckets) + Counter(sketch.buckets)),
        )

    @property
    def mean(self) -> float | None:
        if not self.count:
            return None
        return self.sum / self.count

    def quantile(self, share: float) -> float | None:
        """Return a quantile of the durations, correct to within 2 %; None if there are no durations."""
        count = 0
        for bucket_number in sorted(self.buckets):
            count += self.buckets[bucket_number]
            if count >= share * self.count:
                middle = float(_GROWTH ** (bucket_number + 0.5))
                return min(max(middle, self.min), self.max)
        return None


class WatchWindow(Part):
    """Consecutive steps: a thousand or more if the window is complete."""

    first_step: int
    steps: int  # number of steps
    began_s: float  # the time at which the window began, in seconds since 1970
    # a histogram for each part that took time, and for the whole step
    seconds: dict[str, Sketch]
    # the least memory between steps: that of the device, or else the resident memory of the process without the pages
    # of mapped files
    held_bytes: int | None = None
    # the peak at the end of the window: of the allocator since its last reset, or else of resident memory since the
    # process began
    peak_bytes: int | None = None

    def merge(self, next_window: WatchWindow) -> WatchWindow:
        """Return one window with the steps of this window and of ``next_window``, which must follow."""
        windows = (self, next_window)
        sketches = dict(self.seconds)
        for part, sketch in next_window.seconds.items():
            sketches[part] = sketches.get(part, Sketch()).merge(sketch)
        held_bytes = [
            window.held_bytes for window in windows if window.held_bytes is not None
        ]
        peak_bytes = [
            window.peak_bytes for window in windows if window.peak_bytes is not None
        ]
        changes = {
            "steps": self.steps + next_window.steps,
            "seconds": sketches,
            # what all steps of both windows hold; only a leak raises it
            "held_bytes": min(held_bytes, default=None),
            "peak_bytes": max(peak_bytes, default=None),
        }
        return self.model_copy(update=changes)


class WatchEvent(Part):
    """Something that happened to a watched run.

    Rank, kind, step and time identify an event. It is written again when it changes, and the last line counts.
    """

    at_s: float = 0.0  # the time of the event, in seconds since 1970
    rank: int = 0
    step: int
    kind: Annotated[
        Literal[
            "slow step", "level", "memory", "stall", "validation", "checkpoints", "epoch turn", "rank late",
            "silent rank",
        ],
        Newer,
    ]  # fmt: skip
    # the part of the step that changed most; None if several parts did, or if the event is outside of steps
    part: str | None = None
    # whether all parts of the step changed by the same ratio, which means that the machine's speed changed
    in_all_parts: bool | None = None
    now: float  # the observed value, in seconds; bytes per hour for ``memory``
    against: float | None = None  # the expected value, in the same unit
    since_step: int | None = (
        None  # the step at which a level, or the growth of memory, began
    )
    # the last step before the level went back, or before growth ended
    until_step: int | None = None
    # how a level changes if it does not jump once: steadily, up and down, or between two values
    course: Annotated[Literal["drift", "wanders", "alternates"] | None, Newer] = None
    cause: str | None = None
    cause_s: float | None = None
    beside: str | None = None
    # seconds until memory is full if it continues to grow at this rate
    full_in_s: float | None = None
    times: int = 1  # how often it has happened so far
    # its cost so far in seconds: the excess of slow steps, or the time for which others waited for a late rank
    cost_s: float | None = None
    # the last fifty slow steps of this event
    steps: list[int] = Field(default_factory=list)
    # how long the first and the last slow steps take, if they take longer and longer
    grew_from_s: float | None = None
    grew_to_s: float | None = None
    every_steps: int | None = None  # the interval between slow steps, if it is regular
    # whether the slow steps are the first steps of epochs
    starts_epochs: bool | None = None
    # if they are irregular, the share of slow steps among all steps since the first of them; for epoch boundaries that
    # all take long, their share of the time
    share: float | None = None
    grew_bytes: int | None = None  # the bytes by which memory has grown
    held_bytes: int | None = None  # the bytes to which it has grown
    # whether the event is no longer valid, because it is part of another one or turned out to be none
    withdrawn: bool = False
    chronic: bool | None = None  # whether the rank was late repeatedly
    trace: str | None = None  # the folder of the trace that was taken because of it

    @property
    def ratio(self) -> float | None:
        if not self.against:
            return None
        return self.now / self.against


class WatchStatus(Part):
    """The current activity of a rank, and how the time of the fit so far divides."""

    schema_version: Literal[1] = 1
    rank: int = 0
    world_size: int = 1
    process: str = ""  # the ``process_name`` of the writer
    began_s: float  # when fit began, in seconds since 1970
    written_s: float
    ended: bool = False
    error: str | None = None  # the type of the error that ended the fit, if one did
    steps: int = 0
    phase: str = ""  # the current part of the step
    # seconds by term; they add up to ``wall_s``
    ledger: dict[str, float] = Field(default_factory=dict)
    wall_s: float = 0.0
    window: WatchWindow | None = None  # the steps after the last complete window
    held_bytes: int | None = None
    traces: bool = True  # whether traces may be taken
    timed: int = 0  # number of steps whose times are in ``seconds``
    # the sum over these steps by part, on the device's clock if there is one
    seconds: dict[str, float] = Field(default_factory=dict)
    # on rank 0: when each silent rank made its last report, on the clock of rank 0
    silent: dict[int, float] = Field(default_factory=dict)

    # the Trainer's number of steps, which continues that of a checkpoint
    global_step: int = 0
    # the global step when the fit began; 0 unless it resumes from a checkpoint
    resumed_at: int = 0
    # the number of steps after the checkpoint that the previous run had already made; None if unknown
    repeated: int | None = None

    @computed_field  # type: ignore[prop-decorator]  # a property below it is what pydantic asks for
    @property
    def goodput(self) -> float | None:
        """The share of the wall time spent in training steps, without the first step; None at the start."""
        if not self.wall_s:
            return None
        steps_s = sum(
            seconds for term, seconds in self.ledger.items() if term.startswith(STEPS)
        )
        return steps_s / self.wall_s


# The phases in which ranks wait for each other: gradients are averaged in backward, and sharded parameters are gathered
# in both.
WAITING_PHASES = ("forward", "backward")

STEPS = "step: "  # prefix of the ledger's terms for time within steps

# the most steps of one trace: torch's profiler keeps all its events in memory
MOST_TRACED = 100


class TraceRequest(Part):
    """The request of ``lm_profiler trace`` to a run."""

    steps: int = 2
    rank: int = 0


def rank_file_name(name: str, rank: int) -> str:
    """Return the name of the file ``name`` of ``rank``, as in ``events.rank3.jsonl``."""
    if rank == 0:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}.rank{rank}{dot}{suffix}"


WINDOWS, EVENTS, STATUS, LAST_STEPS = (
    "watch.jsonl",
    "events.jsonl",
    "watch.json",
    "watch_steps.bin",
)


def request_file(folder: Path, rank: int) -> Path:
    return folder / rank_file_name("trace_request.json", rank)


def watched_ranks(folder: Path) -> list[int]:
    """Return the ranks that left a status in ``folder``, in order."""
    ranks = []
    for path in folder.glob("watch*.json"):
        match = re.fullmatch(r"watch(?:\.rank(\d+))?\.json", path.name)
        if match is not None:
            rank = int(match[1] or 0)
            ranks.append(rank)
    return sorted(ranks)


def read_status(folder: Path, rank: int = 0) -> WatchStatus:
    """Return the latest status that ``rank`` wrote into ``folder``; RecordError if it cannot be read."""
    return read_part(
        folder / rank_file_name(STATUS, rank),
        WatchStatus,
        "the status of a watched run",
    )


@dataclass(frozen=True)
class WatchFiles:
    """The content of a watched run's files, except the file of its last steps."""

    ranks: list[WatchStatus]
    windows: list[WatchWindow]  # windows of rank 0; the last may be incomplete
    events: list[WatchEvent]  # events of all ranks, in the order of time


def read_watched(folder: Path) -> WatchFiles:
    """Read the statuses of all ranks, the windows and the events of a watched run."""
    statuses = [read_status(folder, rank) for rank in watched_ranks(folder)]
    windows = read_windows(folder)
    incomplete_window = statuses[0].window
    if incomplete_window is not None:
        windows.append(incomplete_window)
    return WatchFiles(statuses, windows, read_events(folder))


def steps_repeated(folder: Path, resumed_at: int) -> int | None:
    """Return how many steps the previous run of the same name made after ``resumed_at``; None if there was none."""
    if not resumed_at:
        return None
    earlier_runs: list[tuple[float, int]] = []  # when each began, and its last step
    for run_folder in folder.parent.glob("version_*"):
        if run_folder == folder:
            continue
        with suppress(RecordError, OSError, IndexError):
            status = read_status(run_folder)
            last_step = _last_global_step(run_folder, status)
            if status.resumed_at <= resumed_at <= last_step:
                earlier_runs.append((status.began_s, last_step))
    if not earlier_runs:
        return None
    _, last_step = max(earlier_runs)
    return last_step - resumed_at


def _last_global_step(folder: Path, status: WatchStatus) -> int:
    """Return the last step of a run by the Trainer's count.

    It comes from ``status``, which is written every ten seconds, plus the steps since then by the last steps.
    """
    rows = read_last_steps(folder)
    if not len(rows):
        return status.global_step
    later_steps = int(rows["step"][-1]) - status.steps
    return status.global_step + max(later_steps, 0)


def read_windows(folder: Path, rank: int = 0) -> list[WatchWindow]:
    return _read_lines(folder / rank_file_name(WINDOWS, rank), WatchWindow)


def read_events(folder: Path) -> list[WatchEvent]:
    """Return the events of all ranks, ordered by time."""
    events: list[WatchEvent] = []
    for path in folder.glob("events*.jsonl"):
        if re.fullmatch(r"events(\.rank\d+)?\.jsonl", path.name):
            events += _read_lines(path, WatchEvent)
    return _with_late_ranks(_with_busy_machine_as_one(latest_events(events)))


def latest_events(events: Iterable[WatchEvent]) -> list[WatchEvent]:
    """Return the last version of each event, ordered by time, without those that were withdrawn."""
    latest = {}
    for event in events:
        key = (event.rank, event.kind, event.step, event.at_s)
        latest[key] = event
    valid_events = [event for event in latest.values() if not event.withdrawn]
    return sorted(valid_events, key=_event_time)


def _event_time(event: WatchEvent) -> float:
    return event.at_s


def _with_busy_machine_as_one(events: Sequence[WatchEvent]) -> list[WatchEvent]:
    """Return the events, with one in place of the changes of level by which a busy machine slows down all phases.

    A rank's machine was busy if the cause of any of its events is waiting for a CPU.
    """
    causes_by_rank: dict[int, str] = {}
    changes_by_rank: defaultdict[int, list[WatchEvent]] = defaultdict(list)
    for event in events:
        waits_for_cpu = (event.cause or "").startswith(NO_CPU)
        if waits_for_cpu:
            causes_by_rank[event.rank] = event.cause or ""
        is_jump = event.kind == "level" and event.course != "drift"
        if is_jump and (waits_for_cpu or event.part is None):
            changes_by_rank[event.rank].append(event)
    merged_events = list(events)
    for rank, cause in causes_by_rank.items():
        changes = changes_by_rank[rank]
        if len(changes) < 2 or not _go_up_and_down(changes):
            continue
        merged_events = [event for event in merged_events if event not in changes]
        merged_events.append(_as_one_wandering_level(changes, cause))
    return sorted(merged_events, key=_event_time)


def _go_up_and_down(changes: Sequence[WatchEvent]) -> bool:
    """Return whether steps become slower in some of these changes, and faster in others."""
    ratios = [change.ratio or 1.0 for change in changes]
    have_gone_back = any(change.until_step is not None for change in changes)
    return have_gone_back or min(ratios) < 1.0 < max(ratios)


def _as_one_wandering_level(changes: Sequence[WatchEvent], cause: str) -> WatchEvent:
    """Return one event for these changes of level, which have the same ``cause``; the last one gives its time."""
    number = 0
    levels_s: list[float] = []
    for change in changes:
        number += change.times
        if change.until_step is not None:
            number += 1
        levels_s += [change.now, change.against or change.now]
    return changes[-1].model_copy(
        update={
            "part": None,
            "in_all_parts": None,
            "course": "wanders",
            "since_step": min(change.since_step or change.step for change in changes),
            "until_step": None,
            "against": min(levels_s),
            "now": max(levels_s),
            "times": number,
            "cause": cause,
            "cause_s": None,
        }
    )


def _with_late_ranks(events: Sequence[WatchEvent]) -> list[WatchEvent]:
    """Return the events; a slow step in which a rank may only have waited gets the rank that was late as its cause.

    The late rank is the one that was slow in the same step for another reason.
    """
    slow_steps = [event for event in events if event.kind == "slow step"]
    late_ranks = {
        event.step: event.rank for event in slow_steps if not _may_have_waited(event)
    }
    explained = []
    for event in events:
        late_rank = late_ranks.get(event.step, event.rank)
        has_waited = (
            event.kind == "slow step"
            and _may_have_waited(event)
            and late_rank != event.rank
        )
        if has_waited:
            event = event.model_copy(update={"cause": f"waiting for rank {late_rank}"})
        explained.append(event)
    return explained


def _may_have_waited(event: WatchEvent) -> bool:
    """Return whether a slow step may have been slow because its rank waited for another one."""
    return event.cause is None and event.part in WAITING_PHASES


def read_last_steps(folder: Path, rank: int = 0) -> NDArray[np.void]:
    """Return the rows (``STEP_ROW``) of the last steps of ``rank`` that its files have."""
    path = folder / rank_file_name(LAST_STEPS, rank)
    parts: tuple[str, ...] = ()
    if (folder / rank_file_name(STATUS, rank)).exists():
        parts = tuple(read_status(folder, rank).seconds)
    # The rows have no column names: they can be read only with the parts of this version.
    are_parts_unknown = parts == ()
    if not are_parts_unknown and parts != TIMED:
        raise RecordError(
            f"{path}: was written by a version of lm_profiler with other phases: {', '.join(parts)}"
        )
    pieces = [np.empty(0, STEP_ROW)]
    for file in (_older_file(path), path):
        if file.exists():
            content = read_plain(file)
            complete_rows = len(content) // STEP_ROW.itemsize
            pieces.append(np.frombuffer(content, STEP_ROW, count=complete_rows))
    return np.concatenate(pieces)


def append_last_steps(path: Path, rows: NDArray[np.void], most_bytes: int) -> None:
    """Append ``rows`` to ``path``.

    Once the file has half of ``most_bytes``, it becomes the older file, in place of the previous one, and a new file
    begins. So both files together have the last rows, and between a half and all of ``most_bytes``.
    """
    with suppress(FileNotFoundError):
        if path.stat().st_size >= most_bytes // 2:
            path.replace(_older_file(path))
    _append(path, rows.tobytes())


def _append(path: Path, content: bytes) -> None:
    """Append ``content`` whole, or not at all if the disk is full."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(content) < len(content):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _older_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def append_lines(path: Path, parts: Sequence[Part]) -> None:
    """Append one line for each of ``parts`` in a single write, so that a killed process leaves only whole lines."""
    _append(path, "".join(f"{json_of(part)}\n" for part in parts).encode())


P = TypeVar("P", bound=Part)


def _read_lines(path: Path, form: type[P]) -> list[P]:
    """Read the complete lines of ``path``; return an empty list if there is no such file."""
    if not path.exists():
        return []
    complete_lines = read_plain(path).split(b"\n")[:-1]
    try:
        return [form.model_validate_json(line) for line in complete_lines]
    except ValidationError as error:
        raise RecordError(f"{path}: is damaged: {str(error).splitlines()[0]}") from None


# Two readings of the start of the same process may differ by this much, because the wall clock may be adjusted.
_START_TOLERANCE_S = 5.0

# before a start that is counted from the boot of the machine, in clock ticks
_FROM_BOOT = "boot+"


def process_name() -> str:
    """Return a name that identifies this process: the host, the namespace of process numbers, the number, the start.

    (A container has a namespace of process numbers of its own.)
    """
    return f"{_machine_name()} {os.getpid()} {_start_of(psutil.Process())}"


def process_has_ended(name: str) -> bool:
    """Return whether the process with this ``process_name`` has ended; False if on another machine, or unknown."""
    machine_name, _, process_text = name.partition(" ")
    if machine_name != _machine_name():
        return False
    number, start = process_text.split()
    try:
        process = psutil.Process(int(number))
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        has_same_start = _has_started_at(start, process)
    except psutil.Error:
        return True
    return is_zombie or not has_same_start


def _start_of(process: psutil.Process) -> str:
    """Return when ``process`` started: on Linux from the boot on, which no adjustment of the clock changes.

    Elsewhere, in seconds since the epoch.
    """
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return f"{process.create_time():.0f}"
    # The second field is the name of the program in parentheses, and may contain anything; the 22nd is the start.
    _, _, fields_from_third = status.rpartition(")")
    return _FROM_BOOT + fields_from_third.split()[22 - 3]


def _has_started_at(start: str, process: psutil.Process) -> bool:
    """Return whether ``process`` started at ``start``, a result of ``_start_of`` or of an older version."""
    if start.startswith(_FROM_BOOT):
        return _start_of(process) == start
    difference_s = abs(process.create_time() - float(start))
    return difference_s <= _START_TOLERANCE_S


def _machine_name() -> str:
    """Return a name for this machine, and on Linux for its namespace of processes."""
    namespace = ""
    with suppress(OSError):  # not Linux
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}/{namespace}"
