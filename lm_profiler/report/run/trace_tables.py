"""The answer of ``why TRACE`` as tables: summary, kernels, modules, idle time, collectives, copies, waterfall."""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.record.figure import count_text, with_prefix
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.text import shortened
from lm_profiler.record.trace_answer import (
    CopyTime,
    IdleTime,
    LaunchFacts,
    TraceAnswer,
    TraceFloor,
)
from lm_profiler.report.run.kernel_tables import (
    kernels_table,
    kinds_table,
    left_out_line,
    modules_tables,
)
from lm_profiler.report.run.waterfall_text import tables_of_waterfall
from lm_profiler.report.tables.table import Table, text_table

_LARGEST_KERNELS, _LARGEST_GAPS = 15, 10

_CAUSES = {
    "queued": "between kernels that were queued",
    "launching": "the host had not launched the next kernel yet",
    "waiting": "the host had waited for the device",
    "driver": "another driver call",
    "input": "the host handled a batch",
    "end": "no further kernel was launched",
    "python": "Python, or an operator that calls other operators",
}


def trace_tables(answer: TraceAnswer) -> list[Table]:
    """Return the tables of a trace; their figures are per step."""
    kernels = answer.kernels
    largest = kernels_table(kernels, _LARGEST_KERNELS, cuts_names=True)
    hidden = left_out_line(kernels, _LARGEST_KERNELS)
    tables = [
        Table(above=summary_lines(answer)),
        kinds_table(kernels),
        replace(
            largest,
            title="largest kernels" if answer.launches else "largest operators",
            below=[hidden],
        ),
    ]
    tables += modules_tables(kernels)
    tables += _idle_tables(answer)
    tables += _collective_tables(answer)
    tables += _copy_tables(answer)
    if answer.waterfall is not None:
        terms, *further_tables = tables_of_waterfall(answer.waterfall)
        tables.append(replace(terms, title="waterfall of the traced step"))
        tables += further_tables
    return tables


def summary_lines(answer: TraceAnswer) -> list[str]:
    """Return a line for each main fact of a trace."""
    step_s = answer.kernels.window_s / answer.steps
    device = answer.device or "an unnamed device"
    if answer.launches is None:
        device = "the CPU (the trace has no kernels of a device)"
    busy_share = answer.busy_s / answer.kernels.window_s
    lines = [
        f"{answer.trace}{_rank_text(answer)}",
        f"steps: {_steps_text(answer)}, {_ms(step_s)} per step",
        f"device: {device}, busy {busy_share:.1%}, idle {1 - busy_share:.1%}",
    ]
    if answer.launches is not None:
        lines.append(f"launches: {_launches_text(answer, answer.launches)}")
    lines.append(f"communication: {_communication_text(answer)}")
    if answer.floor is not None:
        lines.append(f"floor: {_floor_text(answer, answer.floor)}")
    for damage, count in answer.left_out.items():
        lines.append(f"left out: {count_text(count, 'event')} {damage}")
    lines += [f"note: {note}" for note in answer.notes]
    return lines


def _rank_text(answer: TraceAnswer) -> str:
    if answer.rank is None or answer.world_size is None:
        return ""
    return f", rank {answer.rank} of {answer.world_size}"


def _steps_text(answer: TraceAnswer) -> str:
    """Return the number of steps and the name of their ranges, or that the whole trace counts as one step."""
    if answer.step_source == "whole":
        reason = "because it has no ProfilerStep# ranges"
        return f"the whole trace counts as one step, {reason} (--step NAME selects other ranges)"
    name = answer.step_name if answer.step_name is not None else "ProfilerStep#"
    return f"{answer.steps} ({name})"


def _launches_text(answer: TraceAnswer, launches: LaunchFacts) -> str:
    """Return whether launches limit the step: shares of its time, number of kernels, and their delay."""
    window_s = answer.kernels.window_s
    launching_share = launches.launching_s / window_s
    waiting_share = launches.waiting_s / window_s
    kernels_per_step = launches.kernels / answer.steps
    median_delay_us = launches.median_delay_s * 1e6
    return (
        f"{launches.verdict}: the device waits for a launch {launching_share:.1%} of the time, and for "
        f"{waiting_share:.1%} it is idle because the host had waited for it; {kernels_per_step:,.5g} kernels per step, "
        f"which start {median_delay_us:,.1f} µs after their launch (median)"
    )


def _communication_text(answer: TraceAnswer) -> str:
    """Return the time of collectives per step, and the part of it that no computation hides."""
    communication = answer.communication
    if communication is None:
        return "none"
    total_s = communication.total_s / answer.steps
    exposed_s = communication.exposed_s / answer.steps
    share = communication.exposed_s / answer.kernels.window_s
    return f"{_ms(total_s)} per step, of which {_ms(exposed_s)} exposed ({share:.1%} of the step)"


def _floor_text(answer: TraceAnswer, floor: TraceFloor) -> str:
    """Return the least time of a step on the device of ``floor``, its parts, and how much work is not included."""
    parts_s = []
    for seconds in (floor.products_s, floor.memory_s):
        if seconds is not None:
            parts_s.append(seconds)
    floor_s = sum(parts_s) / answer.steps
    names = []
    if floor.products_s is not None:
        names.append(f"matmuls {_ms(floor.products_s / answer.steps)}")
    if floor.memory_s is not None:
        names.append(f"memory {_ms(floor.memory_s / answer.steps)}")
    unknown_share = floor.unknown_s / answer.kernels.window_s
    share = sum(parts_s) / answer.kernels.window_s
    return (
        f"{_ms(floor_s)} per step on {floor.device} ({', '.join(names)}), {share:.1%} of the traced step; this "
        f"excludes {unknown_share:.1%} of the step, whose work the trace does not show ({floor.source})"
    )


def _idle_tables(answer: TraceAnswer) -> list[Table]:
    """Return a table of the causes of idle time, the largest first; no table if there was no idle time."""
    if not answer.idle:
        return []
    rows = [_idle_row(answer, idle) for idle in answer.idle[:_LARGEST_GAPS]]
    hidden = answer.idle[_LARGEST_GAPS:]
    lines_below = []
    if hidden:
        hidden_s = sum(idle.total_s for idle in hidden) / answer.steps
        lines_below.append(
            f"{count_text(len(hidden), 'further cause')}, {_ms(hidden_s)}"
        )
    titles = ["in", "cause", "phase", "times", "ms", "share"]
    title = "idle time of the device, and what the host did"
    if answer.launches is None:
        title = "time in which no operator computes"
    return [text_table(titles, rows, left=3, title=title, below=lines_below)]


def _idle_row(answer: TraceAnswer, idle: IdleTime) -> list[str]:
    """Return the texts of the row of one cause of idle time, per step."""
    share = idle.total_s / answer.kernels.window_s
    return [
        shortened(idle.what),
        _CAUSES.get(idle.cause, idle.cause),
        idle.phase,
        f"{idle.count / answer.steps:,.5g}",
        _ms_number(idle.total_s / answer.steps),
        f"{share:.1%}",
    ]


def _collective_tables(answer: TraceAnswer) -> list[Table]:
    """Return a table with a row for each collective; no table if there are none."""
    if answer.communication is None:
        return []
    rows = []
    for collective in answer.communication.by_name:
        rows.append(
            [
                shortened(collective.name),
                f"{collective.count / answer.steps:,.5g}",
                _ms_number(collective.total_s / answer.steps),
                _ms_number(collective.exposed_s / answer.steps),
            ]
        )
    return [
        text_table(
            ["collective", "calls", "ms", "exposed ms"], rows, title="communication"
        )
    ]


def _copy_tables(answer: TraceAnswer) -> list[Table]:
    """Return a table of copies and memsets; no table if there were none."""
    if not answer.copies:
        return []
    rows = [_copy_row(answer, copy) for copy in answer.copies]
    return [
        text_table(
            ["copy", "calls", "ms", "bytes", "rate"], rows, title="copies and memsets"
        )
    ]


def _copy_row(answer: TraceAnswer, copy: CopyTime) -> list[str]:
    """Return the texts of a copy's row: its name, its calls, time and bytes per step, and its rate."""
    size = "unknown"
    rate = "unknown"
    if copy.bytes is not None:
        size = with_prefix(copy.bytes / answer.steps, "B")
        if copy.total_s > 0:
            rate = with_prefix(copy.bytes / copy.total_s, "B/s")
    calls = f"{copy.count / answer.steps:,.5g}"
    time_ms = _ms_number(copy.total_s / answer.steps)
    return [copy.name, calls, time_ms, size, rate]


def _ms(seconds: float) -> str:
    return TIMES["step"].show(seconds)


def _ms_number(seconds: float) -> str:
    return TIMES["step"].show(seconds, unit=False, digits=3)
