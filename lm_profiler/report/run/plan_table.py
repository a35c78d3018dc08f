"""Tables about memory: the phases of a plan, settings that need less, the largest allocations of a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_profiler.analysis.plan.planned import (
    Capacity,
    Planned,
    PlannedFloors,
    fits,
    smallest_gpu,
)
from lm_profiler.analysis.remedies.remedy import MemoryCandidate
from lm_profiler.record.figure import bytes_text, ms_text, share_text, with_prefix
from lm_profiler.record.memory_timeline import (
    CAUSE_TITLES,
    SOURCES,
    Allocation,
    BlockMemory,
    MemoryTimeline,
)
from lm_profiler.record.quantities import (
    CAUSES,
    FLOOR,
    PARTS,
    PLANNED_COLUMNS,
    REMEDY_COLUMNS,
    Quantity,
)
from lm_profiler.record.run_record import MOMENTS
from lm_profiler.report.run.sections import floor_texts
from lm_profiler.report.tables.table import (
    Heading,
    Table,
    TableCell,
    headings_of,
    text_cell,
    text_table,
    titled_headings,
)

_FITS = {True: "fits", None: "may not fit", False: "does not fit"}


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan_table(
    planned: Planned, context: int | None, device: Capacity, floors: PlannedFloors
) -> Table:
    """Return a row for each phase of ``planned``, with lines on what fits into ``device``."""
    rows = []
    for phase in PARTS:
        if phase not in planned.peaks:
            continue
        values = {
            "phase": phase,
            "peak": planned.peaks[phase],
            "causes": _causes_without_workspaces(planned, phase),
            "workspaces": planned.workspaces,
        }
        floor_cell = _phase_floor_cell(floors, phase)
        rows.append(_row_cells(PLANNED_COLUMNS, values, floor_cell))
    headings, cells = _without_empty_columns(PLANNED_COLUMNS, rows)
    return Table(headings, cells, below=_plan_lines(planned, context, device, floors))


def _causes_without_workspaces(planned: Planned, phase: str) -> Any:
    """Return the causes of a phase's peak. Workspaces are subtracted from the rest: they have their own column."""
    causes = planned.causes.get(phase)
    if causes is None or causes.activations_and_rest is None:
        return causes
    rest = causes.activations_and_rest - (planned.workspaces or 0)
    return causes.model_copy(update={"activations_and_rest": rest})


def _phase_floor_cell(floors: PlannedFloors, phase: str) -> TableCell:
    """Return the least time of a phase: that of its computation or of its communication, whichever is longer."""
    least_s = floors.least_s(phase)
    sent_s = floors.sent_s.get(phase)
    is_bound_by_link = bool(sent_s) and sent_s == least_s
    if is_bound_by_link:
        return TableCell(least_s, f"{ms_text(sent_s or 0.0)} sent")
    text, _ = floor_texts(floors.by_phase.get(phase))
    return TableCell(least_s, text)


def _plan_lines(
    planned: Planned, context: int | None, device: Capacity, floors: PlannedFloors
) -> list[str]:
    """Return the lines below the table of phases: what fits, steps, ranks, floors, and what is not counted."""
    lines = [_peak_line(planned, device)]
    if fits(planned, device.bytes) is not True:
        lines.append(_smallest_gpu_line(planned))
    lines += _largest_lines(planned, context)
    lines += _step_lines(planned)
    lines += _rank_lines(planned)
    if planned.taken_for_one:
        places = "; ".join(planned.taken_for_one)
        lines.append(
            f"float() of an unknown number returned 1, so real steps may need more or less memory: {places}"
        )
    if planned.compiled:
        lines.append(
            "the memory with torch.compile is unknown; the figures are those of the same step without it"
        )
    lines += _floor_lines(floors, device)
    if planned.uncounted:
        names = ", ".join(planned.uncounted)
        lines.append(
            f"the floor lacks the FLOPs of {names}: give their formula to lm_profiler.register_flops"
        )
    lines += _sent_lines(planned, floors)
    uncounted = "not counted: workspaces other than cuBLAS's, the driver's context"
    if planned.ranks > 1:
        uncounted += ", NCCL's own memory"
    return [*lines, uncounted]


def _peak_line(planned: Planned, device: Capacity) -> str:
    """Return the peak, and whether the run fits. What it needs is the same figure as in the table of remedies."""
    peak = f"peak {bytes_text(planned.peak)}, in {planned.phase}"
    if planned.reserved is not None:
        peak += f", {bytes_text(planned.reserved)} reserved"
    capacity = f"the {bytes_text(device.bytes)} that {device.name} has"
    if device.is_free:
        capacity += " free"
    needs = bytes_text(planned.needs_bytes)
    verdict = _FITS[fits(planned, device.bytes)]
    return f"{peak}: needs {needs}, {verdict} into {capacity}"


def _smallest_gpu_line(planned: Planned) -> str:
    """Return a line with the smallest known GPU that has the memory that the run needs."""
    gpu = smallest_gpu(planned.needs_bytes)
    if gpu is None:
        return f"no known GPU has {bytes_text(planned.needs_bytes)} of memory"
    return f"the smallest GPU that fits: {gpu.name} ({bytes_text(gpu.bytes)})"


def _largest_lines(planned: Planned, context: int | None) -> list[str]:
    """Return a line with the largest batch and context that fit; 0 means that not even 1 does."""
    largest = []
    if planned.largest == 0:
        largest.append("not even a batch of 1")
    elif planned.largest is not None:
        batch = f"batch {planned.largest:,}"
        if planned.context is not None:
            batch += f" of {planned.context:,} tokens"
        largest.append(batch)
    if context == 0:
        largest.append("not even a context of 1")
    elif context is not None:
        largest.append(f"context {context:,} in batches of {planned.batch:,}")
    if largest:
        return [f"the largest batch or context that fits: {', or '.join(largest)}"]
    if planned.largest_unknown is not None:
        return [
            f"the largest batch and context that fit are unknown: {planned.largest_unknown}"
        ]
    return []


def _step_lines(planned: Planned) -> list[str]:
    """Return a line if the rehearsed steps need different amounts of memory."""
    number = len(planned.steps)
    if planned.growth is not None:
        growth = (
            f"each of {number} rehearsed steps needs at least {bytes_text(planned.growth)} more than the one "
            "before"
        )
        shown = "the table shows the last one, and later steps need more"
        return [f"memory grows: {growth}; {shown}"]
    different_texts = {bytes_text(peak) for peak in planned.steps}
    if len(different_texts) > 1:
        smallest = bytes_text(min(planned.steps))
        shown = f"the table shows the largest of {number}"
        return [
            f"steps need different amounts of memory: {shown}; the smallest is {smallest}"
        ]
    return []


def _rank_lines(planned: Planned) -> list[str]:
    """Return lines on what the figures include if several ranks train."""
    lines = []
    if planned.buckets is not None:
        lines.append(
            f"figures are per device; DDP's gradient buckets ({bytes_text(planned.buckets)}) are included in the rest"
        )
    if planned.split_by is not None:
        lines.append(
            f"figures are for rank 0 of {planned.ranks} ranks, among which {planned.split_by} splits the module; "
            f"the rest includes gathered weights, up to {bytes_text(planned.gathered)} at a time"
        )
    if planned.shards_optimizer:
        lines.append(
            f"optimizer states and the optimizer's floor are those of rank 0, one of {planned.ranks} ranks: "
            "a rank with a larger share takes longer, and all ranks wait for it"
        )
    return lines


def _floor_lines(floors: PlannedFloors, device: Capacity) -> list[str]:
    """Return the floor of the step with the rates that it assumes, and their sources."""
    if floors.seconds is None:
        return [
            f"floor of the step: unknown, because no peaks of {device.name} are known; name a GPU with --device"
        ]
    rates = floors.rates
    peaks = []
    sources = []
    for rate in rates.flops:
        peaks.append(f"{with_prefix(rate.flops_per_s, 'FLOP/s')} in {rate.dtype}")
        sources.append(rate.source)
    if rates.bytes_per_s is not None:
        peaks.append(with_prefix(rates.bytes_per_s, "B/s"))
    sources.append(rates.bytes_source or "")
    floor = f"{ms_text(floors.seconds)} ms at {', '.join(peaks)}"
    if floors.unknown:
        floor += f", not counting {' and '.join(floors.unknown)} (floor unknown)"
    different_sources = filter(None, dict.fromkeys(sources))
    return [
        f"floor of the step (no step can be faster): {floor}",
        f"peaks: {'; '.join(different_sources)}",
    ]


def _sent_lines(planned: Planned, floors: PlannedFloors) -> list[str]:
    """Return a line with the bytes that each rank sends, if any."""
    if not planned.sent:
        return []
    amounts = []
    for phase, sent_bytes in planned.sent.items():
        amounts.append(f"{bytes_text(sent_bytes)} in {phase}")
    line = f"each of {planned.ranks} ranks sends at least {', '.join(amounts)}"
    if not floors.sent_s:
        line += "; --bandwidth=450e9 (bytes per second) includes this in the floor"
    return [line]


# -- settings that need less -------------------------------------------------------------------------------------------


def remedy_table(
    tried: Sequence[tuple[MemoryCandidate, Planned, PlannedFloors]], device: Capacity
) -> Table:
    """Return a row for each rehearsed setting that needs less memory, with the floor of its step."""
    if not tried:
        return Table(above=["no known setting needs less"])
    rows = []
    has_fitting = False
    for remedy, planned, floors in tried:
        is_fitting = fits(planned, device.bytes)
        has_fitting = has_fitting or bool(is_fitting)
        values = {
            "needs": planned.needs_bytes,
            "fits": _FITS[is_fitting],
            "words": " ".join(remedy.words),
            "changes": remedy.changes or "nothing",
        }
        floor_text = "" if floors.seconds is None else ms_text(floors.seconds)
        floor_cell = TableCell(floors.seconds, floor_text)
        rows.append(_row_cells(REMEDY_COLUMNS, values, floor_cell))
    headings, cells = _without_empty_columns(REMEDY_COLUMNS, rows)
    lines_above = ["", "settings that need less memory, each rehearsed separately:"]
    lines_below = [] if has_fitting else ["none of them is certain to fit"]
    return Table(headings, cells, lines_above, lines_below)


def _row_cells(
    columns: Sequence[Quantity], values: Mapping[str, Any], floor: TableCell
) -> list[TableCell]:
    """Return the cells of ``values`` in the order of ``columns``, with ``floor`` in its column."""
    cells = []
    for column in columns:
        value = column.get(values)
        if column.name == FLOOR.name:
            cells.append(floor)
        elif value is None:
            cells.append(TableCell())
        else:
            cells.append(TableCell(value, column.show(value)))
    return cells


def _without_empty_columns(
    columns: Sequence[Quantity], rows: Sequence[Sequence[TableCell]]
) -> tuple[list[Heading], list[list[TableCell]]]:
    """Return the headings and the rows without the columns in which no row has a text."""
    shown_columns = []
    for index in range(len(columns)):
        if any(row[index].text for row in rows):
            shown_columns.append(index)
    headings = headings_of(columns[index] for index in shown_columns)
    shown_rows = []
    for row in rows:
        shown_rows.append([row[index] for index in shown_columns])
    return headings, shown_rows


# -- a timeline's allocations ------------------------------------------------------------------------------------------


def allocation_tables(timeline: MemoryTimeline) -> Iterator[Table]:
    """Yield tables of the largest allocations at the peak, of what is saved for backward, and of three moments."""
    peak = f"peak {bytes_text(timeline.peak)} ({SOURCES[timeline.source]}); the largest allocations at the peak:"
    yield replace(_allocation_table(timeline.largest), above=[peak])
    if timeline.saved:
        lines_below = []
        residual = timeline.residual
        if residual is not None:
            kind = f"{_shape_text(residual)}, {residual.dtype}"
            amount = f"{bytes_text(residual.bytes)}, {residual.count:,} of them"
            lines_below.append(f"a residual tensor ({kind}): {amount}")
        saved = f"saved for backward {bytes_text(timeline.saved_bytes)}; the largest tensors:"
        table = _allocation_table(timeline.saved)
        yield replace(table, above=["", saved], below=lines_below)
    if timeline.block is not None:
        yield block_table(timeline.block)
    moments = timeline.moments()
    if moments:
        rows = []
        for name, bytes_by_cause in moments.items():
            amounts = [bytes_text(held_bytes) for _, held_bytes in bytes_by_cause]
            rows.append([MOMENTS[name], *amounts])
        titles = ("moment", *CAUSES.values())
        yield text_table(titles, rows, above=["", "memory held at three moments:"])


def block_table(block: BlockMemory) -> Table:
    """Return a table of what one block saves for backward: its largest tensors, their shares, and the net change."""
    titles = ("rank", "made by", "bytes", "share", "count", "shape", "dtype")
    headings = titled_headings(titles, figures=("rank", "bytes", "share", "count"))
    rows = []
    shown_bytes = 0
    for rank, allocation in enumerate(block.saved, 1):
        held_bytes = allocation.bytes * allocation.count
        shown_bytes += held_bytes
        texts = (
            str(rank),
            origin_text(allocation),
            bytes_text(held_bytes),
            _share_of_block(held_bytes, block),
            f"{allocation.count:,}",
            "" if allocation.shape is None else _shape_text(allocation),
            allocation.dtype or "",
        )
        rows.append([text_cell(text) for text in texts])
    total = ("", "total", bytes_text(shown_bytes), _share_of_block(shown_bytes, block))
    rows.append([text_cell(text) for text in (*total, "", "", "")])
    rest = bytes_text(block.saved_bytes - shown_bytes)
    saved, gradients = bytes_text(block.saved_bytes), bytes_text(block.gradients_bytes)
    net_bytes = block.gradients_bytes - block.saved_bytes
    net_change = bytes_text(abs(net_bytes))
    if net_bytes < 0:
        net_change = f"-{net_change}"
    title = f"one of {block.count} blocks ({block.module}) saves {saved} for backward; the largest tensors:"
    below = [
        f"other tensors that the block saves: {rest}",
        (
            f"the block's backward pass frees the saved tensors and creates {gradients} of gradients: net change "
            f"{net_change}"
        ),
    ]
    return Table(headings, rows, above=["", title], below=below)


def _share_of_block(held_bytes: int, block: BlockMemory) -> str:
    """Return ``held_bytes`` as a share of all that ``block`` saves for backward; empty if it saves nothing."""
    return share_text(held_bytes / block.saved_bytes if block.saved_bytes else None)


def _allocation_table(allocations: Sequence[Allocation]) -> Table:
    """Return ``allocations`` as a table: bytes, count, cause, shape, dtype, and what created them."""
    titles = ("bytes", "count", "cause", "shape", "dtype", "made by")
    headings = titled_headings(titles, figures=("bytes", "count"))
    rows = []
    for allocation in allocations:
        texts = (
            bytes_text(allocation.bytes),
            f"{allocation.count:,}",
            CAUSE_TITLES.get(allocation.cause, allocation.cause),
            "" if allocation.shape is None else _shape_text(allocation),
            allocation.dtype or "",
            origin_text(allocation),
        )
        rows.append([text_cell(text) for text in texts])
    return Table(headings, rows)


def _shape_text(allocation: Allocation) -> str:
    return " × ".join(str(length) for length in allocation.shape or ()) or "scalar"


def origin_text(allocation: Allocation) -> str:
    """Return where an allocation comes from: the tensor's name or its operator, the module, and the line.

    If none of these is known, return the phase.
    """
    operator = (allocation.name or "").removeprefix("aten.").removesuffix(".default")
    origins = filter(None, (operator, allocation.module, allocation.line))
    text = ", ".join(origins)
    if text:
        return text
    if allocation.phase:
        return f"unknown, in {allocation.phase}"
    return "unknown"
