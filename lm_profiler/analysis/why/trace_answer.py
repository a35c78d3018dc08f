"""Answers where the time of a trace went: kernels, idle time and its causes, communication, copies, the floor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from lm_profiler.analysis.trace.any_trace import AnyTrace
from lm_profiler.analysis.trace.kernel_sums import Communication, kernel_table
from lm_profiler.analysis.trace.pieces import Piece, TracedWork
from lm_profiler.analysis.trace.trace_processes import TraceProcess, process_names
from lm_profiler.analysis.why.trace_floor import floor_of, waterfall_of
from lm_profiler.analysis.why.traced import Gap, GapCause, broken_down
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.trace_answer import (
    CollectiveSum,
    CommunicationTime,
    CopyTime,
    IdleTime,
    LaunchFacts,
    LaunchVerdict,
    TraceAnswer,
)

# A trace is launch-bound, or partly so, if the device waits for launches for at least this share of the time.
_LAUNCH_BOUND, _PARTLY_LAUNCH_BOUND = 0.20, 0.05

_COPY_NAMES = ("Mem", "hipMem", "Copy")  # beginnings of the names of copies and memsets


def trace_answer(trace: AnyTrace, device: str | None = None) -> TraceAnswer:
    """Return what ``trace`` shows; the floor is that of ``device``, or if it is None, of the trace's own device."""
    work = trace.work
    kernels = kernel_table(work)
    traced = broken_down(work)
    notes = _notes(trace)
    floor_device = device
    if floor_device is None and work.on_device:
        floor_device = trace.device_name
    floor = None
    waterfall = None
    if floor_device is not None:
        floor = floor_of(traced, floor_device, notes)
        is_own_device = trace.device_name in (None, floor_device)
        # the times of a trace and the peaks of another device do not add up
        if is_own_device:
            waterfall = waterfall_of(traced, floor_device, notes)
    return TraceAnswer(
        trace=str(trace.path),
        device=trace.device_name,
        rank=trace.rank,
        world_size=trace.world_size,
        process=None if trace.process is None else trace.process.name,
        steps=kernels.steps,
        step_source=trace.step_source,
        step_name=trace.step_name,
        busy_s=sum(phase.busy_s for phase in kernels.phases.values()),
        idle_s=sum(phase.idle_s for phase in kernels.phases.values()),
        kernels=kernels,
        idle=_idle_times(traced.gaps),
        launches=_launch_facts(work, traced.gaps, kernels),
        communication=_communication_time(traced.communication),
        copies=_copy_times(work.pieces),
        floor=floor,
        waterfall=waterfall,
        left_out=dict(work.packed.damaged_events),
        notes=notes,
    )


def _notes(trace: AnyTrace) -> list[str]:
    """Return what a reader must know about the trace: what is shown of it, and what it lacks."""
    packed = trace.work.packed
    notes = []
    if trace.process is not None:
        notes += _process_notes(trace.process, trace.processes)
    if trace.part_words is not None:
        notes.append(trace.part_words)
    if len(packed.devices) > 1 and trace.work.on_device:
        notes.append(
            f"the trace has kernels of {len(packed.devices)} devices: busy is the time in which any of them was busy"
        )
    if not packed.phases:
        notes.append("no range names a phase, so all time counts as other")
    return notes


def _process_notes(
    process: TraceProcess, processes: Sequence[TraceProcess]
) -> list[str]:
    """Return notes about a file of several processes, of which ``process`` is shown."""
    shown = f"only that of {process.name} is shown (--process selects another one)"
    notes = [f"the trace has the work of {process_names(processes)}; {shown}"]
    if process.is_assumed:
        notes.append(
            "the trace does not show which process launched the kernels of which device, so processes and devices are "
            "paired in their order"
        )
    return notes


def _idle_times(gaps: Iterable[Gap]) -> list[IdleTime]:
    """Return the idle time by its cause, phase and the host's call, the longest first."""
    # by cause, phase and what the host did
    idle_ns: Counter[tuple[GapCause, str, str]] = Counter()
    counts: Counter[tuple[GapCause, str, str]] = Counter()
    for gap in gaps:
        key = (gap.cause, gap.phase, gap.what)
        idle_ns[key] += gap.ns
        counts[key] += 1
    times = []
    for key, ns in idle_ns.most_common():
        cause, phase, what = key
        times.append(
            IdleTime(
                cause=cause,
                phase=phase,
                what=what,
                count=counts[key],
                total_s=ns * 1e-9,
            )
        )
    return times


def _launch_facts(
    work: TracedWork, gaps: Iterable[Gap], kernels: KernelTable
) -> LaunchFacts | None:
    """Return how the host launched the kernels, and whether that limits the step; None without a device."""
    if not work.on_device:
        return None
    ns_by_cause: Counter[str] = Counter()
    for gap in gaps:
        ns_by_cause[gap.cause] += gap.ns
    launching_s = ns_by_cause["launching"] * 1e-9
    delays_ns = [max(piece.start - piece.launched_at, 0) for piece in work.pieces]
    return LaunchFacts(
        kernels=len(work.pieces),
        launching_s=launching_s,
        waiting_s=ns_by_cause["waiting"] * 1e-9,
        median_delay_s=median(delays_ns) * 1e-9,
        verdict=launch_verdict(launching_s / kernels.window_s),
    )


def launch_verdict(share: float) -> LaunchVerdict:
    """Return the word for the ``share`` of the time in which the device waits for launches."""
    if share >= _LAUNCH_BOUND:
        return "launch-bound"
    if share >= _PARTLY_LAUNCH_BOUND:
        return "partly launch-bound"
    return "not launch-bound"


def _communication_time(
    communication: Communication | None,
) -> CommunicationTime | None:
    """Return the collectives' time for the answer, the longest names first; None if there are none."""
    if communication is None:
        return None
    by_name = []
    for collective in sorted(
        communication.by_name, key=lambda collective: collective.ns, reverse=True
    ):
        by_name.append(
            CollectiveSum(
                name=collective.name,
                count=collective.calls,
                total_s=collective.ns * 1e-9,
                exposed_s=collective.exposed_ns * 1e-9,
            )
        )
    return CommunicationTime(
        total_s=communication.ns * 1e-9,
        exposed_s=communication.exposed_ns * 1e-9,
        by_name=by_name,
    )


def _copy_times(pieces: Iterable[Piece]) -> list[CopyTime]:
    """Return the copies and memsets of the driver by name, the longest first."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.name.startswith(_COPY_NAMES):
            by_name.setdefault(piece.name, []).append(piece)
    copies = []
    for name, calls in by_name.items():
        sizes = [call.copied_bytes for call in calls]
        known_sizes = [size for size in sizes if size is not None]
        sizes_are_known = len(known_sizes) == len(sizes)
        copies.append(
            CopyTime(
                name=name,
                count=len(calls),
                total_s=sum(call.own_ns for call in calls) * 1e-9,
                bytes=sum(known_sizes) if sizes_are_known else None,
            )
        )
    return sorted(copies, key=lambda copy: copy.total_s, reverse=True)
