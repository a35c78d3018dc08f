"""Finds the CPU time that this run needed but did not get, because something else used it.

Linux's own counts are read twice, where the measured steps begin and end (proc(5), Documentation/scheduler/
sched-stats.rst, Documentation/accounting/psi.rst). On other systems it is unknown. Time that a hypervisor takes without
reporting it as stolen cannot be seen.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# not by its module: whoever replaces the clock there counts its calls
from time import monotonic

from lm_profiler.measure.device.nvml import Gpu, gpu_sharing
from lm_profiler.record.run_record import Contention, GpuSharing

_SLACK_S = 0.03  # seconds of CPU time of others that do not count: three ticks, the resolution of the system's sums
_SHORTEST_S = 0.1  # seconds: a shorter measurement is too coarse, since its CPU time is a few ticks


@dataclass(frozen=True)
class CpuReading:
    """Counts at one instant, in seconds; None if the system does not count."""

    at_s: float
    machine: str
    cpus: frozenset[int]
    busy_s: float  # sum over the CPUs that this process may use, as is ``stolen_s``
    stolen_s: float
    # by process: this one and its descendants, with children that have ended
    own_s: dict[int, float]
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


def cpu_use_since(
    begin: CpuReading | None, begun_s: float, gpu: Gpu | None
) -> list[CpuUse]:
    """Return this process's use since ``begun_s``, as a list of one; empty if the system does not count."""
    if begin is None:
        return []
    end = cpu_reading()
    if end is None:
        return []
    sharing = None if gpu is None else gpu_sharing(gpu, begun_s)
    return [CpuUse(begin, end, sharing)]


def contention(uses: Sequence[CpuUse]) -> Contention | None:
    """Return the contention for the CPUs and the GPU that were shared the most; None if it is unknown.

    ``uses`` has one entry for each rank. Our threads also wait for each other: OpenMP's, or a loader's workers where
    there are more than CPUs. So the missing CPU time is the lesser of two, the time that our threads waited
    for a CPU and the time that others ran there, plus our share of what the hypervisor took.
    """
    long_enough = [use for use in uses if use.end.at_s - use.begin.at_s >= _SHORTEST_S]
    use_by_cpus = {(use.end.machine, use.end.cpus): use for use in long_enough}
    contentions = []
    for (machine, cpus), use in use_by_cpus.items():
        # Ranks may share CPUs or have their own: those count together whose CPUs are among these.
        sharers = []
        for sharer in long_enough:
            if sharer.end.machine == machine and sharer.end.cpus <= cpus:
                sharers.append(sharer)
        contentions.append(_contention_for_cpus(use, sharers))
    if not contentions:
        return None

    worst = max(contentions, key=_missing_share)
    sharings = [use.gpu for use in uses if use.gpu is not None]
    most_shared_gpu = max(sharings, key=_use_by_others, default=None)
    return worst.model_copy(update={"gpu": most_shared_gpu})


def _missing_share(shared: Contention) -> float:
    return shared.not_had or 0.0


def _use_by_others(sharing: GpuSharing) -> tuple[float, int]:
    return sharing.utilisation or 0.0, sharing.processes


def _contention_for_cpus(use: CpuUse, sharers: Sequence[CpuUse]) -> Contention:
    """Return the contention for the CPUs of ``use``, which the ranks of ``sharers`` share."""
    begin, end = use.begin, use.end
    had_s = _cpu_seconds(sharers)
    throttled_s = _increase(begin.throttled_s, end.throttled_s)
    pressure_s = _increase(begin.pressure_s, end.pressure_s)
    wall_s = end.at_s - begin.at_s
    stolen_s = max(end.stolen_s - begin.stolen_s, 0.0)

    others_s = None
    busy_s = end.busy_s - begin.busy_s
    sums_include_ours = busy_s + _SLACK_S >= had_s / 2
    if sums_include_ours:
        others_s = max(busy_s - had_s - _SLACK_S, 0.0)
    waited_s = _waiting_seconds(sharers)
    if waited_s is not None:
        waited_s = max(waited_s - (throttled_s or 0.0), 0.0)

    # The pressure is a lower bound: several threads may have waited at a time.
    lost_s = pressure_s if waited_s is None else waited_s
    missed_s = None
    if lost_s is not None and others_s is not None:
        our_share = had_s / max(had_s + others_s, 1e-9)
        missed_s = min(lost_s, others_s) + stolen_s * our_share
    not_had = None
    if missed_s is not None:
        not_had = missed_s / max(had_s + missed_s, 1e-9)
    pressure = None
    if pressure_s is not None:
        pressure = min(pressure_s / wall_s, 1.0)
    return Contention(
        wall_s=wall_s,
        cpus=len(end.cpus),
        had_s=had_s,
        waited_s=waited_s,
        others_s=others_s,
        stolen_s=stolen_s,
        throttled_s=throttled_s,
        pressure=pressure,
        involuntary_switches=end.switches - begin.switches,
        not_had=not_had,
    )


def _cpu_seconds(uses: Sequence[CpuUse]) -> float:
    """Return the CPU seconds of all processes; one that several ranks see counts once.

    The time of a process that has ended is in its parent's count; one that has begun had none before.
    """
    begin_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for use in uses:
        begin_s.update(use.begin.own_s)
        end_s.update(use.end.own_s)
    return max(sum(end_s.values()) - sum(begin_s.values()), 0.0)


def _waiting_seconds(uses: Sequence[CpuUse]) -> float | None:
    """Return the seconds that all threads that still live waited for a CPU; None if it is unknown on a rank."""
    waited_s: dict[int, float] = {}
    for use in uses:
        begin_s = use.begin.waited_s
        end_s = use.end.waited_s
        if begin_s is None or end_s is None:
            return None
        for thread, seconds in end_s.items():
            waited_s[thread] = seconds - begin_s.get(thread, 0.0)
    return sum(waited_s.values())


def _increase(begin: float | None, end: float | None) -> float | None:
    if begin is None or end is None:
        return None
    return max(end - begin, 0.0)


def cpu_reading(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> CpuReading | None:
    """Return the current counts; None off Linux. Reads a small file for each process, and for each of our threads."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = frozenset(os.sched_getaffinity(0))
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    try:
        busy_ticks, stolen_ticks = _machine_ticks(proc, cpus)
        family = _family(proc, tick_s)
    except (OSError, ValueError, IndexError):  # no such file, or another format
        return None
    group = _group(proc, cgroups)
    pressure = _text(group / "cpu.pressure") or _text(proc / "pressure/cpu")
    return CpuReading(
        at_s=monotonic(),
        machine=_text(proc / "sys/kernel/random/boot_id") or "",
        cpus=cpus,
        busy_s=busy_ticks * tick_s,
        stolen_s=stolen_ticks * tick_s,
        own_s=family,
        waited_s=_waits(proc, family),
        pressure_s=_pressure(pressure),
        throttled_s=_throttled(_text(group / "cpu.stat")),
        switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    )


def _machine_ticks(proc: Path, cpus: Container[int]) -> tuple[int, int]:
    """Return the ticks that ``cpus`` were busy, and those that a hypervisor took from them."""
    busy_ticks = 0
    stolen_ticks = 0
    for line in (proc / "stat").read_text().splitlines():
        is_one_cpu = line.startswith("cpu") and line[3].isdigit()
        if not is_one_cpu:
            continue
        name, *texts = line.split()
        if int(name[3:]) not in cpus:
            continue
        ticks = [int(text) for text in texts]
        # user, nice, system, idle, iowait, irq, softirq and steal, in this order
        busy_ticks += sum(ticks[:3])
        if len(ticks) > 7:
            stolen_ticks += ticks[7]
    return busy_ticks, stolen_ticks


def _family(proc: Path, tick_s: float) -> dict[int, float]:
    """Return the CPU seconds of this process and its descendants, with children that have ended."""
    cpu_s: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        text = _text(proc / entry.name / "stat")
        if text is None:
            continue
        # The name in brackets may contain anything. After it come state, parent and nine more fields, then the user
        # and system times of the process, and those of the children that it has waited for.
        fields = text.rpartition(")")[2].split()
        pid = int(entry.name)
        parent = int(fields[1])
        children[parent].append(pid)
        cpu_s[pid] = sum(int(ticks) for ticks in fields[11:15]) * tick_s
    family: dict[int, float] = {}
    unvisited = [os.getpid()]
    while unvisited:
        pid = unvisited.pop()
        family[pid] = cpu_s[pid]
        unvisited.extend(children[pid])
    return family


def _waits(proc: Path, family: Iterable[int]) -> dict[int, float] | None:
    """Return the seconds that each thread was ready to run and had no CPU; None if the kernel does not count."""
    waited_s: dict[int, float] = {}
    for pid in family:
        with suppress(OSError):  # the process has ended
            for thread in os.scandir(proc / str(pid) / "task"):
                text = _text(Path(thread.path, "schedstat"))
                if text is not None:
                    waited_s[int(thread.name)] = int(text.split()[1]) * 1e-9
    return waited_s or None


def _pressure(text: str | None) -> float | None:
    if text is None or not text.startswith("some"):
        return None
    return int(text.splitlines()[0].rpartition("total=")[2]) * 1e-6


def _throttled(text: str | None) -> float | None:
    """Return for how many seconds its CPU limit stopped a control group, from the ``text`` of its ``cpu.stat``.

    Version 2 of control groups counts microseconds, version 1 nanoseconds. None if the text has neither.
    """
    counts: dict[str, str] = {}
    for line in (text or "").splitlines():
        fields = line.split()
        if len(fields) >= 2:
            counts[fields[0]] = fields[1]
    if "throttled_usec" in counts:
        return int(counts["throttled_usec"]) * 1e-6
    if "throttled_time" in counts:
        return int(counts["throttled_time"]) * 1e-9
    return None


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
