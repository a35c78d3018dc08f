"""Finds the CPU time that this run needed but did not get, because other programs used the CPUs.

Linux's own counts are read twice, when the measured steps begin and when they end (proc(5), Documentation/scheduler/
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

# The function itself is imported, because a program that replaces ``time.monotonic`` may count its calls.
from time import monotonic

from lm_profiler.measure.device.nvml import Gpu, gpu_sharing
from lm_profiler.record.run_record import Contention, GpuSharing

# CPU time of other programs that does not count: three ticks, the resolution of the system's sums
_SLACK_S = 0.03
# a shorter measurement is too coarse, because its CPU time is only a few ticks
_SHORTEST_S = 0.1


@dataclass(frozen=True)
class CpuReading:
    """Counts at one instant, in seconds; None if the system does not provide them."""

    at_s: float
    machine: str  # identifies the running system
    cpus: frozenset[int]  # the CPUs that this process may use
    busy_s: float  # the time for which these CPUs were busy, summed over them
    stolen_s: float  # the time that a hypervisor took from these CPUs, summed over them
    # CPU time of this process and of each descendant, by process; a parent's includes children that have ended
    own_s: dict[int, float]
    # waiting for a CPU, by thread of these processes
    waited_s: dict[int, float] | None
    # the time in which at least one task of the control group waited for a CPU
    pressure_s: float | None
    # the time in which its CPU limit stopped the control group
    throttled_s: float | None
    switches: int  # involuntary context switches of this process


@dataclass(frozen=True)
class CpuUse:
    """One process's readings at the start and end of the measured steps, and the use of its GPU by others."""

    begin: CpuReading
    end: CpuReading
    gpu: GpuSharing | None = None


def cpu_use_since(
    begin: CpuReading | None, begun_s: float, gpu: Gpu | None
) -> list[CpuUse]:
    """Return the CPU use of this process since the reading ``begin``, as a list of one; empty if it is unknown.

    ``begun_s`` is the time of day of that reading.
    """
    if begin is None:
        return []
    end = cpu_reading()
    if end is None:
        return []
    sharing = None if gpu is None else gpu_sharing(gpu, begun_s)
    return [CpuUse(begin, end, sharing)]


def contention(uses: Sequence[CpuUse]) -> Contention | None:
    """Return the contention for the CPUs and the GPU that were shared the most; None if it is unknown.

    ``uses`` has one entry per rank. The threads of this run also wait for each other: those of OpenMP, or a loader's
    workers if there are more of them than CPUs. So the missing CPU time is the smaller of two times: how long our
    threads waited for a CPU, and how long other programs ran there. Our share of what the hypervisor took is added.
    """
    long_enough = [use for use in uses if use.end.at_s - use.begin.at_s >= _SHORTEST_S]
    # one rank of those with the same CPUs
    use_by_cpus = {(use.end.machine, use.end.cpus): use for use in long_enough}
    contentions = []
    for (machine, cpus), use in use_by_cpus.items():
        # Ranks may share CPUs or have their own. All ranks count together whose CPUs are a part of these.
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


def _missing_share(contention: Contention) -> float:
    return contention.not_had or 0.0


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
    # If the system's sums are far below the CPU time of this run, they do not include it.
    sums_include_ours = busy_s + _SLACK_S >= had_s / 2
    if sums_include_ours:
        others_s = max(busy_s - had_s - _SLACK_S, 0.0)
    waited_s = _waiting_seconds(sharers)
    if waited_s is not None:
        # Waiting because of the run's own CPU limit is no contention.
        waited_s = max(waited_s - (throttled_s or 0.0), 0.0)

    # The pressure is a lower bound of the waiting time: several threads may have waited at a time.
    known_wait_s = pressure_s if waited_s is None else waited_s
    not_had = None
    if known_wait_s is not None and others_s is not None:
        our_share = had_s / max(had_s + others_s, 1e-9)
        missed_s = min(known_wait_s, others_s) + stolen_s * our_share
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
    """Return the CPU seconds of all processes; a process that several ranks see counts once.

    The time of a process that has ended is in the count of its parent. A process that began in between counts from 0.
    """
    begin_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for use in uses:
        begin_s.update(use.begin.own_s)
        end_s.update(use.end.own_s)
    return max(sum(end_s.values()) - sum(begin_s.values()), 0.0)


def _waiting_seconds(uses: Sequence[CpuUse]) -> float | None:
    """Return how many seconds all living threads waited for a CPU; None if that is unknown on a rank."""
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
    """Return by how much a count has risen between two readings; None if one of them is unknown."""
    if begin is None or end is None:
        return None
    return max(end - begin, 0.0)


def cpu_reading(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> CpuReading | None:
    """Return the current counts; None if the system is not Linux.

    It reads a small file for each process of the system, and one for each thread of this run.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = frozenset(os.sched_getaffinity(0))
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    try:
        busy_ticks, stolen_ticks = _machine_ticks(proc, cpus)
        own_s_by_process = _cpu_seconds_of_family(proc, tick_s)
    except (OSError, ValueError, IndexError):  # no such file, or another format
        return None
    group = _control_group_folder(proc, cgroups)
    pressure = _text_of_file(group / "cpu.pressure") or _text_of_file(
        proc / "pressure/cpu"
    )
    return CpuReading(
        at_s=monotonic(),
        machine=_text_of_file(proc / "sys/kernel/random/boot_id") or "",
        cpus=cpus,
        busy_s=busy_ticks * tick_s,
        stolen_s=stolen_ticks * tick_s,
        own_s=own_s_by_process,
        waited_s=_waited_by_thread(proc, own_s_by_process),
        pressure_s=_waited_s_in(pressure),
        throttled_s=_throttled_s_in(_text_of_file(group / "cpu.stat")),
        switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    )


def _machine_ticks(proc: Path, cpus: Container[int]) -> tuple[int, int]:
    """Return for how many ticks ``cpus`` were busy, and how many a hypervisor took from them."""
    busy_ticks = 0
    stolen_ticks = 0
    for line in (proc / "stat").read_text().splitlines():
        is_one_cpu = line.startswith("cpu") and line[3].isdigit()
        if not is_one_cpu:
            continue
        name, *texts = line.split()
        if int(name[3:]) not in cpus:
            continue
        user, nice, system, *other_ticks = [int(text) for text in texts]
        busy_ticks += user + nice + system
        # idle, iowait, irq, softirq and steal, which old kernels lack
        if len(other_ticks) > 4:
            stolen_ticks += other_ticks[4]
    return busy_ticks, stolen_ticks


def _cpu_seconds_of_family(proc: Path, tick_s: float) -> dict[int, float]:
    """Return the CPU seconds of this process and its descendants, with children that have ended."""
    cpu_s: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        text = _text_of_file(proc / entry.name / "stat")
        if text is None:
            continue
        # The name in brackets may contain anything, also brackets.
        fields_after_name = text.rpartition(")")[2].split()
        _state, parent, *fields = fields_after_name
        pid = int(entry.name)
        children[int(parent)].append(pid)
        # Nine other fields come first, then four times: user and system time of the process, and those of the children
        # that it has waited for.
        times = fields[9:13]
        cpu_s[pid] = sum(int(ticks) for ticks in times) * tick_s
    family: dict[int, float] = {}
    unvisited = [os.getpid()]
    while unvisited:
        pid = unvisited.pop()
        family[pid] = cpu_s[pid]
        unvisited.extend(children[pid])
    return family


def _waited_by_thread(proc: Path, family: Iterable[int]) -> dict[int, float] | None:
    """Return how many seconds each thread of the processes ``family`` was ready to run and had no CPU.

    None if the kernel does not count them.
    """
    waited_s: dict[int, float] = {}
    for pid in family:
        with suppress(OSError):  # the process has ended
            for thread in os.scandir(proc / str(pid) / "task"):
                text = _text_of_file(Path(thread.path, "schedstat"))
                if text is not None:
                    _ran_ns, waited_ns = text.split()[:2]
                    waited_s[int(thread.name)] = int(waited_ns) * 1e-9
    return waited_s or None


def _waited_s_in(text: str | None) -> float | None:
    """Return the seconds in which some task waited for a CPU, from the ``text`` of a ``cpu.pressure`` file."""
    if text is None or not text.startswith("some"):
        return None
    # "some avg10=0.00 avg60=0.00 avg300=0.00 total=…", in microseconds
    first_line = text.splitlines()[0]
    _, _, total_us = first_line.rpartition("total=")
    return int(total_us) * 1e-6


def _throttled_s_in(text: str | None) -> float | None:
    """Return how many seconds a control group was stopped by its CPU limit, from the ``text`` of its ``cpu.stat``.

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


def _control_group_folder(proc: Path, cgroups: Path) -> Path:
    """Return the folder of this process's control group for CPU time; it may not exist."""
    for line in (_text_of_file(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 of control groups has one line without controllers, version 1 a line for each.
        if not controllers and (cgroups / "cgroup.controllers").exists():
            return cgroups / path.lstrip("/")
        if "cpu" in controllers.split(","):
            return cgroups / controllers / path.lstrip("/")
    return cgroups


def _text_of_file(path: Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None
