"""Read from a cell's run the mean step and the memory of its setting, or why they are unknown.

``MemorySeen`` tells whether a shortage of memory may have been a passing one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.analysis.improve.trials import Ran
from lm_profiler.analysis.steps.summaries import lasting_step_s
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import RecordError
from lm_profiler.record.run import RunRecord
from lm_profiler.record.steps import read_rows
from lm_profiler.record.sweep import CellOutcome


class NoSteps(Exception):
    """A run without a usable mean step; the message says why."""


@dataclass(frozen=True)
class RanCell:
    """A cell that has run."""

    entry: Entry  # the run with its record
    outcome: CellOutcome  # how the cell ended
    took_s: float  # seconds that it takes from the budget, all tries together; 0 if it was asked for before
    cut: bool = False  # whether the end of the budget ended it

    @property
    def record(self) -> RunRecord:
        """The record of a run that ended well.

        Raises:
            NoSteps: the run did not end well.
        """
        if self.outcome.status != "ok" or self.entry.record is None:
            raise NoSteps(f"{self.outcome.status}: {self.outcome.reason or 'no reason given'}")
        return self.entry.record


def ran(done: RanCell, first: RunRecord | None) -> Ran:
    """Return the result of a run, its step scaled to the samples or tokens of the ``first`` setting's step.

    The step is the mean: batches of several workers come in bursts, so a median tells no rate. Where steps used up
    prefetched batches, it is the step in the long run instead.
    """
    failed = refused = None
    seconds = peak = None
    try:
        record = done.record
        seconds = _step_s(done.entry, record) * _scale(record, first or record)
        peak = peak_bytes(record)
    except NoSteps as error:
        why = str(error)
        failed, refused = (None, why.removeprefix("refused: ")) if done.outcome.status == "refused" else (why, None)
    return Ran(seconds, done.took_s, failed, refused, peak, done.cut, done.outcome.status in ("oom", "interrupted"))


def _step_s(entry: Entry, record: RunRecord) -> float:
    """Return the mean step of a run, or its step in the long run where prefetched batches were used up.

    Raises:
        NoSteps: there are too few steps.
    """
    step = record.time.get("step")
    if step is None or step.mean is None:
        raise NoSteps("too few measured steps: raise --stages.measure_steps")
    loader = record.loader
    if loader is None or not loader.used_up:
        return step.mean
    try:
        steps = [row.time("step") for row in read_rows(entry.folder).of_stages("measure").timed if row.rank == 0]
    except RecordError as error:
        raise NoSteps(str(error)) from None
    batches = 1 if record.model is None else record.model.accumulate_grad_batches
    lasting_s = lasting_step_s(fmean(steps), len(steps), batches, loader)
    if lasting_s is None:
        raise NoSteps(
            f"{loader.used_up} of the {len(steps) * batches} batches that were measured had been made ahead by "
            f"{loader.workers} workers, which leaves too few: raise --stages.measure_steps"
        )
    return lasting_s


def _scale(record: RunRecord, first: RunRecord) -> float:
    """Return the factor that scales a step of ``record`` to the samples (or tokens) of a step of ``first``."""
    other = other_step(first, record)
    return 1.0 if other is None else other[1] / other[2]


def other_step(a: RunRecord, b: RunRecord) -> tuple[str, int, int] | None:
    """Return the unit in which steps of ``a`` and ``b`` differ in size, with both counts; None if they do not.

    The unit is samples, else tokens. Where neither was counted in the batches, the options tell.
    """
    for what, one, two in list(_counted(a, b)) or [_by_options(a, b)]:
        if abs(two - one) > MARGIN * one:  # tokens of texts of varying length differ a little anyway
            return what, one, two
    return None


def _counted(a: RunRecord, b: RunRecord) -> Iterator[tuple[str, int, int]]:
    for what in ("samples", "tokens"):
        one, two = (getattr(run.throughput, f"{what}_per_step", None) for run in (a, b))
        if one and two:
            yield what, one, two


def _by_options(a: RunRecord, b: RunRecord) -> tuple[str, int, int]:
    """Return the samples of a step where ``data.batch_size`` is known, else its batches."""
    one, two = (1 if run.model is None else run.model.accumulate_grad_batches for run in (a, b))
    size, other = (Entry(Path(), run).option("data.batch_size") for run in (a, b))
    if isinstance(size, int) and isinstance(other, int):
        return "samples", one * size, two * other
    return "batches", one, two


def peak_bytes(record: RunRecord) -> int | None:
    """Return the peak bytes of the measured steps: those of the device's tensors, else those of the process."""
    if record.memory is None:
        return None
    measured = record.memory.measured
    return measured.resident_peak if measured.allocated_peak is None else measured.allocated_peak


# The statuses that may mean a lack of memory. A process that the OOM killer ended may be told as interrupted.
_MEMORY_STATUSES = ("refused", "oom", "interrupted")


class MemorySeen:
    """Remembers how much memory was free for the runs of a search, and which settings have fitted."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._fitted: set[str] = set()

    def saw(self, setting: str, done: RanCell) -> None:
        """Remember how a cell of ``setting`` ended."""
        if done.outcome.status == "ok":
            self._fitted.add(setting)
        free = _free(done.entry.record)
        if free is not None:
            self._most = max(free, self._most or 0)

    def has_fitted(self, setting: str) -> bool:
        """Whether a cell of ``setting`` has ended well."""
        return setting in self._fitted

    def is_passing(self, setting: str, done: RanCell) -> bool:
        """Whether the same run may fit another time.

        It may where the setting fitted before, or where as much memory as it needs was free for another run. The first
        run of all may fit unless it needs more than the device has.
        """
        if done.outcome.status not in _MEMORY_STATUSES:
            return False
        if self.has_fitted(setting):
            return True
        if not self._fitted:
            return not _is_more_than_there_is(done.entry.record)
        needed = None if done.outcome.status == "interrupted" else _needed(done.entry.record)
        return needed is not None and self._most is not None and needed <= self._most


def _is_more_than_there_is(record: RunRecord | None) -> bool:
    needed = _needed(record)
    there_is = None if record is None or record.environment is None else record.environment.device_bytes
    return needed is not None and there_is is not None and needed > there_is


def _free(record: RunRecord | None) -> int | None:
    return None if record is None or record.planned is None else record.planned.available


def _needed(record: RunRecord | None) -> int | None:
    """Return the bytes that a run needed: what it held and asked for when memory ran out, else the planned peak."""
    if record is None:
        return None
    failure = record.failure
    said = None if failure is None else failure.out_of_memory
    if said is not None:
        return None if said.allocated is None or said.requested is None else said.allocated + said.requested
    return None if record.planned is None or record.status != "refused" else record.planned.peak
