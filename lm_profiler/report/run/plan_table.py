"""Tables of memory: a plan's phases, settings that would need less, the largest allocations of a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_profiler.analysis.plan.planned import Capacity, Planned, PlannedFloors, fits, smallest_gpu
from lm_profiler.analysis.remedies.remedy import Smaller
from lm_profiler.record.figure import bytes_text, ms_text, with_prefix
from lm_profiler.record.memory_timeline import HELD, SOURCES, Allocation, MemoryTimeline
from lm_profiler.record.quantities import CAUSES, FLOOR, PARTS, PLANNED_COLUMNS, REMEDY_COLUMNS, Quantity
from lm_profiler.record.run_record import MOMENTS
from lm_profiler.report.run.sections import floor_texts
from lm_profiler.report.tables.table import Heading, Table, TableCell, headings_of, text_cell, text_table

_FITS = {True: "fits", None: "may not fit", False: "does not fit"}


def plan_table(planned: Planned, context: int | None, device: Capacity, floors: PlannedFloors) -> Table:
    """Return a row for each phase of ``planned``, with lines on what fits into ``device``."""
    rows = []
    for phase in (part for part in PARTS if part in planned.peaks):
        floor = floors.by_phase.get(phase)
        causes = planned.causes.get(phase)
        if causes is not None and causes.activations_and_rest is not None:
            rest = causes.activations_and_rest - (planned.workspaces or 0)
            causes = causes.model_copy(update={"activations_and_rest": rest})
        values = {"phase": phase, "peak": planned.peaks[phase], "causes": causes, "workspaces": planned.workspaces}
        sent_s, least_s = floors.sent_s.get(phase), floors.of(phase)
        by_link = sent_s is not None and sent_s == least_s and sent_s > 0
        least = TableCell(least_s, f"{ms_text(sent_s or 0.0)} sent" if by_link else floor_texts(floor)[0])
        rows.append(_cells(PLANNED_COLUMNS, values, least))
    return Table(*_known(PLANNED_COLUMNS, rows), below=_plan_lines(planned, context, device, floors))


def _plan_lines(planned: Planned, context: int | None, device: Capacity, floors: PlannedFloors) -> list[str]:
    reserved = "" if planned.reserved is None else f", {bytes_text(planned.reserved)} reserved"
    # The same figure as in the table of remedies; less memory may suffice, down to the peak.
    whole = f"the {bytes_text(device.bytes)} that {device.name} has{' free' * device.is_free}"
    verdict = f"needs {bytes_text(planned.needs)}, {_FITS[fits(planned, device.bytes)]} into {whole}"
    lines = [f"peak {bytes_text(planned.peak)}, in {planned.phase}{reserved}: {verdict}"]
    if fits(planned, device.bytes) is not True:
        gpu = smallest_gpu(planned.needs)
        if gpu is None:
            lines.append(f"no GPU of the table has {bytes_text(planned.needs)}")
        else:
            lines.append(f"the smallest GPU that fits: {gpu.name} ({bytes_text(gpu.bytes)})")
    largest = []
    if planned.largest is not None:
        of = "" if planned.context is None else f" of {planned.context:,} tokens"
        largest.append(f"batch {planned.largest:,}{of}" if planned.largest else "not even a batch of 1")
    if context is not None:
        largest.append(f"context {context:,} in batches of {planned.batch:,}" if context else "not even a context of 1")
    if largest:
        lines.append(f"the largest that fits: {', or '.join(largest)}")
    elif planned.largest_unknown is not None:
        lines.append(f"the largest that fits: unknown: {planned.largest_unknown}")
    if planned.growth is not None:
        grows = f"each of {len(planned.steps)} needs {bytes_text(planned.growth)} or more beyond the one before"
        lines.append(f"steps grow: {grows}; shown is the last of them, and later steps need more")
    elif len({bytes_text(peak) for peak in planned.steps}) > 1:
        least = bytes_text(min(planned.steps))
        lines.append(f"steps differ: shown is the largest of {len(planned.steps)} in a row, the smallest needs {least}")
    if planned.buckets is not None:
        lines.append(f"for each of DDP's devices; its buckets are in the rest: {bytes_text(planned.buckets)}")
    if planned.split_by is not None:
        whole = f"weights that it gathers are part of the rest: up to {bytes_text(planned.gathered)} at a time"
        lines.append(f"rank 0 of {planned.ranks}; {planned.split_by} splits the module among them; {whole}")
    elif "optimizer" in planned.sent:
        unknown = "a rank with a larger share takes longer, and all wait for it"
        lines.append(f"optimizer states and their floor are for rank 0's share of {planned.ranks}: {unknown}")
    if planned.taken_for_one:
        at = "; ".join(planned.taken_for_one)
        lines.append(f"an unknown number was taken for 1, so steps may differ: float() in {at}")
    if planned.compiled:
        lines.append("compiled: unknown; these are the figures of the same step without torch.compile")
    lines += _floor_lines(floors, device)
    if planned.sent:
        sent = ", ".join(f"{bytes_text(count)} in {phase}" for phase, count in planned.sent.items())
        counted = "" if floors.sent_s else "; not in the floor, which --bandwidth=450e9 (bytes a second) puts them into"
        lines.append(f"each of {planned.ranks} ranks sends {sent} at least{counted}")
    others = ", NCCL's own memory" if planned.ranks > 1 else ""
    return [*lines, f"not counted: workspaces but cuBLAS's, the driver's context{others}"]


def _floor_lines(floors: PlannedFloors, device: Capacity) -> list[str]:
    if floors.seconds is None:
        return [f"floor of the step: unknown, since no peaks of {device.name} are known: name a GPU with --device"]
    rates = floors.rates
    peaks = [f"{with_prefix(rate.flops_per_s, 'FLOP/s')} in {rate.dtype}" for rate in rates.flops]
    if rates.bytes_per_s is not None:
        peaks.append(with_prefix(rates.bytes_per_s, "B/s"))
    sources = dict.fromkeys([*(rate.source for rate in rates.flops), rates.bytes_source or ""])
    without = f", without {' and '.join(floors.unknown)} (unknown)" if floors.unknown else ""
    at = f"{ms_text(floors.seconds)} ms at {', '.join(peaks)}{without}"
    return [f"floor of the step, which no step beats: {at}", f"peaks: {'; '.join(s for s in sources if s)}"]


def remedy_table(tried: Sequence[tuple[Smaller, Planned, PlannedFloors]], device: Capacity) -> Table:
    """Return a row for each rehearsed setting that would need less, with the floor of its step."""
    if not tried:
        return Table(above=["no setting is known that would need less"])
    rows = []
    for remedy, planned, floors in tried:
        word = _FITS[fits(planned, device.bytes)]
        values = {"needs": planned.needs, "fits": word, "words": " ".join(remedy.words)}
        least = TableCell(floors.seconds, "" if floors.seconds is None else ms_text(floors.seconds))
        rows.append(_cells(REMEDY_COLUMNS, values | {"changes": remedy.changes or "nothing"}, least))
    fitting = any(fits(planned, device.bytes) for _, planned, _ in tried)
    above = ["", "what would need less, each setting rehearsed by itself:"]
    return Table(*_known(REMEDY_COLUMNS, rows), above=above, below=[] if fitting else ["none of them surely fits"])


def _cells(columns: Sequence[Quantity], values: Mapping[str, Any], floor: TableCell) -> list[TableCell]:
    def cell(of: Quantity) -> TableCell:
        value = of.get(values)
        return floor if of.name == FLOOR.name else TableCell(value, "" if value is None else of.show(value))

    return list(map(cell, columns))


def _known(
    columns: Sequence[Quantity], rows: Sequence[Sequence[TableCell]]
) -> tuple[list[Heading], list[list[TableCell]]]:
    told = [at for at in range(len(columns)) if any(row[at].text for row in rows)]
    return headings_of(columns[at] for at in told), [[row[at] for at in told] for row in rows]


def allocation_tables(timeline: MemoryTimeline) -> Iterator[Table]:
    """Yield tables of the largest allocations at the peak, of what is saved for backward, and of three moments."""
    peak = f"peak {bytes_text(timeline.peak)} ({SOURCES[timeline.source]}); the largest allocations alive there:"
    yield _table(timeline.largest, [peak], [])
    if timeline.saved:
        residual, below = timeline.residual, list[str]()
        if residual is not None:
            kind = f"{_shape(residual)}, {residual.dtype}"
            below = [f"a residual tensor ({kind}): {bytes_text(residual.bytes)}, {residual.count:,} of them"]
        yield _table(timeline.saved, ["", f"saved for backward {bytes_text(timeline.saved_bytes)}, most of it:"], below)
    if moments := timeline.moments():
        rows = [[MOMENTS[name], *(bytes_text(count) for _, count in held)] for name, held in moments.items()]
        yield text_table(("moment", *CAUSES.values()), rows, above=["", "memory held at three moments:"])


def _table(rows: Sequence[Allocation], above: list[str], below: list[str]) -> Table:
    cells = []
    for of in rows:
        kind = ("" if of.shape is None else _shape(of), of.dtype or "")
        texts = [bytes_text(of.bytes), f"{of.count:,}", HELD.get(of.cause, of.cause), *kind, made_by(of)]
        cells.append(list(map(text_cell, texts)))
    titles = ("bytes", "count", "cause", "shape", "dtype", "made by")
    return Table([Heading(title, title, at < 2) for at, title in enumerate(titles)], cells, above=above, below=below)


def _shape(of: Allocation) -> str:
    return " × ".join(map(str, of.shape or ())) or "scalar"


def made_by(of: Allocation) -> str:
    """Return the tensor's name, or the operator with the module and the line that called it, or at least the phase."""
    operator = (of.name or "").removeprefix("aten.").removesuffix(".default")
    unknown = f"unknown, in {of.phase}" if of.phase else "unknown"
    return ", ".join(filter(None, (operator, of.module, of.line))) or unknown
