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

from lm_profiler.record.files import Newer, Part, RecordError, json_of, read_part, read_plain
from lm_profiler.record.parts import TIMED

# A row of the last steps: 52 bytes. Seconds of each of ``TIMED``, on the device if there is one.
ROW = np.dtype([("step", "<i8"), ("begin_ns", "<i8"), ("seconds", "<f4", len(TIMED))])

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
    def of(seconds: NDArray[np.float64]) -> Sketch:
        """Return the sketch of ``seconds``; unknown ones (NaN) do not count."""
        known = seconds[~np.isnan(seconds)]
        if not known.size:
            return Sketch()
        at = np.floor(np.log(np.maximum(known, 1e-9)) / math.log(_GROWTH)).astype(int)
        buckets = Counter(at.tolist())
        ends = {"min": float(known.min()), "max": float(known.max())}
        return Sketch(count=known.size, sum=float(known.sum()), buckets=buckets, **ends)

    def merged(self, other: Sketch) -> Sketch:
        buckets = dict(Counter(self.buckets) + Counter(other.buckets))
        ends = {"min": min(self.min, other.min), "max": max(self.max, other.max)}
        return Sketch(count=self.count + other.count, sum=self.sum + other.sum, buckets=buckets, **ends)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return the duration below which ``share`` of all lie, within 2 %; None if there are none."""
        below = 0
        for at in sorted(self.buckets):
            below += self.buckets[at]
            if below >= share * self.count:
                return min(max(float(_GROWTH ** (at + 0.5)), self.min), self.max)
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

    def merged(self, after: WatchWindow) -> WatchWindow:
        """Return the window of these steps and those that follow."""
        seconds = dict(self.seconds)
        for part, sketch in after.seconds.items():
            seconds[part] = seconds[part].merged(sketch) if part in seconds else sketch
        held = [each.held_bytes for each in (self, after) if each.held_bytes is not None]
        peaks = [each.peak_bytes for each in (self, after) if each.peak_bytes is not None]
        memory = {"held_bytes": min(held, default=None), "peak_bytes": max(peaks, default=None)}
        return self.model_copy(update={"steps": self.steps + after.steps, "seconds": seconds, **memory})


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
    now: float  # the observed value, in seconds; bytes per hour for ``memory``
    against: float | None = None  # the expected value, in the same unit
    since_step: int | None = None  # the step at which a level began
    until_step: int | None = None  # the last step before it went back, or before growth ended
    # how a level changed, if not at once: it still moves, it moves back and forth, or it alternates between two
    course: Annotated[Literal["drift", "wanders", "alternates"] | None, Newer] = None
    cause: str | None = None
    cause_s: float | None = None
    beside: str | None = None
    full_in_s: float | None = None  # seconds until memory is full, at that rate of growth
    times: int = 1  # how often it has happened by now
    # seconds that it has cost by now: what slow steps took beyond the usual, how long others waited for a late rank
    cost_s: float | None = None
    steps: list[int] = Field(default_factory=list)  # slow steps like it, the last fifty of them
    every_steps: int | None = None  # steps from one to the next, if they come regularly
    starts_epochs: bool | None = None  # whether they are the first steps of epochs
    share: float | None = None  # share of the steps since the first that are like it, if they come irregularly
    grew_bytes: int | None = None  # by how much memory has grown
    withdrawn: bool = False  # whether another event stands for it: it is no event any more
    chronic: bool | None = None  # whether the rank was late repeatedly
    trace: str | None = None  # the folder of the trace that it caused

    @property
    def ratio(self) -> float | None:
        return self.now / self.against if self.against else None


class WatchStatus(Part):
    """What a rank does now, and where the time of the fit went so far."""

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
    ledger: dict[str, float] = Field(default_factory=dict)  # seconds by term; they add up to ``wall_s``
    wall_s: float = 0.0
    window: WatchWindow | None = None  # steps that no complete window has yet
    held_bytes: int | None = None
    traces: bool = True  # whether traces may be taken
    timed: int = 0
    # seconds of all ``timed`` steps by part, on the device's clock where there is one
    seconds: dict[str, float] = Field(default_factory=dict)
    # on rank 0: the silent ranks, and since when on its own clock
    silent: dict[int, float] = Field(default_factory=dict)

    global_step: int = 0  # the Trainer's count of steps, which continues from a checkpoint
    resumed_at: int = 0  # that count when this fit began; 0 unless it resumes a checkpoint
    # steps after that checkpoint that the previous run had already taken; None if unknown
    repeated: int | None = None

    @computed_field  # type: ignore[prop-decorator]  # a property below it is what pydantic asks for
    @property
    def goodput(self) -> float | None:
        """The share of the wall time in training steps, without the first one; None at the start."""
        steps_s = sum(seconds for what, seconds in self.ledger.items() if what.startswith(STEPS))
        return steps_s / self.wall_s if self.wall_s else None


# phases in which ranks wait for each other: backward averages gradients, both fetch sharded parameters
WAITED_IN = ("forward", "backward")

STEPS = "step: "  # prefix of the ledger's terms within steps

MOST_TRACED = 100  # steps of one trace, whose events torch's profiler keeps in memory until its end


class TraceRequest(Part):
    """The request of ``lm_profiler trace`` to a run."""

    steps: int = 2
    rank: int = 0


def of_rank(name: str, rank: int) -> str:
    """Return the name of the file ``name`` of ``rank``, as in ``events.rank3.jsonl``."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}.rank{rank}{dot}{suffix}" if rank else name


WINDOWS, EVENTS, STATUS, LAST_STEPS = "watch.jsonl", "events.jsonl", "watch.json", "watch_steps.bin"


def request_file(folder: Path, rank: int) -> Path:
    return folder / of_rank("trace_request.json", rank)


def ranks_watched(folder: Path) -> list[int]:
    """Return the ranks that left a status in ``folder``, in order."""
    names = [re.fullmatch(r"watch(?:\.rank(\d+))?\.json", path.name) for path in folder.glob("watch*.json")]
    return sorted(int(match[1] or 0) for match in names if match)


def read_status(folder: Path, rank: int = 0) -> WatchStatus:
    return read_part(folder / of_rank(STATUS, rank), WatchStatus, "the status of a watched run")


@dataclass(frozen=True)
class Watched:
    """The content of a watched run's files, except its last steps."""

    ranks: list[WatchStatus]
    windows: list[WatchWindow]  # windows of rank 0; the last may be incomplete
    events: list[WatchEvent]  # events of all ranks, in the order of time


def read_watched(folder: Path) -> Watched:
    ranks = [read_status(folder, rank) for rank in ranks_watched(folder)]
    last = ranks[0].window
    return Watched(ranks, [*read_windows(folder), *([] if last is None else [last])], read_events(folder))


def steps_repeated(folder: Path, resumed_at: int) -> int | None:
    """Return how many steps after ``resumed_at`` the previous run of the same name took; None if there is none."""
    earlier: list[tuple[float, int]] = []
    for other in folder.parent.glob("version_*"):
        with suppress(RecordError, OSError, IndexError):
            if other != folder and resumed_at:
                status = read_status(other)
                rows = read_last_steps(other)  # a status may be ten seconds old, rows one second
                last = status.global_step + max(int(rows["step"][-1]) - status.steps if len(rows) else 0, 0)
                if status.resumed_at <= resumed_at <= last:
                    earlier.append((status.began_s, last))
    return max(earlier)[1] - resumed_at if earlier else None


def read_windows(folder: Path, rank: int = 0) -> list[WatchWindow]:
    return _lines(folder / of_rank(WINDOWS, rank), WatchWindow)


def read_events(folder: Path) -> list[WatchEvent]:
    """Return the events of all ranks in the order of time."""
    files = [path for path in folder.glob("events*.jsonl") if re.fullmatch(r"events(\.rank\d+)?\.jsonl", path.name)]
    events = (event for path in files for event in _lines(path, WatchEvent))
    return _with_late_ranks(last_of_each(events))


def last_of_each(events: Iterable[WatchEvent]) -> list[WatchEvent]:
    """Return each event as it was written last, in the order of time, without those that were withdrawn."""
    latest = {(event.rank, event.kind, event.step, event.at_s): event for event in events}
    valid = [event for event in latest.values() if not event.withdrawn]
    return sorted(valid, key=lambda event: event.at_s)


def _with_late_ranks(events: Sequence[WatchEvent]) -> list[WatchEvent]:
    """Name the late rank as the cause of slow steps that have no other cause, in passes that wait for all ranks."""

    def waited(event: WatchEvent) -> bool:
        return event.cause is None and event.part in WAITED_IN

    late = {event.step: event.rank for event in events if event.kind == "slow step" and not waited(event)}
    told = []
    for event in events:
        rank = late.get(event.step, event.rank)
        if event.kind == "slow step" and waited(event) and rank != event.rank:
            event = event.model_copy(update={"cause": f"waiting for rank {rank}"})
        told.append(event)
    return told


def read_last_steps(folder: Path, rank: int = 0) -> NDArray[np.void]:
    """Return the kept rows (``ROW``) of the last steps of ``rank``."""
    path = folder / of_rank(LAST_STEPS, rank)
    parts = tuple(read_status(folder, rank).seconds) if (folder / of_rank(STATUS, rank)).exists() else ()
    if parts not in ((), TIMED):  # the rows have no names
        raise RecordError(f"{path}: is of a version with other phases: {', '.join(parts)}")
    kept = [each for each in (_older(path), path) if each.exists()]
    content = [read_plain(each) for each in kept]
    whole = [np.frombuffer(of[: len(of) // ROW.itemsize * ROW.itemsize], ROW) for of in content]
    return np.concatenate([np.empty(0, ROW), *whole])


def append_last_steps(path: Path, rows: NDArray[np.void], most_bytes: int) -> None:
    """Add ``rows`` to ``path``; it and the file before it keep the last rows, half to all of ``most_bytes``."""
    with suppress(FileNotFoundError):
        if path.stat().st_size >= most_bytes // 2:
            path.replace(_older(path))
    _append(path, rows.tobytes())


def _append(path: Path, content: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(content) < len(content):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def append_lines(path: Path, parts: Sequence[Part]) -> None:
    """Add a line for each of ``parts`` in one write, so that a killed process leaves only whole lines."""
    _append(path, "".join(f"{json_of(part)}\n" for part in parts).encode())


P = TypeVar("P", bound=Part)


def _lines(path: Path, form: type[P]) -> list[P]:
    if not path.exists():
        return []
    whole = read_plain(path).split(b"\n")[:-1]
    try:
        return [form.model_validate_json(line) for line in whole]
    except ValidationError as error:
        raise RecordError(f"{path}: is damaged: {str(error).splitlines()[0]}") from None


_APART_S = 5.0  # most seconds between two readings of one process's start, as the wall clock may be set meanwhile


def process_name() -> str:
    """Return the host, the namespace of process numbers (a container has its own), the number, and its start."""
    return f"{_where()} {os.getpid()} {psutil.Process().create_time():.0f}"


def is_gone(name: str) -> bool:
    """Return whether the process of this ``process_name`` has ended; False if it ran elsewhere or has no name."""
    where, _, known = name.partition(" ")
    if where != _where():
        return False
    number, began_s = known.split()
    with suppress(psutil.Error):
        process = psutil.Process(int(number))
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return zombie or abs(process.create_time() - float(began_s)) > _APART_S
    return True


def _where() -> str:
    namespace = ""
    with suppress(OSError):  # not Linux
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}/{namespace}"
