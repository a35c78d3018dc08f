"""The runs of one side of a comparison: their steps, and what speaks against them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import numpy as np

from lm_profiler.analysis.compare.differences import SEEDS, flat, in_config, in_environment, unlike
from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.steps.statistics import Interval
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.analysis.steps.summaries import mean_over_ranks, model_of
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import Quantity
from lm_profiler.record.run import Ranks, RunRecord
from lm_profiler.record.steps import StepRow
from lm_profiler.usage_error import UsageError


@dataclass(frozen=True)
class Run:
    """A run with its measured steps, one row a step; there is at least one."""

    folder: Path
    record: RunRecord
    steps: list[StepRow]
    model: StepModel  # of the steps; figures are of its stretch
    warmed_up_s: float  # by how much all steps before these took longer, on the host's clock, than as many of these
    # what the mean rank waits for others in each part, where that is not the part's own
    waits_s: Mapping[str, float] = field(default_factory=dict)

    def mean(self, part: str) -> Interval:
        """The mean of ``part`` in a step; of fewer than three steps its interval has no end."""
        x = np.array([row.time(part) for row in self.steps])
        here = float(x[self.model.first : self.model.end].mean())
        known = self.model.interval_of(x) or Interval(here, -math.inf, math.inf)
        own_s = max(known.mean - self.waits_s.get(part, 0.0), 0.0)
        # As uncertain as with the waiting: how that scatters from step to step is not recorded.
        return Interval(own_s, known.low - known.mean + own_s, known.high - known.mean + own_s, known.lag1)


@dataclass(frozen=True)
class Side:
    """One run or its repeats. ``notes`` say what a reader must know of them."""

    runs: list[Run]
    notes: list[str]

    def means(self, part: str) -> list[Interval]:
        """Return the part's mean in a step with its interval, for each run."""
        return [run.mean(part) for run in self.runs]

    def typical_s(self, part: str) -> float:
        """The mean step; of repeats the geometric mean of their means, which is what their ratio compares."""
        return typical([own.mean for own in self.means(part)])

    def occurs(self, part: str) -> bool:
        """Return whether any step has the part."""
        return any(row.time(part) > 0.0 for run in self.runs for row in run.steps)

    def known(self, of: Quantity) -> list[Any] | None:
        """A figure of each run; None where a run does not know it."""
        values = [of.get(run.record) for run in self.runs]
        return None if None in values else values

    def compiled(self) -> bool | None:
        """Whether torch.compile was used; None where a run does not say."""
        said = {_is_compiled(run.record) for run in self.runs}
        return said.pop() if len(said) == 1 else None

    def warmed_up_s(self) -> float:
        """What a run spent on becoming as fast as it is; of repeats the median."""
        return median(run.warmed_up_s for run in self.runs)


def _is_compiled(record: RunRecord) -> bool | None:
    if record.model is not None and record.model.compiled is not None:
        return record.model.compiled
    option = flat(record.config or {}).get("model.compile")  # of records that do not hold it as a fact
    return option if isinstance(option, bool) else None


def typical(values: Sequence[float]) -> float:
    """The geometric mean, or the mean where one of them is 0."""
    return geometric_mean(values) if min(values) > 0.0 else fmean(values)


def without_waiting(*sides: Side) -> list[Side]:
    """Phases as their ranks' own work, where all runs know it: a phase that ends in a collective holds the wait for
    whoever is slow elsewhere."""
    ranks = [run.record.ranks for side in sides for run in side.runs]
    if None in ranks:
        return list(sides)
    return [Side([replace(run, waits_s=_waits_s(run.record.ranks)) for run in side.runs], side.notes) for side in sides]


def _waits_s(ranks: Ranks | None) -> dict[str, float]:
    """Return the waiting seconds of the mean rank by part; of the median rank where not each is known."""
    if ranks is None:
        return {}
    waits_s = {part: spread.median_s for part, spread in ranks.waiting.items()}
    if len(ranks.by_rank) == ranks.heard:
        waits_s = {part: fmean(of.waiting_s.get(part, 0.0) for of in ranks.by_rank) for part in waits_s}
    return {**waits_s, "forward_backward": waits_s.get("forward", 0.0) + waits_s.get("backward", 0.0)}


def read_side(label: str, entries: Sequence[Entry]) -> Side:
    """The runs that measured something; ``label`` is A or B.

    Raises:
        UsageError: none of them did, or they are no repeats of one another.
        RecordError: a ``steps.csv`` cannot be read.
    """
    runs, left_out, doubts = list[Run](), list[tuple[Path, str]](), list[tuple[Path, str]]()
    for entry in entries:
        steps = _measured(entry)
        if entry.record is None or not steps:
            why = f"{entry.status}, {_reason(entry)}" if entry.reason else entry.status
            left_out.append((entry.folder, f"it has no measured step ({why})"))
            continue
        model = model_of(steps)
        level = steps[model.first : model.end]
        runs.append(Run(entry.folder, entry.record, steps, model, _warmed_up_s(entry, level)))
        doubts += [(entry.folder, doubt) for doubt in _doubts(entry, entry.record)]
    if not runs:
        why = "{}: {}".format(*left_out[0]) if left_out else "expected runs, given none"
        raise UsageError(f"{label}: {why}")
    said = [*((folder, f"is left out: {why}") for folder, why in left_out), *doubts]
    notes = [f"{label}: {note}" for note in _one_of_each(said, len(entries))]
    if paths := dict.fromkeys(path for run in runs[1:] for path in _as_repeat(runs[0], run)):
        notes.append(f"{label}: its runs differ in {', '.join(paths)}")
    return Side(runs, notes)


def _one_of_each(said: Sequence[tuple[Path, str]], runs: int) -> list[str]:
    """A note for each kind of what was said of runs, with the first of which it was: twenty alike are read by nobody.

    A kind is what stands before the particulars.
    """
    alike: dict[str, list[tuple[Path, str]]] = {}
    for folder, text in said:
        alike.setdefault(re.split("[:(]", text)[0], []).append((folder, text))
    firsts = [(*these[0], len({folder for folder, _ in these}) - 1) for these in alike.values()]
    return [
        f"{folder} {text}" + (f"; likewise {more} more of {runs} runs" if more else "") for folder, text, more in firsts
    ]


def _measured(entry: Entry) -> list[StepRow]:
    """Measured steps, the mean over the ranks, with the device's time."""
    if entry.record is None or not entry.record.steps:  # it ended before its first step: there is no steps.csv
        return []
    steps = mean_over_ranks(entry.rows.of_stages("measure"))
    return [row for row in steps if row.seconds is not None]


def _warmed_up_s(entry: Entry, steps: Sequence[StepRow]) -> float:
    typical_s = fmean(row.time("step", "host") for row in steps)
    before = mean_over_ranks(entry.rows.where(entry.rows.step < steps[0].step))
    return sum(row.time("step", "host") - typical_s for row in before)


def _doubts(entry: Entry, record: RunRecord) -> list[str]:
    doubts = []
    if entry.status != "ok":
        doubts.append(f"ended {entry.status} ({_reason(entry)}); the steps that it measured count")
    if record.steadiness is not None and record.steadiness.word != "steady":
        words = ", ".join(record.steadiness.words) or "too short to call steady"
        doubts.append(f"was {words}")
    doubts += [f"was disturbed: {said}" for said in contention_lines(record.contention)]
    if (ranks := record.ranks) is not None and ranks.finding.saves_s is not None:
        of = ranks.finding
        whom = f"rank {of.rank}" if of.rank is not None else "one after another" if of.kind == "turns" else "several"
        doubts.append(f"has ranks that wait {ranks.waiting_share:.0%} of a step for {whom}")
    if record.telemetry is not None and record.telemetry.throttle_reasons:
        doubts.append(f"ran on a throttled GPU ({', '.join(record.telemetry.throttle_reasons)})")
    return doubts


def _reason(entry: Entry) -> str:
    """Why it did not end well; further lines are remedies."""
    return (entry.reason or "no reason given").partition("\n")[0]


def _as_repeat(first: Run, other: Run) -> list[str]:
    """Return in what the surroundings of two repeats differ; in nothing else may they."""
    config = [difference for difference in in_config(first.record, other.record) if difference.path not in SEEDS]
    for difference in (*unlike(first.record, other.record), *config):
        raise UsageError(
            f"{other.folder}: expected a repeat of {first.folder}, "
            f"given {difference.path} {difference.b} instead of {difference.a}\n"
            "the runs of a side are repeats of one another; of a sweep, give one cell's folder"
        )
    return [difference.path for difference in in_environment(first.record, other.record) or ()]
