"""What else used the machine: CPU time that this run wanted and did not get, because something else had it.

Read twice, where the measured steps begin and end, from Linux's own counts (proc(5), Documentation/scheduler/
sched-stats.rst, Documentation/accounting/psi.rst). Elsewhere it is unknown. What a hypervisor takes and does not report
as stolen, nobody inside can see.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lm_profiler.measure.device.cpu_reading import CpuReading, cpu_reading
from lm_profiler.measure.device.gpu_sharing import gpu_sharing
from lm_profiler.measure.device.nvml import Gpu
from lm_profiler.record.run import Contention, GpuSharing

_SLACK_S = 0.03
"""CPU time of others that is not counted: three ticks, which is how finely the system's own sums are kept."""

_SHORTEST_S = 0.1
"""A measurement shorter than this says nothing: its CPU time is a few ticks."""


@dataclass(frozen=True)
class CpuUse:
    """What one process saw where the measured steps begin, and where they end; and of its GPU."""

    begin: CpuReading
    end: CpuReading
    gpu: GpuSharing | None = None


@dataclass(eq=False)
class CpuUseReader:
    """Reads the counts at ``begin`` and at ``end``, and nothing in between; of ``gpu`` too, where the run has one."""

    gpu: Gpu | None
    _begun_s: float = 0.0
    _before: CpuReading | None = None

    def begin(self) -> None:
        self._begun_s, self._before = time.time(), cpu_reading()

    def end(self) -> list[CpuUse]:
        """The use of this process; empty where nobody counts."""
        if self._before is None or (after := cpu_reading()) is None:
            return []
        return [CpuUse(self._before, after, None if self.gpu is None else gpu_sharing(self.gpu, self._begun_s))]


def contention(uses: Sequence[CpuUse]) -> Contention | None:
    """What ``uses``, one of each rank, say of the CPUs that were shared the most, and of the GPU that was; None where
    nothing can be said.

    Threads of ours also wait for each other: OpenMP's, or a loader's workers where there are more than CPUs. So what
    was not had is the lesser of two: the time that our threads waited for a CPU, and the time that others ran on them;
    and of what the hypervisor took, our part.
    """
    long_enough = [use for use in uses if use.end.at_s - use.begin.at_s >= _SHORTEST_S]
    machines = []
    for where in {(use.end.machine, use.end.cpus): use for use in long_enough}.values():
        # Ranks may have CPUs of their own, or share them.
        together = [u for u in long_enough if u.end.machine == where.end.machine and u.end.cpus <= where.end.cpus]
        machines.append(_shared(where, together))
    worst = max(machines, key=lambda each: each.not_had or 0.0, default=None)
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
        involuntary_switches=end.switches - begin.switches,
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
