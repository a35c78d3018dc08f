"""The floor of each phase: the larger of its FLOPs at the peak and its bytes at the bandwidth.

The roofline model (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model") with the
phase as its kernel, and with the bytes that have to move at least: what a phase moves more counts as time above its
floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lm_profiler.analysis.hardware.device_rates import MEASURED_COPY
from lm_profiler.record.quantities import with_prefix
from lm_profiler.record.run import Floor, Rates

BEATEN = 1.05  # a floor that the phase stays under by more than this is none: noise cannot explain it

LEAST_S = 1e-6  # a floor below this is none: a kernel's launch takes longer, whatever the kernel does

# the note's words on bytes that took less than they take at the bandwidth
IN_CACHES = "they lie in caches, or that rate is too low"


@dataclass(frozen=True)
class Work:
    """The work of a phase of one step on one device: FLOPs by dtype, and bytes to and from its memory.

    None is unknown; ``on_the_bus`` are bytes between host and device, of whose bandwidth nothing is known.
    """

    flops: Mapping[str, int] | None
    bytes: int | None
    on_the_bus: bool = False


def floor_of(work: Work, rates: Rates, took_s: float | None) -> Floor:
    """Return the floor of a phase that took ``took_s`` seconds.

    A floor in bytes that the phase beat tells that its bytes lay in caches: then the FLOPs alone are its floor. One in
    FLOPs that it beat tells that the peak is not the device's: then there is none. ``beaten_floors`` says so.
    """
    compute_s, memory_s = _compute_s(work.flops, rates), _memory_s(work, rates)
    known = Floor(flops=dict(work.flops or {}), bytes=work.bytes)
    in_caches = memory_s is not None and _beaten(memory_s, took_s)
    if compute_s is None or _beaten(compute_s, took_s):
        return known
    if memory_s is None or in_caches:
        if not compute_s:
            return known
        return _floor(known, compute_s, "compute" if in_caches else None, took_s)
    bound = "compute" if compute_s >= memory_s else "memory"
    return _floor(known, max(compute_s, memory_s), bound if compute_s or memory_s else None, took_s)


def beaten_floors(work: Mapping[str, Work], rates: Rates, took_s: Mapping[str, float | None]) -> list[str]:
    """Return why phases that took ``took_s`` seconds have no floor, where it is because they beat it: a note for each
    reason.

    ``work`` and ``took_s`` are by phase.
    """
    in_flops, in_bytes = [], []
    for phase, of in work.items():
        took = took_s.get(phase)
        compute_s, memory_s = _compute_s(of.flops, rates), _memory_s(of, rates)
        if not took or compute_s is None:
            continue
        if _beaten(compute_s, took):
            in_flops.append(phase)
        elif not compute_s and memory_s is not None and _beaten(memory_s, took):
            in_bytes.append(phase)
    notes = []
    if in_flops:
        dtypes = {dtype for phase in in_flops for dtype, count in (work[phase].flops or {}).items() if count}
        peaks = [
            f"{with_prefix(rate.flops_per_s, 'FLOP/s')} in {rate.dtype} ({rate.source})"
            for rate in rates.flops
            if rate.dtype in dtypes
        ]
        notes.append(f"{_unknown(in_flops)} FLOPs take at the peak, {', '.join(peaks)}: the peak is not this device's")
    if in_bytes and rates.bytes_per_s:
        which = "measured bandwidth" if rates.bytes_source == MEASURED_COPY else "bandwidth"
        rate = with_prefix(rates.bytes_per_s, "B/s")
        notes.append(f"{_unknown(in_bytes)} bytes take at the {which}, {rate}: {IN_CACHES}")
    return notes


def _unknown(phases: Sequence[str]) -> str:
    if len(phases) == 1:
        return f"the floor of {phases[0]} is unknown: it took less than its"
    return f"the floors of {', '.join(phases[:-1])} and {phases[-1]} are unknown: each took less than its"


def _memory_s(work: Work, rates: Rates) -> float | None:
    if work.bytes is None or not rates.bytes_per_s or work.on_the_bus:
        return None
    return work.bytes / rates.bytes_per_s


def _compute_s(flops: Mapping[str, int] | None, rates: Rates) -> float | None:
    """Seconds of products that run one after the other; None where those of a dtype, or its rate, are unknown."""
    if flops is None:
        return None
    seconds = 0.0
    for dtype, count in flops.items():
        rate = rates.flops_per_s(dtype)
        if rate is None:
            return None
        seconds += count / rate
    return seconds


def _beaten(floor_s: float, took_s: float | None) -> bool:
    return took_s is not None and floor_s > BEATEN * took_s


def _floor(known: Floor, seconds: float, bound: str | None, took_s: float | None) -> Floor:
    times = took_s / seconds if took_s is not None and seconds >= LEAST_S else None
    return known.model_copy(update={"seconds": seconds, "bound": bound, "times": times})
