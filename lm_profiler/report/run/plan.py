"""The table of a plan: what each phase would hold, and the largest run that fits."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.analysis.plan.capacities import Capacity
from lm_profiler.analysis.plan.floors import PlannedFloors
from lm_profiler.analysis.plan.planned import ROOM, Planned, fits, room
from lm_profiler.analysis.plan.remedies import Remedy
from lm_profiler.record.quantities import PARTS, bytes_text, with_prefix
from lm_profiler.record.run import MemoryCauses
from lm_profiler.report.run.phases import floor_texts
from lm_profiler.report.tables.table import Heading, Table, TableCell, text_table

_CAUSES = (*MemoryCauses.model_fields,)
_TITLES = ("phase", "peak", *(cause.replace("_", " ") for cause in _CAUSES))
_FITS = {True: "fits", None: "may not fit", False: "does not fit"}


def plan_table(planned: Planned, context: int | None, device: Capacity, floors: PlannedFloors) -> Table:
    """Of ``planned``, and of the largest ``context`` that fits into ``device``."""
    rows, known = [], floors.seconds is not None
    for phase in (part for part in PARTS if part in planned.peaks):
        causes = planned.causes.get(phase)
        values = [planned.peaks[phase], *(getattr(causes, cause, None) for cause in _CAUSES)]
        floor, _ = floor_texts(floors.by_phase.get(phase))
        rows.append([phase, *("" if value is None else bytes_text(value) for value in values), *[floor] * known])
    below = [f"peak {bytes_text(planned.peak)}, in {planned.phase}: {_verdict(planned, device)}"]
    largest = []
    if planned.largest is not None:
        of = "" if planned.context is None else f" of {planned.context:,} tokens"
        largest.append(f"batch {planned.largest:,}{of}" if planned.largest else "not even a batch of 1")
    if context is not None:
        largest.append(f"context {context:,} in batches of {planned.batch:,}" if context else "not even a context of 1")
    if largest:
        below.append(f"the largest that fits: {', or '.join(largest)}")
    if planned.compiled:
        below.append("compiled: unknown; these are the figures of the same step without torch.compile")
    below += _floor_lines(floors, device)
    below.append("without workspaces of libraries, the driver's context and gaps between blocks")
    return text_table([*_TITLES, *["floor (ms)"] * known], rows, below=below)


def _verdict(planned: Planned, device: Capacity) -> str:
    known = fits(planned, device.bytes)
    if known is False:
        return f"{_FITS[known]} into {bytes_text(device.bytes)}, all that {device.name} has"
    most = f"{bytes_text(room(device.bytes))}, {ROOM:.0%} of {device.name}'s {bytes_text(device.bytes)}"
    return f"{_FITS[known]}{' into' if known else ': more than'} {most}"


def _floor_lines(floors: PlannedFloors, device: Capacity) -> list[str]:
    """The least that the step could take, and on what that rests."""
    if floors.seconds is None:
        return [f"floor of the step: unknown, as are the peaks of {device.name}"]
    rates = floors.rates
    peaks = [f"{with_prefix(rate.flops_per_s, 'FLOP/s')} in {rate.dtype}" for rate in rates.flops]
    if rates.bytes_per_s is not None:
        peaks.append(with_prefix(rates.bytes_per_s, "B/s"))
    sources = dict.fromkeys([*(rate.source for rate in rates.flops), rates.bytes_source or ""])
    without = f", without {' and '.join(floors.unknown)} (unknown)" if floors.unknown else ""
    at = f"{floors.seconds * 1e3:,.1f} ms at {', '.join(peaks)}{without}"
    return [f"floor of the step, which no step beats: {at}", f"peaks: {'; '.join(s for s in sources if s)}"]


def remedy_table(tried: Sequence[tuple[Remedy, Planned, PlannedFloors]], device: Capacity) -> Table:
    """Of other settings of a run that may not fit into ``device``, each rehearsed, and its step's floor."""
    if not tried:
        return Table(above=["no setting is known that would need less"])
    fitting = any(fits(planned, device.bytes) for _, planned, _ in tried)
    known = any(floors.seconds is not None for *_, floors in tried)
    titles = [("peak", True), *[("floor (ms)", True)] * known, ("", False), ("may change", False), ("with", False)]
    rows = []
    for remedy, planned, floors in tried:
        floor = "" if floors.seconds is None else f"{floors.seconds * 1e3:,.1f}"
        word = _FITS[fits(planned, device.bytes)]
        texts = [bytes_text(planned.peak), *[floor] * known, word, remedy.changes or "nothing", " ".join(remedy.words)]
        rows.append([TableCell(text, text) for text in texts])
    headings = [Heading(title, title, figures) for title, figures in titles]
    above = ["", "what would need less, each setting rehearsed by itself:"]
    return Table(headings, rows, above=above, below=[] if fitting else ["none of them surely fits"])
