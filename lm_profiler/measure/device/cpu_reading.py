"""Reads the CPU time of this run and of everything else, as Linux counts it."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic  # not by its module: whoever replaces the clock there counts its calls


@dataclass(frozen=True)
class CpuReading:
    """Counts at one instant, in seconds; None where the system does not count.

    ``own_s`` is by process and ``waited_s`` by thread, of this process and its descendants, including children that
    have ended. ``busy_s`` and ``stolen_s`` are sums over the CPUs that this process may use.
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
    switches: int


def cpu_reading(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> CpuReading | None:
    """Return the current counts; None off Linux. Reads a small file for each process, and for each of our threads."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus, tick_s = frozenset(os.sched_getaffinity(0)), 1.0 / os.sysconf("SC_CLK_TCK")
    try:
        busy, stolen = _system((proc / "stat").read_text(), cpus)
        family = _family(proc, tick_s)
    except (OSError, ValueError, IndexError):  # no such file, or another format
        return None
    group = _group(proc, cgroups)
    return CpuReading(
        at_s=monotonic(),
        machine=_text(proc / "sys/kernel/random/boot_id") or "",
        cpus=cpus,
        busy_s=busy * tick_s,
        stolen_s=stolen * tick_s,
        own_s=family,
        waited_s=_waits(proc, family),
        pressure_s=_pressure(_text(group / "cpu.pressure") or _text(proc / "pressure/cpu")),
        throttled_s=_throttled(_text(group / "cpu.stat")),
        switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    )


def _system(text: str, cpus: frozenset[int]) -> tuple[int, int]:
    """Return the ticks in which processes ran on ``cpus``, and those that the hypervisor took."""
    rows = [line.split() for line in text.splitlines() if line.startswith("cpu") and line[3].isdigit()]
    counts = [[int(count) for count in row[1:]] for row in rows if int(row[0][3:]) in cpus]
    # /proc/stat has user, nice, system, idle, iowait, irq, softirq and steal, in this order.
    return sum(sum(row[:3]) for row in counts), sum(row[7] for row in counts if len(row) > 7)


def _family(proc: Path, tick_s: float) -> dict[int, float]:
    """Return the CPU seconds of this process and of each descendant."""
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
    """Return the seconds in which at least one task waited for a CPU."""
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
    """Return the text of a file; None where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None
