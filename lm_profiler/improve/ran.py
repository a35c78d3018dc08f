"""What the search is told of a run: the seconds of its step, what it took, its peak, and why it has none."""

from __future__ import annotations

import math
from statistics import fmean

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.analysis.improve.trials import Ran
from lm_profiler.improve.cells import NoSteps, RanCell
from lm_profiler.record.entry import Entry
from lm_profiler.record.reading import RecordError
from lm_profiler.record.run import RunRecord
from lm_profiler.record.step_files import read_rows

_PREFETCH = 2
"""Batches that each worker of a DataLoader makes ahead, if not told otherwise."""


def ran(done: RanCell, first: RunRecord | None) -> Ran:
    """How a run went, its seconds scaled to the samples or tokens of the ``first`` setting's step.

    The mean step counts: batches of several workers come in bursts, of whose steps a median tells no rate. Steps whose
    batches workers had made ahead, while the first step was slow, do not.
    """
    failed = refused = None
    seconds = peak = None
    try:
        record = done.record
        step = _mean_step_s(done.entry, record)
        if step is None:
            raise NoSteps("too few measured steps: raise --stages.measure_steps")
        seconds = step * _scale(record, first or record)
        peak = peak_bytes(record)
    except NoSteps as error:
        why = str(error)
        failed, refused = (None, why.removeprefix("refused: ")) if done.outcome.status == "refused" else (why, None)
    return Ran(seconds, done.took_s, failed, refused, peak)


def _mean_step_s(entry: Entry, record: RunRecord) -> float | None:
    """Of the measured steps, but for those that lived on what workers had made ahead; a quarter of them at least."""
    mean = record.time["step"].mean if record.time else None
    workers = entry.option("loader.num_workers")
    workers = entry.option("data.num_workers") if workers is None else workers
    batches = entry.option("trainer.accumulate_grad_batches")
    if mean is None or not isinstance(workers, int) or workers < 1:
        return mean
    prefetch = entry.option("data.prefetch_factor")
    ahead = workers * (prefetch if isinstance(prefetch, int) else _PREFETCH)
    last = 1 + math.ceil(ahead / (batches if isinstance(batches, int) else 1))
    try:
        rows = [row for row in read_rows(entry.folder).of_stages("measure").timed if row.rank == 0]
    except RecordError:
        return mean
    free = min(sum(row.step <= last for row in rows), len(rows) * 3 // 4)
    return fmean(row.time("step") for row in rows[free:]) if free else mean


def _scale(record: RunRecord, first: RunRecord) -> float:
    """By how much a step of ``record`` must be multiplied for as many samples (or tokens) as one of ``first``."""
    other = other_step(first, record)
    return 1.0 if other is None else other[1] / other[2]


def other_step(a: RunRecord, b: RunRecord) -> tuple[str, int, int] | None:
    """What a step of ``b`` has more or less of than one of ``a``: samples, else tokens; and how many, a's first."""
    for what in ("samples", "tokens"):
        one, two = (getattr(of.throughput, f"{what}_per_step", None) for of in (a, b))
        if one and two and abs(two - one) > MARGIN * one:  # lengths of texts may differ a little
            return what, one, two
    return None


def peak_bytes(record: RunRecord) -> int | None:
    """Most bytes at one time over the measured steps: of the device's tensors, else of the process."""
    if record.memory is None:
        return None
    measured = record.memory.measured
    return measured.resident_peak if measured.allocated_peak is None else measured.allocated_peak
