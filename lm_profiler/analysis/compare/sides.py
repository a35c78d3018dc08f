"""The runs of one side of a comparison: their measured steps, the means of their parts, and notes for the reader."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from lm_profiler.analysis.compare.differences import (
    SEEDS,
    in_config,
    in_environment,
    incomparable_facts,
)
from lm_profiler.analysis.evidence import read_counters
from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.steps.statistics import Interval, Series, mean_interval
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.analysis.steps.summaries import mean_over_ranks, model_of
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import ms_text
from lm_profiler.record.machine import SHARED
from lm_profiler.record.quantities import Quantity
from lm_profiler.record.run_record import Ranks, RecordError, RunRecord, StepCounters
from lm_profiler.record.steps import StepRow
from lm_profiler.usage_error import UsageError

# names of figures that do not include waiting for a CPU
WITHOUT_CPU_WAITS = "without_cpu_waits"
CPU_TIME = "cpu_time"

_NORMAL_95 = 1.96  # standard errors in half of a 95 % interval

# If at least this share of the measured steps counts as warm-up, a note says so.
_MUCH_WARM_UP = 0.2


@dataclass(frozen=True)
class Run:
    """A run with at least one measured step."""

    folder: Path
    record: RunRecord
    steps: list[StepRow]  # one row per step
    model: StepModel  # the model of the times of these steps
    # how long the mean rank waits for other ranks in each part, if this is to be subtracted from the part
    waits_s: Mapping[str, float] = field(default_factory=dict)
    # the counters of the compared steps, of all ranks; empty if unknown
    counters: Sequence[StepCounters] = ()

    def mean(self, part: str) -> Interval:
        """Return the mean of ``part`` over all measured steps after the warm-up, of all levels.

        With fewer than three steps the interval is infinite.
        """
        seconds = np.array([row.time(part) for row in self.steps])
        mean_s = float(seconds[self.model.cut :].mean())
        interval = mean_over_levels(self.model, seconds)
        if interval is None:
            interval = Interval(mean=mean_s, low=-math.inf, high=math.inf)
        # without the waits for other ranks, if these are to be subtracted
        own_s = max(interval.mean - self.waits_s.get(part, 0.0), 0.0)
        # The width of the interval stays, because the spread of the waiting from step to step is not recorded.
        shift_s = own_s - interval.mean
        low_s = interval.low + shift_s
        high_s = interval.high + shift_s
        return Interval(mean=own_s, low=low_s, high=high_s, lag1=interval.lag1)

    def occurs(self, part: str) -> bool:
        """Return whether ``part`` takes any time in any step."""
        return any(row.time(part) > 0.0 for row in self.steps)

    @property
    def without_cpu_waits(self) -> Interval | None:
        """The mean step without the time in which the training thread waited for a CPU because of other programs.

        In the rest it ran, slept, or waited for processes of the run itself, such as loader workers. None if unknown.
        """
        share = self._share_of_others

        def without_wait_s(counters: StepCounters) -> float | None:
            return _without_cpu_wait_s(counters, share)

        return self._mean_of_counters(without_wait_s)

    @property
    def _share_of_others(self) -> float:
        """The share of the waits for a CPU that other programs can have caused, and not the run's own threads."""
        contention = self.record.contention
        if contention is None or not contention.waited_s or contention.others_s is None:
            return 1.0
        return min(contention.others_s / contention.waited_s, 1.0)

    @property
    def cpu_time(self) -> Interval | None:
        """The mean CPU time of the process per step; None if unknown."""
        return self._mean_of_counters(_cpu_s)

    def _mean_of_counters(
        self, figure: Callable[[StepCounters], float | None]
    ) -> Interval | None:
        """Return the mean over steps and ranks of a figure of the counters; None if it is missing for any of them.

        ``figure`` computes it from the counters of one step of one rank.
        """
        if not self.counters and self.record.mean_counters is not None:
            # there are no counters of individual steps, only their mean
            mean = figure(self.record.mean_counters)
            if mean is None:
                return None
            return self._as_uncertain_as_the_step(mean)
        # the values of all ranks in each step, then their mean for each step
        values_by_step: dict[int, list[float]] = {}
        for reading in self.counters:
            value = figure(reading)
            if value is None or reading.step is None:
                return None
            values_by_step.setdefault(reading.step, []).append(value)
        step_means = [fmean(values) for _, values in sorted(values_by_step.items())]
        if not step_means:
            return None
        interval = mean_interval(step_means)
        if interval is None:  # too few steps for one
            mean = fmean(step_means)
            return Interval(mean=mean, low=-math.inf, high=math.inf)
        return interval

    def _as_uncertain_as_the_step(self, mean_s: float) -> Interval:
        """Return an interval around ``mean_s`` with the relative width of the step's interval, as an upper limit."""
        step = self.mean("step")
        if step.mean <= 0.0:
            return Interval(mean=mean_s, low=-math.inf, high=math.inf)
        scale = mean_s / step.mean
        return Interval(
            mean=mean_s, low=scale * step.low, high=scale * step.high, lag1=step.lag1
        )

    @property
    def waited_share(self) -> float:
        """The ratio of waits for a CPU that other programs caused to the rest of the step; 0 if unknown."""
        rest = self.without_cpu_waits
        if rest is None or rest.mean <= 0.0:
            return 0.0
        return max(self.mean("step").mean / rest.mean - 1.0, 0.0)

    @property
    def cpu_share_missed(self) -> float:
        """The share of the CPU time needed by the run that other programs took; 0 if unknown."""
        contention = self.record.contention
        return 0.0 if contention is None else contention.not_had or 0.0


def _without_cpu_wait_s(counters: StepCounters, share_of_others: float) -> float | None:
    """Return the seconds of a step without the share of its waits for a CPU that other programs caused."""
    if counters.wall_s is None or counters.cpu_wait_s is None:
        return None
    return max(counters.wall_s - share_of_others * counters.cpu_wait_s, 0.0)


def _cpu_s(counters: StepCounters) -> float | None:
    return counters.cpu_s


def mean_over_levels(model: StepModel, seconds: Series) -> Interval | None:
    """Return the mean of a series of the model's steps after the warm-up; None if there are fewer than three.

    The uncertainties of all levels are combined. If the level changed only once, both levels count as they are. If it
    changed more often, the levels would be different in another run, so their differences from the mean count as
    uncertainty too. The same holds for a level with too few steps for an interval.
    """
    levels = [(begin, end) for begin, end in pairwise(model.edges) if end > begin]
    if len(levels) <= 1:
        return model.interval_of(seconds)
    compared_s = seconds[model.cut :]
    mean_s = float(compared_s.mean())
    # the square of half the width of the interval, to which each level contributes
    half_squared = 0.0
    lag1 = 0.0
    for begin, end in levels:
        share_of_steps = (end - begin) / compared_s.size
        distance_s = float(seconds[begin:end].mean()) - mean_s
        model_of_level = replace(model, begin=begin, end=end)
        interval = model_of_level.interval_of(seconds)
        if interval is not None:
            half_of_level_s = interval.high - interval.mean
            half_squared += (share_of_steps * half_of_level_s) ** 2
            lag1 = max(lag1, interval.lag1)
        if interval is None or len(levels) > 2:
            # the level itself is random
            half_squared += (_NORMAL_95 * share_of_steps * distance_s) ** 2
    half_s = math.sqrt(half_squared)
    if mean_s <= 0.0:
        return Interval(
            mean=mean_s, low=mean_s - half_s, high=mean_s + half_s, lag1=lag1
        )
    factor = 1.0 + half_s / mean_s
    return Interval(mean=mean_s, low=mean_s / factor, high=mean_s * factor, lag1=lag1)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run and its repeats, with notes for the reader."""

    runs: list[Run]
    notes: list[str]

    def means(self, part: str) -> list[Interval]:
        return [run.mean(part) for run in self.runs]

    def figures(self, name: str) -> list[Interval] | None:
        """Return the mean of a part, or of a figure without waits for a CPU, for each run; None if a run lacks it."""
        intervals: list[Interval | None] = []
        for run in self.runs:
            if name == WITHOUT_CPU_WAITS:
                intervals.append(run.without_cpu_waits)
            elif name == CPU_TIME:
                intervals.append(run.cpu_time)
            else:
                intervals.append(run.mean(name))
        known_intervals = [interval for interval in intervals if interval is not None]
        if len(known_intervals) < len(intervals):
            return None
        return known_intervals

    def typical_s(self, part: str) -> float:
        """Return the mean seconds of ``part``; with several runs, the geometric mean of their means."""
        return typical_value([interval.mean for interval in self.means(part)])

    def occurs(self, part: str) -> bool:
        return any(run.occurs(part) for run in self.runs)

    def values(self, quantity: Quantity) -> list[Any] | None:
        """Return a figure for each run; None if a run lacks it."""
        values = [quantity.get(run.record) for run in self.runs]
        return None if None in values else values

    @property
    def is_contended(self) -> bool:
        """Whether other programs took CPU time or the GPU from a run: its times are then upper bounds."""
        return any(run.record.contended for run in self.runs)


def typical_value(values: Sequence[float]) -> float:
    """Return the geometric mean of ``values``, or the arithmetic mean if one of them is 0."""
    return geometric_mean(values) if min(values) > 0.0 else fmean(values)


def without_waiting(*sides: Side) -> list[Side]:
    """Return the sides with waiting for other ranks subtracted from the phases, if all runs have measured it."""
    for side in sides:
        if any(run.record.ranks is None for run in side.runs):
            return list(sides)
    sides_without = []
    for side in sides:
        runs = [replace(run, waits_s=_waits_s(run.record.ranks)) for run in side.runs]
        sides_without.append(Side(runs, side.notes))
    return sides_without


def _waits_s(ranks: Ranks | None) -> dict[str, float]:
    """Return how long the mean rank waits in each part; the median rank, if not all ranks are in the record."""
    if ranks is None:
        return {}
    waits_s = {part: spread.median_s for part, spread in ranks.waiting.items()}
    if len(ranks.by_rank) == ranks.heard:
        for part in waits_s:
            seconds = [rank.waiting_s.get(part, 0.0) for rank in ranks.by_rank]
            waits_s[part] = fmean(seconds)
    forward_s = waits_s.get("forward", 0.0)
    backward_s = waits_s.get("backward", 0.0)
    waits_s["forward_backward"] = forward_s + backward_s
    return waits_s


def comparable_step_s(entry: Entry) -> float | None:
    """Return the mean of all measured steps of a run after the warm-up; None if no step was measured.

    If other programs took CPU time from the run, it is the step without waits for a CPU, if that is known.
    """
    try:
        [run] = read_side("run", [entry]).runs
    except (UsageError, RecordError):  # no measured step, or no rows of them
        if entry.record is None or "step" not in entry.record.time:
            return None
        return entry.record.time["step"].mean
    lost_cpu_time = run.record.contended and not used_gpu_of_others(run)
    step_without_waits = run.without_cpu_waits
    if lost_cpu_time and step_without_waits is not None:
        return step_without_waits.mean
    return run.mean("step").mean


def used_gpu_of_others(run: Run) -> bool:
    """Return whether other processes used the run's GPU, which lengthens the waits for it."""
    contention = run.record.contention
    if contention is None or contention.gpu is None:
        return False
    return (contention.gpu.utilisation or 0.0) >= SHARED


# -- reading -----------------------------------------------------------------------------------------------------------


def read_side(label: str, entries: Sequence[Entry]) -> Side:
    """Return the side with the runs of ``entries`` that measured steps; ``label`` is A or B.

    Raises:
        UsageError: no run measured a step.
    """
    runs: list[Run] = []
    # pairs: the folder of a run, and why it cannot be used (or what lowers the trust in it)
    unusable: list[tuple[Path, str]] = []
    doubts: list[tuple[Path, str]] = []
    for entry in entries:
        steps = _measured_steps(entry)
        if entry.record is None or not steps:
            reason = f"no step was measured ({_end_text(entry)})"
            unusable.append((entry.folder, reason))
            continue
        run = _run_of(entry, entry.record, steps)
        runs.append(run)
        for doubt in _doubt_phrases(entry, run):
            doubts.append((entry.folder, doubt))
    if not runs:
        if not unusable:
            raise UsageError(f"{label}: expected runs, given none")
        folder, reason = unusable[0]
        raise UsageError(f"{label}: {folder}: {reason}")
    left_out = [(folder, f"is left out: {reason}") for folder, reason in unusable]
    merged_notes = _merged_notes([*left_out, *doubts], len(entries))
    notes = [f"{label}: {note}" for note in merged_notes]
    differences: list[str] = []  # between the first run and each repeat
    for repeat in runs[1:]:
        differences += _differences_of_repeats(runs[0], repeat)
    if differences:
        names = ", ".join(dict.fromkeys(differences))  # without repetitions
        notes.append(f"{label}: its runs differ in {names}")
    return Side(runs, notes)


def _run_of(entry: Entry, record: RunRecord, steps: list[StepRow]) -> Run:
    """Return the run of ``entry`` with its measured ``steps``, and the counters of those after the warm-up."""
    model = model_of(steps)
    # the first ``cut`` steps are warm-up
    compared_steps = {row.step for row in steps[model.cut :]}
    counters = []
    for reading in read_counters(entry.folder):
        if reading.step in compared_steps:
            counters.append(reading)
    return Run(entry.folder, record, steps, model, counters=counters)


def _end_text(entry: Entry) -> str:
    if not entry.reason:
        return entry.status
    return f"{entry.status}, {_short_reason(entry)}"


def _merged_notes(statements: Sequence[tuple[Path, str]], runs: int) -> list[str]:
    """Return one note for each kind of statement about runs; it names the first run, and the number of the others."""
    by_kind: dict[str, list[tuple[Path, str]]] = {}
    for folder, text in statements:
        kind = re.split("[:(]", text)[0]  # without the details of the single run
        by_kind.setdefault(kind, []).append((folder, text))
    notes = []
    for group in by_kind.values():
        folder, text = group[0]
        note = f"{folder} {text}"
        further_runs = len({group_folder for group_folder, _ in group}) - 1
        if further_runs:
            note += f"; the same is true of {further_runs} more of the {runs} runs"
        notes.append(note)
    return notes


def _measured_steps(entry: Entry) -> list[StepRow]:
    """Return the measured steps with times of the device, as means over the ranks."""
    has_steps_file = entry.record is not None and entry.record.steps
    if not has_steps_file:  # the run ended before its first step
        return []
    steps = mean_over_ranks(entry.rows.of_stages("measure"))
    # ``seconds`` are the times of the device
    return [row for row in steps if row.seconds is not None]


def _doubt_phrases(entry: Entry, run: Run) -> list[str]:
    """Return what lowers the trust in a run, as phrases that follow its name."""
    record = run.record
    doubts = []
    if entry.status != "ok":
        end = f"ended {entry.status} ({_short_reason(entry)})"
        doubts.append(f"{end}; the steps measured until then are used")
    if record.steadiness is not None and record.steadiness.word != "steady":
        words = ", ".join(record.steadiness.words) or "too short to call steady"
        doubts.append(f"was {words}{_levels_text(run)}")
    steps = len(run.steps)
    if run.model.cut >= _MUCH_WARM_UP * steps:
        cut_steps = f"the first {run.model.cut} of {steps}"
        doubts.append(f"has warm-up among its measured steps: {cut_steps} are left out")
    doubts += [f"was disturbed: {line}" for line in contention_lines(record.contention)]
    if record.ranks is not None and record.ranks.finding.saves_s is not None:
        share = f"{record.ranks.waiting_share:.0%} of a step"
        doubts.append(
            f"has ranks that wait {share} for {_slow_ranks_text(record.ranks)}"
        )
    if record.telemetry is not None and record.telemetry.throttle_reasons:
        reasons = ", ".join(record.telemetry.throttle_reasons)
        doubts.append(f"ran on a throttled GPU ({reasons})")
    return doubts


def _levels_text(run: Run) -> str:
    """Return the levels of a run in words; empty if it has only one."""
    model = run.model
    if len(model.levels) < 2:
        return ""
    texts = [f"{ms_text(model.levels[0])} ms"]
    for edge, level_s in zip(model.edges[1:-1], model.levels[1:], strict=True):
        texts.append(f"{ms_text(level_s)} ms from step {run.steps[edge].step} on")
    return f" (a step took {', '.join(texts)}; the mean over all steps is compared)"


def _slow_ranks_text(ranks: Ranks) -> str:
    """Return whom the other ranks wait for, as a text."""
    finding = ranks.finding
    if finding.rank is not None:
        return f"rank {finding.rank}"
    if finding.kind == "turns":
        return "one rank after another"
    return "several ranks"


def _short_reason(entry: Entry) -> str:
    """Return why the run failed, without the further lines, which are remedies."""
    reason = entry.reason or "no reason given"
    return reason.partition("\n")[0]


def _differences_of_repeats(run: Run, repeat: Run) -> list[str]:
    """Return what differs in the environments of two repeats; raise UsageError if anything else differs."""
    differences = incomparable_facts(run.record, repeat.record)
    ignored = SEEDS | {"program"}  # the program's own arguments may hold a seed too
    for difference in in_config(run.record, repeat.record):
        if difference.path not in ignored:
            differences.append(difference)
    if differences:
        difference = differences[0]
        raise UsageError(
            f"{repeat.folder}: expected a repeat of {run.folder}, "
            f"given {difference.path} {difference.b} instead of {difference.a}\n"
            "the runs of a side must be repeats of one another; for a sweep, give the folder of one cell"
        )
    in_environments = in_environment(run.record, repeat.record) or []
    return [difference.path for difference in in_environments]
