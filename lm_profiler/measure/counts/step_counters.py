"""Computes the counters of each step from the raw readings between steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import Any, NamedTuple

from lm_profiler.measure.counts.garbage import GarbageCollection
from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import Raw
from lm_profiler.record.run import StepCounters

# The most CPU time, in seconds, that a minor page fault takes: clearing a huge page of 2 MiB at 4 GB/s. A small page
# takes a thousandth of that; nobody counts how many were huge, so that the kernel's CPU time is often the closer bound.
DEAREST_FAULT_S = 0.5e-3

_USAGE = ("ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw")


@dataclass(frozen=True)
class Beside:
    """Events of the same time from other sources, on the clock of the raw readings."""

    collections: Sequence[GarbageCollection] = ()  # garbage collections
    compilations: Sequence[TimedCompilation] | None = ()  # those of torch.compile; None where they are not known
    # returns the GPU's clock rate and throttle reasons between two instants in seconds
    gpu: Callable[[float, float], tuple[float | None, list[str] | None]] = lambda began_s, ended_s: (None, None)


def step_counters(raw: Sequence[Raw], beside: Beside, rank: int = 0) -> list[StepCounters]:
    """Return the counters of each step: of each reading but the first, which is where the steps begin."""
    garbage = [_TimeSpan(one.began_ns * 1e-9, one.ended_ns * 1e-9, one.generation) for one in beside.collections]
    compiled = None if beside.compilations is None else _disjoint(beside.compilations)
    figures = []
    for before, after in pairwise(raw):
        step, began_s, ended_s = after[0], after[1] * 1e-9, after[2] * 1e-9
        gc_s, generation = _overlap(garbage, began_s, ended_s)
        compile_s, what = (None, None) if compiled is None else _overlap(compiled, began_s, ended_s)
        clock_hz, reasons = beside.gpu(began_s, ended_s)
        counted = StepCounters(
            step=step,
            rank=rank,
            wall_s=ended_s - began_s,
            between_s=began_s - before[2] * 1e-9,
            gc_s=gc_s,
            gc_generation=generation,
            compile_s=compile_s,
            compiled=what,
            sm_clock_hz=clock_hz,
            throttled=reasons,
        )
        figures.append(counted.model_copy(update=_since(before, after)))
    return figures


def _since(before: Raw, after: Raw) -> dict[str, float | None]:
    """Return what happened between two readings: in the step, and in the time before it."""
    wall_s = max((after[2] - before[2]) * 1e-9, 1e-9)
    user_s, system_s, minor, major, waited, lost = (getattr(after[3], of) - getattr(before[3], of) for of in _USAGE)
    ran_s, no_cpu_s = _thread(before[4], after[4])
    # Faults of several threads pass at the same time: divide by the threads that ran on average.
    threads = max((user_s + system_s) / wall_s, 1.0)
    retries, segments = map(sub, after[5], before[5]) if after[5] and before[5] else (None, None)
    return {
        "cpu_wait_s": no_cpu_s,
        "asleep_s": None if ran_s is None or no_cpu_s is None else max(wall_s - ran_s - no_cpu_s, 0.0),
        "cpu_s": user_s + system_s,
        "system_s": system_s,
        "fault_s": min(minor * DEAREST_FAULT_S, system_s) / threads,
        "minor_faults": minor,
        "major_faults": major,
        "voluntary_switches": waited,
        "involuntary_switches": lost,
        "alloc_retries": retries,
        "new_segments": segments,
    }


def _thread(before: bytes, after: bytes) -> tuple[float | None, float | None]:
    """Return the seconds that a thread ran, and that it was ready and had no CPU."""
    if not before or not after:
        return None, None
    ran, waited = (int(now) - int(then) for then, now in zip(before.split()[:2], after.split()[:2], strict=True))
    return ran * 1e-9, waited * 1e-9


class _TimeSpan(NamedTuple):
    began_s: float
    ended_s: float
    what: Any


def _overlap(spans: Sequence[_TimeSpan], began_s: float, ended_s: float) -> tuple[float, Any]:
    """Return the seconds of ``spans``, ordered and disjoint, within two instants, and what the longest of them is."""
    inside = []
    for at in range(bisect_left(spans, began_s, key=lambda span: span.ended_s), len(spans)):
        span = spans[at]
        if span.began_s >= ended_s:
            break
        inside.append((min(span.ended_s, ended_s) - max(span.began_s, began_s), span.what))
    named = [each for each in inside if each[1] is not None]
    return sum(each[0] for each in inside), max(named, key=lambda each: each[0])[1] if named else None


def _disjoint(compilations: Sequence[TimedCompilation]) -> list[_TimeSpan]:
    """Return the compilations in order and disjoint: of a nested one only the part outside the other."""
    spans, last_s = list[_TimeSpan](), 0.0
    for one in sorted(compilations, key=lambda each: each.began_s):
        spans.append(_TimeSpan(max(one.began_s, last_s), max(one.ended_s, last_s), one.what))
        last_s = max(last_s, one.ended_s)
    return spans
