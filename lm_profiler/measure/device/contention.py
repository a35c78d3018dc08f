"""Finds the CPU time that this run needed but did not get, because something else used it.

Linux's own counts are read twice, where the measured steps begin and end (proc(5), Documentation/scheduler/
sched-stats.rst, Documentation/accounting/psi.rst). On other systems it is unknown. Time that a hypervisor takes without
reporting it as stolen cannot be seen.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic  # not by its module: whoever replaces the clock there counts its calls

from lm_profiler.measure.device.nvml import Gpu, gpu_sharing
from lm_profiler.record.run_record import Contention, GpuSharing

_SLACK_S = 0.03  # seconds of CPU time of others that do not count: three ticks, the resolution of the system's sums
_SHORTEST_S = 0.1  # seconds: a shorter measurement says nothing, since its CPU time is a few ticks


@dataclass(frozen=True)
class CpuReading:
    """Counts at one instant, in seconds; None where the system does not count."""

    at_s: float
    machine: str
    cpus: frozenset[int]
    busy_s: float  # sum over the CPUs that this process may use, as is ``stolen_s``
    stolen_s: float
    own_s: dict[int, float]  # by process: this one and its descendants, with children that have ended
    waited_s: dict[int, float] | None  # by thread of these processes
    pressure_s: float | None
    throttled_s: float | None
    switches: int


@dataclass(frozen=True)
class CpuUse:
    """One process's readings where the measured steps begin and end, and the use of its GPU by others."""

    begin: CpuReading
    end: CpuReading
    gpu: GpuSharing | None = None


def cpu_use_since(before: CpuReading | None, begun_s: float, gpu: Gpu | None) -> list[CpuUse]:
    """Return this process's use since ``begun_s``, as a list of one; empty where the system does not count."""
    if before is None or (after := cpu_reading()) is None:
        return []
    return [CpuUse(before, after, None if gpu is None else gpu_sharing(gpu, begun_s))]


def contention(uses: Sequence[CpuUse]) -> Contention | None:
    """Return the contention for the CPUs and the GPU that were shared the most; None where it is unknown.

    ``uses`` has one entry of each rank. Our threads also wait for each other: OpenMP's, or a loader's workers where
    there are more than CPUs. So the missing CPU time is the lesser of two, the time that our threads waited
    for a CPU and the time that others ran there, plus our share of what the hypervisor took.
    """
    long_enough = [use for use in uses if use.end.at_s - use.begin.at_s >= _SHORTEST_S]
    machines = []
    for where in {(use.end.machine, use.end.cpus): use for use in long_enough}.values():
        # Ranks may share CPUs or have their own: those count together whose CPUs are among these.
        together = [u for u in long_enough if u.end.machine == where.end.machine and u.end.cpus <= where.end.cpus]
        machines.append(_shared(where, together))
    worst = max(machines, key=lambda each: each.not_had or 0.0, default=None)
    gpus = [use.gpu for use in uses if use.gpu is not None]
    gpu = max(gpus, key=lambda each: (each.utilisation or 0.0, each.processes), default=None)
    return None if worst is None else worst.model_copy(update={"gpu": gpu})


def _shared(where: CpuUse, ours: Sequence[CpuUse]) -> Contention:
    """Return the contention for the CPUs of ``where``, which the ranks of ``ours`` share."""
    begin, end = where.begin, where.end
    had_s = _had([use.begin.own_s for use in ours], [use.end.own_s for use in ours])
    throttled_s = _difference(begin.throttled_s, end.throttled_s)
    pressure_s = _difference(begin.pressure_s, end.pressure_s)
    wall_s, stolen_s = end.at_s - begin.at_s, max(end.stolen_s - begin.stolen_s, 0.0)
    busy_s, others_s = end.busy_s - begin.busy_s, None
    if busy_s + _SLACK_S >= had_s / 2:  # else the system's sums do not include our own
        others_s = max(busy_s - had_s - _SLACK_S, 0.0)
    if (waited_s := _waited(ours)) is not None:
        waited_s = max(waited_s - (throttled_s or 0.0), 0.0)
    lost_s = waited_s if waited_s is not None else pressure_s  # a lower bound: several may have waited at a time
    missed_s = None
    if lost_s is not None and others_s is not None:
        missed_s = min(lost_s, others_s) + stolen_s * had_s / max(had_s + others_s, 1e-9)
    return Contention(
        wall_s=wall_s,
        cpus=len(end.cpus),
        had_s=had_s,
        waited_s=waited_s,
        others_s=others_s,
        stolen_s=stolen_s,
        throttled_s=throttled_s,
        pressure=None if pressure_s is None else min(pressure_s / wall_s, 1.0),
        involuntary_switches=end.switches - begin.switches,
        not_had=None if missed_s is None else missed_s / max(had_s + missed_s, 1e-9),
    )


def _had(before: Sequence[dict[int, float]], after: Sequence[dict[int, float]]) -> float:
    """Return the CPU seconds of all processes; one that several ranks see counts once.

    The time of a process that has ended is in its parent's count; one that has begun had none before.
    """
    begin, end = ({pid: s for each in counts for pid, s in each.items()} for counts in (before, after))
    return max(sum(end.values()) - sum(begin.values()), 0.0)


def _waited(ours: Sequence[CpuUse]) -> float | None:
    """Return the seconds that all threads that still live waited for a CPU; None where a rank does not know."""
    total = dict[int, float]()
    for use in ours:
        before, after = use.begin.waited_s, use.end.waited_s
        if before is None or after is None:
            return None
        total |= {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    return sum(total.values())


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(after - before, 0.0)


def cpu_reading(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> CpuReading | None:
    """Return the current counts; None off Linux. Reads a small file for each process, and for each of our threads."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus, tick_s = frozenset(os.sched_getaffinity(0)), 1.0 / os.sysconf("SC_CLK_TCK")
    try:
        lines = (proc / "stat").read_text().splitlines()
        rows = [line.split() for line in lines if line.startswith("cpu") and line[3].isdigit()]
        # user, nice, system, idle, iowait, irq, softirq and steal, in this order
        counts = [[int(count) for count in row[1:]] for row in rows if int(row[0][3:]) in cpus]
        busy, stolen = sum(sum(row[:3]) for row in counts), sum(row[7] for row in counts if len(row) > 7)
        family = _family(proc, tick_s)
    except (OSError, ValueError, IndexError):  # no such file, or another format
        return None
    group, pressure = _group(proc, cgroups), proc / "pressure/cpu"
    return CpuReading(
        at_s=monotonic(),
        machine=_text(proc / "sys/kernel/random/boot_id") or "",
        cpus=cpus,
        busy_s=busy * tick_s,
        stolen_s=stolen * tick_s,
        own_s=family,
        waited_s=_waits(proc, family),
        pressure_s=_pressure(_text(group / "cpu.pressure") or _text(pressure)),
        throttled_s=_throttled(_text(group / "cpu.stat")),
        switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    )


def _family(proc: Path, tick_s: float) -> dict[int, float]:
    cpu_s, children = dict[int, float](), defaultdict[int, list[int]](list)
    for entry in os.scandir(proc):
        if entry.name.isdigit() and (text := _text(proc / entry.name / "stat")) is not None:
            # The name in brackets may contain anything. After it come state, parent and nine more fields, then the user
            # and system times of the process, and those of the children that it has waited for.
            rest = text.rpartition(")")[2].split()
            children[int(rest[1])].append(int(entry.name))
            cpu_s[int(entry.name)] = sum(map(int, rest[11:15])) * tick_s
    own, left = {}, [os.getpid()]
    while left:
        pid = left.pop()
        own[pid] = cpu_s[pid]
        left += children[pid]
    return own


def _waits(proc: Path, family: Iterable[int]) -> dict[int, float] | None:
    """Return the seconds that each thread was ready to run and had no CPU; None where the kernel does not count."""
    waited = {}
    for pid in family:
        with suppress(OSError):  # the process has ended
            for thread in os.scandir(proc / str(pid) / "task"):
                if (text := _text(Path(thread.path, "schedstat"))) is not None:
                    waited[int(thread.name)] = int(text.split()[1]) * 1e-9
    return waited or None


def _pressure(text: str | None) -> float | None:
    if text is None or not text.startswith("some"):
        return None
    return int(text.splitlines()[0].rpartition("total=")[2]) * 1e-6


def _throttled(text: str | None) -> float | None:
    """Return the seconds that a control group's limit throttled it; version 2 counts microseconds, 1 nanoseconds."""
    counts = dict(line.split()[:2] for line in (text or "").splitlines() if len(line.split()) >= 2)
    if "throttled_usec" in counts:
        return int(counts["throttled_usec"]) * 1e-6
    return int(counts["throttled_time"]) * 1e-9 if "throttled_time" in counts else None


def _group(proc: Path, cgroups: Path) -> Path:
    """Return the folder of this process's control group for CPU time; it need not exist."""
    for line in (_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers and (cgroups / "cgroup.controllers").exists():
            return cgroups / path.lstrip("/")
        if "cpu" in controllers.split(","):
            return cgroups / controllers / path.lstrip("/")
    return cgroups


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
