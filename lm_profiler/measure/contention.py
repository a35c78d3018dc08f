"""What else used the machine: CPU time that this run wanted and did not get, because something else had it.

Read twice, where the measured steps begin and end, from Linux's own counts (proc(5), Documentation/scheduler/
sched-stats.rst, Documentation/accounting/psi.rst). Elsewhere it is unknown. What a hypervisor takes and does not report
as stolen, nobody inside can see.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lm_profiler.measure.boundary import UNGUARDED, Part
from lm_profiler.measure.gpu_sharing import gpu_neighbours_of
from lm_profiler.record.run import Contention, GpuSharing

_SLACK_S = 0.03
"""CPU time of others that is not counted: three ticks, which is how finely the system's own sums are kept."""

_SHORTEST_S = 0.1
"""A measurement shorter than this says nothing: its CPU time is a few ticks."""


@dataclass(frozen=True)
class CpuReading:
    """Counts at one instant, in seconds. ``own_s`` and ``waited_s`` are by process and thread: of this one and those
    that it started, themselves and what they waited for included. None where the system does not count.

    ``busy_s`` and ``stolen_s`` are of the CPUs that this process may use.
    """

    at_s: float
    machine: str
    cpus: frozenset[int]
    busy_s: float
    stolen_s: float
    own_s: dict[int, float]
    waited_s: dict[int, float] | None
    pressure_s: float | None
    throttled_s: float | None
    switches: int | None


@dataclass(frozen=True)
class CpuUse:
    """What one process saw where the measured steps begin, and where they end; and of its GPU."""

    begin: CpuReading
    end: CpuReading
    gpu: GpuSharing | None = None


class ContentionWatch:
    """Reads the counts around the ``measure`` stage, and nothing in between.

    Args:
        device: what the run computes on.
        read: takes a reading.
    """

    name = "contention"
    part: Part = UNGUARDED

    def __init__(self, device: torch.device, read: Callable[[], CpuReading | None] | None = None) -> None:
        self._gpu = gpu_neighbours_of(device)
        self._read = read or cpu_reading
        self._before: CpuReading | None = None
        self.use: CpuUse | None = None

    def begin(self, stage: str) -> None:
        if stage != "measure":
            return
        if self._gpu is not None:
            self._gpu.begin()
        self._before = self._read()

    def end(self, stage: str) -> None:
        if stage == "measure" and self._before is not None and (after := self._read()) is not None:
            self.use = CpuUse(self._before, after, None if self._gpu is None else self._gpu.end())

    def discard(self) -> None:
        self.use = None


def contention(uses: Sequence[CpuUse]) -> Contention | None:
    """What ``uses``, one of each rank, say of the CPUs that were shared the most, and of the GPU that was; None where
    nothing can be said.

    Threads of ours also wait for each other: OpenMP's, or a loader's workers where there are more than CPUs. So what
    was not had is the lesser of two: the time that our threads waited for a CPU, and the time that others ran on them;
    and of what the hypervisor took, our part.
    """
    long_enough = [use for use in uses if use.end.at_s - use.begin.at_s >= _SHORTEST_S]
    found = []
    for where in {(use.end.machine, use.end.cpus): use for use in long_enough}.values():
        # Ranks may have CPUs of their own, or share them.
        together = [u for u in long_enough if u.end.machine == where.end.machine and u.end.cpus <= where.end.cpus]
        found.append(_shared(where, together))
    worst = max(found, key=lambda each: each.not_had or 0.0, default=None)
    gpus = [use.gpu for use in uses if use.gpu is not None]
    gpu = max(gpus, key=lambda each: (each.utilisation or 0.0, each.processes), default=None)
    return None if worst is None else worst.model_copy(update={"gpu": gpu})


def _shared(where: CpuUse, ours: Sequence[CpuUse]) -> Contention:
    begin, end = where.begin, where.end
    had_s = _had([use.begin.own_s for use in ours], [use.end.own_s for use in ours])
    throttled_s = _difference(begin.throttled_s, end.throttled_s)
    pressure_s = _difference(begin.pressure_s, end.pressure_s)
    others_s, stolen_s = _others(where, had_s), max(end.stolen_s - begin.stolen_s, 0.0)
    waited_s = _waited(ours)
    if waited_s is not None:
        waited_s = max(waited_s - (throttled_s or 0.0), 0.0)
    lost_s = waited_s if waited_s is not None else pressure_s  # in which at least one thread waited
    missed_s = None
    if lost_s is not None and others_s is not None:
        missed_s = min(lost_s, others_s) + stolen_s * had_s / max(had_s + others_s, 1e-9)
    wall_s = end.at_s - begin.at_s
    return Contention(
        wall_s=wall_s,
        cpus=len(end.cpus),
        had_s=had_s,
        waited_s=waited_s,
        others_s=others_s,
        stolen_s=stolen_s,
        throttled_s=throttled_s,
        pressure=None if pressure_s is None else min(pressure_s / wall_s, 1.0),
        involuntary_switches=None if end.switches is None else end.switches - (begin.switches or 0),
        not_had=None if missed_s is None else missed_s / max(had_s + missed_s, 1e-9),
    )


def _had(before: Sequence[dict[int, float]], after: Sequence[dict[int, float]]) -> float:
    """CPU seconds of all processes, those that several ranks count once.

    Of one that has ended meanwhile, its parent's count holds all of it; of one that began, nothing lies before.
    """
    begin, end = ({pid: s for each in counts for pid, s in each.items()} for counts in (before, after))
    return max(sum(end.values()) - sum(begin.values()), 0.0)


def _others(where: CpuUse, had_s: float) -> float | None:
    """CPU seconds of everything else; None where the system's sums do not hold our own."""
    busy_s = where.end.busy_s - where.begin.busy_s
    return None if busy_s + _SLACK_S < had_s / 2 else max(busy_s - had_s - _SLACK_S, 0.0)


def _waited(ours: Sequence[CpuUse]) -> float | None:
    """Of all threads that are still there; None where a rank does not know."""
    total = dict[int, float]()
    for use in ours:
        before, after = use.begin.waited_s, use.end.waited_s
        if before is None or after is None:
            return None
        total |= {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    return sum(total.values())


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(after - before, 0.0)


# -- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Process:
    parent: int
    cpu_s: float
    children: list[int] = field(default_factory=list)


def cpu_reading(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> CpuReading | None:
    """The counts now; None off Linux. It reads a small file of each process, and one of each thread of ours."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus, tick_s = frozenset(os.sched_getaffinity(0)), 1.0 / os.sysconf("SC_CLK_TCK")
    try:
        busy, stolen = _system((proc / "stat").read_text(), cpus)
        family = _family(_processes(proc, tick_s), os.getpid())
    except (OSError, ValueError, IndexError):  # no such file, or another format
        return None
    group = _group(proc, cgroups)
    return CpuReading(
        at_s=time.perf_counter(),
        machine=_text(proc / "sys/kernel/random/boot_id") or "",
        cpus=cpus,
        busy_s=busy * tick_s,
        stolen_s=stolen * tick_s,
        own_s=family,
        waited_s=_waits(proc, family),
        pressure_s=_pressure(_text(group / "cpu.pressure") or _text(proc / "pressure/cpu")),
        throttled_s=_throttled(_text(group / "cpu.stat")),
        switches=_switches(),
    )


def _system(text: str, cpus: frozenset[int]) -> tuple[int, int]:
    """Ticks in which processes ran on ``cpus``, and ticks that the hypervisor took."""
    rows = [line.split() for line in text.splitlines() if line.startswith("cpu") and line[3].isdigit()]
    counts = [[int(count) for count in row[1:]] for row in rows if int(row[0][3:]) in cpus]
    return sum(sum(row[:3]) for row in counts), sum(row[7] for row in counts if len(row) > 7)


def _processes(proc: Path, tick_s: float) -> dict[int, _Process]:
    found = {}
    for entry in os.scandir(proc):
        if entry.name.isdigit() and (text := _text(proc / entry.name / "stat")) is not None:
            # The name, in brackets, may hold anything; what follows it is state, parent, then 9 more up to the times:
            # its own (user, system), and those of the processes that it has waited for.
            rest = text.rpartition(")")[2].split()
            found[int(entry.name)] = _Process(int(rest[1]), sum(map(int, rest[11:15])) * tick_s)
    for pid, process in found.items():
        if process.parent in found:
            found[process.parent].children.append(pid)
    return found


def _family(processes: dict[int, _Process], pid: int) -> dict[int, float]:
    """CPU seconds of ``pid`` and all that descend from it."""
    own, left = {}, [pid]
    while left:
        each = left.pop()
        own[each] = processes[each].cpu_s
        left += processes[each].children
    return own


def _waits(proc: Path, family: Iterable[int]) -> dict[int, float] | None:
    """Seconds that each thread was ready to run and had no CPU; None where the kernel does not count."""
    waited = {}
    for pid in family:
        try:
            threads = [int(entry.name) for entry in os.scandir(proc / str(pid) / "task")]
        except OSError:  # it has ended
            continue
        for thread in threads:
            if (text := _text(proc / str(pid) / "task" / str(thread) / "schedstat")) is not None:
                waited[thread] = int(text.split()[1]) * 1e-9
    return waited or None


def _pressure(text: str | None) -> float | None:
    """Seconds in which some task had to wait for a CPU."""
    if text is None or not text.startswith("some"):
        return None
    return int(text.splitlines()[0].rpartition("total=")[2]) * 1e-6


def _throttled(text: str | None) -> float | None:
    """Seconds that the limit of a control group held its CPUs back: version 2 counts microseconds, 1 nanoseconds."""
    counts = dict(line.split()[:2] for line in (text or "").splitlines() if len(line.split()) >= 2)
    if "throttled_usec" in counts:
        return int(counts["throttled_usec"]) * 1e-6
    return int(counts["throttled_time"]) * 1e-9 if "throttled_time" in counts else None


def _group(proc: Path, cgroups: Path) -> Path:
    """The folder of this process's control group for CPU time; it need not exist."""
    for line in (_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers and (cgroups / "cgroup.controllers").exists():
            return cgroups / path.lstrip("/")
        if "cpu" in controllers.split(","):
            return cgroups / controllers / path.lstrip("/")
    return cgroups


def _switches() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
