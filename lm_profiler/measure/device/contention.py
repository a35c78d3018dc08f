"""Finds the CPU time that this run wanted and did not get, because something else had it.

Linux's own counts are read twice, where the measured steps begin and end (proc(5), Documentation/scheduler/
sched-stats.rst, Documentation/accounting/psi.rst). On other systems it is unknown. Time that a hypervisor takes without
reporting it as stolen cannot be seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lm_profiler.measure.device.cpu_reading import CpuReading, cpu_reading
from lm_profiler.measure.device.gpu_sharing import gpu_sharing
from lm_profiler.measure.device.nvml import Gpu
from lm_profiler.record.run import Contention, GpuSharing

_SLACK_S = 0.03  # seconds of CPU time of others that do not count: three ticks, the resolution of the system's sums

_SHORTEST_S = 0.1  # seconds: a shorter measurement says nothing, since its CPU time is a few ticks


@dataclass(frozen=True)
class CpuUse:
    """One process's readings where the measured steps begin and end, and the use of its GPU by others."""

    begin: CpuReading
    end: CpuReading
    gpu: GpuSharing | None = None


@dataclass(eq=False)
class CpuUseReader:
    """Reads the counts at ``begin`` and at ``end``, and nothing in between."""

    gpu: Gpu | None
    _begun_s: float = 0.0
    _before: CpuReading | None = None

    def begin(self) -> None:
        """Read the counts where the measured steps begin."""
        self._begun_s, self._before = time.time(), cpu_reading()

    def end(self) -> list[CpuUse]:
        """Return this process's readings, as a list of one; empty where the system does not count."""
        if self._before is None or (after := cpu_reading()) is None:
            return []
        return [CpuUse(self._before, after, None if self.gpu is None else gpu_sharing(self.gpu, self._begun_s))]


def contention(uses: Sequence[CpuUse]) -> Contention | None:
    """Return the contention for the CPUs and the GPU that were shared the most; None where it is unknown.

    ``uses`` has one entry of each rank. Our threads also wait for each other: OpenMP's, or a loader's workers where
    there are more than CPUs. So the CPU time that was not had is the lesser of two, the time that our threads waited
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
    others_s, stolen_s = _others(where, had_s), max(end.stolen_s - begin.stolen_s, 0.0)
    waited_s = _waited(ours)
    if waited_s is not None:
        waited_s = max(waited_s - (throttled_s or 0.0), 0.0)
    lost_s = waited_s if waited_s is not None else pressure_s  # a lower bound: several may have waited at a time
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
        involuntary_switches=end.switches - begin.switches,
        not_had=None if missed_s is None else missed_s / max(had_s + missed_s, 1e-9),
    )


def _had(before: Sequence[dict[int, float]], after: Sequence[dict[int, float]]) -> float:
    """Return the CPU seconds of all processes; one that several ranks see counts once.

    The time of a process that has ended is in its parent's count; one that has begun had none before.
    """
    begin, end = ({pid: s for each in counts for pid, s in each.items()} for counts in (before, after))
    return max(sum(end.values()) - sum(begin.values()), 0.0)


def _others(where: CpuUse, had_s: float) -> float | None:
    """Return the CPU seconds of everything else; None where the system's sums do not include our own."""
    busy_s = where.end.busy_s - where.begin.busy_s
    return None if busy_s + _SLACK_S < had_s / 2 else max(busy_s - had_s - _SLACK_S, 0.0)


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
