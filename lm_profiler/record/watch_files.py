"""The files of a watched run: windows of steps, events, what each rank does now, its last steps.

Every rank writes its own files, so that no rank waits for another. All but the last steps are lines of JSON or one
JSON that is replaced as a whole, so they can be read during the run, also on another machine.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import re
from collections import Counter
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

# A row of the last steps: 52 bytes. Seconds of each of ``TIMED``, on the device if there is one.
STEP_ROW = np.dtype(
    [("step", "<i8"), ("begin_ns", "<i8"), ("seconds", "<f4", len(TIMED))]
)

# a bucket ends 4 % above its beginning, so that quantiles are right to 2 %, as in DDSketch (Masson et al., VLDB 2019,
# 12:2195)
_GROWTH = 1.04


class Sketch(Part):
    """The distribution of some durations in seconds, mergeable: sums add up, buckets add up."""

    count: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = 0.0
    # counts of durations from ``1.04**k`` to ``1.04**(k + 1)`` seconds, by k; shorter than 1 ns counts as 1 ns
    buckets: dict[int, int] = Field(default_factory=dict)

    @staticmethod
    def from_seconds(seconds: NDArray[np.float64]) -> Sketch:
        """Return the sketch of ``seconds``; unknown ones (NaN) do not count."""
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
        """Return the sketch of the durations of both."""
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
        """Return the duration below which ``share`` of all lie, within 2 %; None if there are none."""
        count = 0
        for bucket_number in sorted(self.buckets):
            count += self.buckets[bucket_number]
            if count >= share * self.count:
                middle = float(_GROWTH ** (bucket_number + 0.5))
                return min(max(middle, self.min), self.max)
        return None


class WatchWindow(Part):
    """Some consecutive steps, a thousand or more once it is complete."""

    first_step: int
    steps: int
    began_s: float  # seconds since 1970
    seconds: dict[str, Sketch]  # by part of the step that took time, and of the step
    # the least memory between steps: the device's, else the process's resident memory
    held_bytes: int | None = None
    # the peak by the end of the window: the allocator's since its last reset, else resident since the process began
    peak_bytes: int | None = None

    def merge(self, next_window: WatchWindow) -> WatchWindow:
        """Return the window of these steps and of those of ``next_window``, which follow."""
        windows = (self, next_window)
        seconds = dict(self.seconds)
        for part, sketch in next_window.seconds.items():
            seconds[part] = seconds.get(part, Sketch()).merge(sketch)
        held_bytes = []
        for window in windows:
            if window.held_bytes is not None:
                held_bytes.append(window.held_bytes)
        peak_bytes = []
        for window in windows:
            if window.peak_bytes is not None:
                peak_bytes.append(window.peak_bytes)
        changes = {
            "steps": self.steps + next_window.steps,
            "seconds": seconds,
            "held_bytes": min(held_bytes, default=None),
            "peak_bytes": max(peak_bytes, default=None),
        }
        return self.model_copy(update=changes)


class WatchEvent(Part):
    """Something that happened to a watched run.

    An event is written again when more is known of it: its rank, kind, step and time are its name, and the last line
    with that name counts.
    """

    at_s: float = 0.0  # seconds since 1970
    rank: int = 0
    step: int
    kind: Annotated[
        Literal[
            "slow step", "level", "memory", "stall", "validation", "checkpoints", "epoch turn", "rank late",
            "silent rank",
        ],
        Newer,
    ]  # fmt: skip
    # the part of the step that differs most; None if the whole step does, or if it is outside of steps
    part: str | None = None
    # whether all parts of the step became slower or faster alike, as a slower machine makes them
    in_all_parts: bool | None = None
    now: float  # the observed value, in seconds; bytes per hour for ``memory``
    against: float | None = None  # the expected value, in the same unit
    since_step: int | None = None  # the step at which a level began
    # the last step before it went back, or before growth ended
    until_step: int | None = None
    # how a level changed, if not at once: it still moves, it moves back and forth, or it alternates between two
    course: Annotated[Literal["drift", "wanders", "alternates"] | None, Newer] = None
    cause: str | None = None
    cause_s: float | None = None
    beside: str | None = None
    # seconds until memory is full, at that rate of growth
    full_in_s: float | None = None
    times: int = 1  # how often it has happened by now
    # seconds that it has cost by now: what slow steps took beyond the usual, how long others waited for a late rank
    cost_s: float | None = None
    # slow steps like it, the last fifty of them
    steps: list[int] = Field(default_factory=list)
    every_steps: int | None = None  # steps from one to the next, if they come regularly
    starts_epochs: bool | None = None  # whether they are the first steps of epochs
    # share of the steps since the first that are like it, if they come irregularly
    share: float | None = None
    grew_bytes: int | None = None  # by how much memory has grown
    # whether another event stands for it: it is no event any more
    withdrawn: bool = False
    chronic: bool | None = None  # whether the rank was late repeatedly
    trace: str | None = None  # the folder of the trace that it caused

    @property
    def ratio(self) -> float | None:
        if not self.against:
            return None
        return self.now / self.against


class WatchStatus(Part):
    """The current activity of a rank, and where the time of the fit went so far."""

    schema_version: Literal[1] = 1
    rank: int = 0
    world_size: int = 1
    process: str = ""  # the ``process_name`` of the writer
    began_s: float  # when fit began, in seconds since 1970
    written_s: float
    ended: bool = False
    error: str | None = None  # the type of the error that ended the fit, if one did
    steps: int = 0
    phase: str = ""  # the part of the step that runs now
    # seconds by term; they add up to ``wall_s``
    ledger: dict[str, float] = Field(default_factory=dict)
    wall_s: float = 0.0
    window: WatchWindow | None = None  # steps that no complete window has yet
    held_bytes: int | None = None
    traces: bool = True  # whether traces may be taken
    timed: int = 0
    # seconds of all ``timed`` steps by part, on the device's clock where there is one
    seconds: dict[str, float] = Field(default_factory=dict)
    # on rank 0: the silent ranks, and since when on its own clock
    silent: dict[int, float] = Field(default_factory=dict)

    # the Trainer's count of steps, which continues from a checkpoint
    global_step: int = 0
    # that count when this fit began; 0 unless it resumes a checkpoint
    resumed_at: int = 0
    # steps after that checkpoint that the previous run had already taken; None if unknown
    repeated: int | None = None

    @computed_field  # type: ignore[prop-decorator]  # a property below it is what pydantic asks for
    @property
    def goodput(self) -> float | None:
        """The share of the wall time in training steps, without the first one; None at the start."""
        if not self.wall_s:
            return None
        steps_s = sum(
            seconds for term, seconds in self.ledger.items() if term.startswith(STEPS)
        )
        return steps_s / self.wall_s


# phases in which ranks wait for each other: backward averages gradients, both fetch sharded parameters
WAITING_PHASES = ("forward", "backward")

STEPS = "step: "  # prefix of the ledger's terms within steps

MOST_TRACED = 100  # steps of one trace, whose events torch's profiler keeps in memory until its end


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
    return read_part(
        folder / rank_file_name(STATUS, rank),
        WatchStatus,
        "the status of a watched run",
    )


@dataclass(frozen=True)
class WatchFiles:
    """The content of a watched run's files, except its last steps."""

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
    """Return how many steps after ``resumed_at`` the previous run of the same name took; None if there is none."""
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
    """Return the last step of a run by the Trainer's count; ``status`` may be ten seconds old, rows one second."""
    rows = read_last_steps(folder)
    if not len(rows):
        return status.global_step
    later_steps = int(rows["step"][-1]) - status.steps
    return status.global_step + max(later_steps, 0)


def read_windows(folder: Path, rank: int = 0) -> list[WatchWindow]:
    return _read_lines(folder / rank_file_name(WINDOWS, rank), WatchWindow)


def read_events(folder: Path) -> list[WatchEvent]:
    """Return the events of all ranks in the order of time."""
    events: list[WatchEvent] = []
    for path in folder.glob("events*.jsonl"):
        if re.fullmatch(r"events(\.rank\d+)?\.jsonl", path.name):
            events += _read_lines(path, WatchEvent)
    return _with_late_ranks(latest_events(events))


def latest_events(events: Iterable[WatchEvent]) -> list[WatchEvent]:
    """Return each event as it was written last, in the order of time, without those that were withdrawn."""
    latest = {}
    for event in events:
        key = (event.rank, event.kind, event.step, event.at_s)
        latest[key] = event
    valid_events = [event for event in latest.values() if not event.withdrawn]
    return sorted(valid_events, key=_event_time)


def _event_time(event: WatchEvent) -> float:
    return event.at_s


def _with_late_ranks(events: Sequence[WatchEvent]) -> list[WatchEvent]:
    """Name the late rank as the cause of slow steps that have no other cause, in passes that wait for all ranks."""
    slow_steps = [event for event in events if event.kind == "slow step"]
    late_ranks = {
        event.step: event.rank for event in slow_steps if not _may_have_waited(event)
    }
    explained = []
    for event in events:
        late_rank = late_ranks.get(event.step, event.rank)
        waited = (
            event.kind == "slow step"
            and _may_have_waited(event)
            and late_rank != event.rank
        )
        if waited:
            event = event.model_copy(update={"cause": f"waiting for rank {late_rank}"})
        explained.append(event)
    return explained


def _may_have_waited(event: WatchEvent) -> bool:
    """Return whether a slow step may have been slow because its rank waited for another one."""
    return event.cause is None and event.part in WAITING_PHASES


def read_last_steps(folder: Path, rank: int = 0) -> NDArray[np.void]:
    """Return the rows (``STEP_ROW``) of the last steps of ``rank``, as far as its files have them."""
    path = folder / rank_file_name(LAST_STEPS, rank)
    parts: tuple[str, ...] = ()
    if (folder / rank_file_name(STATUS, rank)).exists():
        parts = tuple(read_status(folder, rank).seconds)
    if parts not in ((), TIMED):  # the rows have no names
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
    """Add ``rows`` to ``path``; it and the file before it keep the last rows, half to all of ``most_bytes``."""
    with suppress(FileNotFoundError):
        if path.stat().st_size >= most_bytes // 2:
            path.replace(_older_file(path))
    _append(path, rows.tobytes())


def _append(path: Path, content: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(content) < len(content):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _older_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def append_lines(path: Path, parts: Sequence[Part]) -> None:
    """Add a line for each of ``parts`` in one write, so that a killed process leaves only whole lines."""
    _append(path, "".join(f"{json_of(part)}\n" for part in parts).encode())


P = TypeVar("P", bound=Part)


def _read_lines(path: Path, form: type[P]) -> list[P]:
    """Read the complete lines of ``path``; none if there is no such file."""
    if not path.exists():
        return []
    complete_lines = read_plain(path).split(b"\n")[:-1]
    try:
        return [form.model_validate_json(line) for line in complete_lines]
    except ValidationError as error:
        raise RecordError(f"{path}: is damaged: {str(error).splitlines()[0]}") from None


_START_TOLERANCE_S = 5.0  # between two readings of one process's start: the wall clock may be set meanwhile


def process_name() -> str:
    """Return the host, the namespace of process numbers (a container has its own), the number, and its start."""
    return f"{_machine_name()} {os.getpid()} {psutil.Process().create_time():.0f}"


def process_has_ended(name: str) -> bool:
    """Return whether the process of this ``process_name`` has ended; False if it ran elsewhere or has no name."""
    machine_name, _, process_text = name.partition(" ")
    if machine_name != _machine_name():
        return False
    number, start_s = process_text.split()
    try:
        process = psutil.Process(int(number))
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        has_same_start = (
            abs(process.create_time() - float(start_s)) <= _START_TOLERANCE_S
        )
    except psutil.Error:
        return True
    return is_zombie or not has_same_start


def _machine_name() -> str:
    namespace = ""
    with suppress(OSError):  # not Linux
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}/{namespace}"
