"""Two sets of runs side by side, as data: is B faster than A, in which phases, and does it need more memory?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Literal

import numpy as np

from lm_profiler.analysis.compare.differences import SEEDS, Difference, in_config, in_environment, unlike
from lm_profiler.analysis.compare.ratio import (
    CONFIDENCE,
    Change,
    RatioInterval,
    change,
    minimum_detectable_effect,
    repeats_interval,
    single_interval,
)
from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.steps.statistics import Interval
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.analysis.steps.summaries import mean_over_ranks, model_of
from lm_profiler.record.entry import Entry
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread
from lm_profiler.record.quantities import MEMORY, PARTS, QUANTITIES, Quantity
from lm_profiler.record.run_record import Ranks, RunRecord
from lm_profiler.record.steps import StepRow
from lm_profiler.usage_error import UsageError

# how far one run of a program may lie from the next in resident memory; a dozen equal runs lay within 3 %
_RESIDENT_SCATTER = 0.05

PartVerdict = Change | Literal["ONLY A", "ONLY B"]
MemoryVerdict = Literal["LESS", "MORE", "SAME", "UNCLEAR"]


@dataclass(frozen=True)
class PartChange:
    """A part of the step on either side, in seconds: the mean step, or the geometric mean of the repeats' means."""

    part: str
    a_s: float
    b_s: float
    difference_s: float
    of_step: float | None  # the difference as a share of A's step
    interval: RatioInterval | None  # B over A; None where nothing can be said
    verdict: PartVerdict


@dataclass(frozen=True)
class MemoryChange:
    """A peak on either side, in bytes, or the geometric mean of the repeats' peaks."""

    reading: str
    a_bytes: float
    b_bytes: float
    interval: RatioInterval | None
    verdict: MemoryVerdict


@dataclass(frozen=True)
class RateChange:
    """Tokens a second; ``interval`` is B's rate over A's, ``verdict`` that of the time a token takes."""

    a_per_s: float
    b_per_s: float
    interval: RatioInterval | None
    verdict: Change


@dataclass(frozen=True)
class Comparison:
    """The findings of ``compare``.

    The step's interval holds with ``CONFIDENCE``; the intervals of the other parts hold together with it (Bonferroni).
    """

    a: list[str]  # the folders of A's runs
    b: list[str]
    unlike: list[Difference]  # why the sides did not do the same work; empty where they may be compared
    config: list[Difference]  # what else differs
    environment: list[Difference] | None  # None: unknown
    step: PartChange
    forward_backward: PartChange
    # phases that occur, those that change the step most first; with several ranks, without their waiting
    # if all runs know it
    phases: list[PartChange]
    ranks: list[PartChange]  # own work and waiting of the mean rank, by their names in the registry
    tokens: RateChange | None
    memory: list[MemoryChange]
    detectable: float | None  # the smallest change of the step, as a share, that runs like these can detect
    notes: list[str]  # what a reader must know before using the figures


def compare(a: Sequence[Entry], b: Sequence[Entry], spread: ProcessSpread = ASSUMED_SPREAD) -> Comparison:
    """Compare B with A; several runs on a side are repeats of each other.

    Raises:
        UsageError: a side has no measured step, or its runs are no repeats; a run is on both sides.
        RecordError: a ``steps.csv`` cannot be read.
    """
    side_a, side_b = without_waiting(read_side("A", a), read_side("B", b))
    folders_a, folders_b = ([run.folder for run in side.runs] for side in (side_a, side_b))
    if both := {folder.resolve() for folder in folders_a} & {folder.resolve() for folder in folders_b}:
        raise UsageError(f"{min(both)}: expected a run on one side, given on both")
    first_a, first_b = side_a.runs[0].record, side_b.runs[0].record
    parts = ["forward_backward", *(part for part in PARTS if side_a.occurs(part) or side_b.occurs(part))]
    step = _part_change("step", side_a, side_b, CONFIDENCE, spread)
    together = 1.0 - (1.0 - CONFIDENCE) / len(parts)  # Dunn 1961, JASA 56:52
    forward_backward, *phases = (_part_change(part, side_a, side_b, together, spread) for part in parts)
    return Comparison(
        a=[str(folder) for folder in folders_a],
        b=[str(folder) for folder in folders_b],
        unlike=unlike(first_a, first_b),
        config=in_config(first_a, first_b),
        environment=in_environment(first_a, first_b),
        step=step,
        forward_backward=forward_backward,
        phases=sorted(phases, key=lambda row: -abs(row.difference_s)),
        ranks=_ranks(side_a, side_b),
        tokens=_tokens(side_a, side_b, step),
        memory=_memory(side_a, side_b),
        detectable=minimum_detectable_effect(step.interval) if step.interval is not None else None,
        notes=[*side_a.notes, *side_b.notes, *_scatter(side_a, side_b, spread)],
    )


def _part_change(part: str, a: Side, b: Side, confidence: float, spread: ProcessSpread) -> PartChange:
    known_a, known_b = a.means(part), b.means(part)
    if len(known_a) == len(known_b) == 1:
        interval = single_interval(known_a[0], known_b[0], confidence, spread)
    else:
        interval = repeats_interval([own.mean for own in known_a], [own.mean for own in known_b], confidence)
    changed = _changed(part, a, a.typical_s(part), b.typical_s(part), interval)
    if a.occurs(part) != b.occurs(part):
        return replace(changed, verdict="ONLY A" if a.occurs(part) else "ONLY B")
    return changed


def _changed(name: str, a: Side, a_s: float, b_s: float, interval: RatioInterval | None) -> PartChange:
    step_s, more_s = a.typical_s("step"), b_s - a_s
    return PartChange(name, a_s, b_s, more_s, more_s / step_s if step_s > 0 else None, interval, change(interval))


def _ranks(a: Side, b: Side) -> list[PartChange]:
    """Return own work and waiting, as means of a run's steps; only repeats show how these scatter."""
    changes = []
    for name in ("own_work_s", "waiting_s"):
        seconds_a, seconds_b = (side.known(QUANTITIES[name]) for side in (a, b))
        if seconds_a is not None and seconds_b is not None:
            interval = repeats_interval(seconds_a, seconds_b, CONFIDENCE)
            changes.append(_changed(name, a, typical(seconds_a), typical(seconds_b), interval))
    return changes


def _tokens(a: Side, b: Side, step: PartChange) -> RateChange | None:
    known_a, known_b = (side.known(QUANTITIES["tokens_per_step"]) for side in (a, b))
    if not known_a or not known_b or min(*known_a, *known_b, step.a_s, step.b_s) <= 0:
        return None
    tokens_a, tokens_b = typical(known_a), typical(known_b)
    rates, interval = (tokens_a / step.a_s, tokens_b / step.b_s), step.interval
    if interval is None:
        return RateChange(*rates, None, "UNCLEAR")
    more_work = tokens_b / tokens_a
    a_token = RatioInterval(*(x / more_work for x in (interval.ratio, interval.low, interval.high)))
    rate = RatioInterval(1.0 / a_token.ratio, 1.0 / a_token.high, 1.0 / a_token.low)
    return RateChange(*rates, rate, change(a_token))


_MEMORY_WORDS: dict[Change, MemoryVerdict] = {
    "FASTER": "LESS", "SLOWER": "MORE", "SAME": "SAME", "UNCLEAR": "UNCLEAR",
}  # fmt: skip


def _memory(a: Side, b: Side) -> list[MemoryChange]:
    """Return each peak that every run knows."""
    changes = []
    for reading, quantity in MEMORY.items():
        peaks_a, peaks_b = a.known(quantity), b.known(quantity)
        if peaks_a is not None and peaks_b is not None:
            interval = _peaks_interval(reading, peaks_a, peaks_b)
            word = _MEMORY_WORDS[change(interval)]
            changes.append(MemoryChange(reading, typical(peaks_a), typical(peaks_b), interval, word))
    return changes


def _peaks_interval(reading: str, a: Sequence[int], b: Sequence[int]) -> RatioInterval | None:
    """Return the ratio's interval. Two runs suffice: an allocator's peaks repeat exactly, the system's only nearly."""
    if max(len(a), len(b)) > 1:
        return repeats_interval(a, b, CONFIDENCE)
    if not a[0] or not b[0]:
        return None
    ratio, scatter = b[0] / a[0], _RESIDENT_SCATTER if reading == "resident_peak" else 0.0
    return RatioInterval(ratio, ratio * (1.0 - scatter), ratio * (1.0 + scatter), CONFIDENCE)


def _scatter(a: Side, b: Side, spread: ProcessSpread) -> list[str]:
    """Return notes on what this number of runs per side cannot show, or what their order in time may fake."""
    runs, notes = (len(a.runs), len(b.runs)), []
    if runs == (1, 1):
        known = "were seen to" if spread.learned else "are taken to"
        remedy = "" if spread.learned else "; lm_profiler selftest shows by how much here"
        by = f"{spread.std:.1%} (std): three runs a side would do{remedy}"
        return [f"one run against one: equal processes {known} differ by {by}"]
    if 1 in runs:
        notes.append(f"{'A' if runs[0] == 1 else 'B'} is a single run: taken to scatter as the other side's do")
    elif 2 in runs:
        notes.append(
            "two runs say little about how runs scatter: with three a side intervals are several times narrower"
        )
    began_a, began_b = ([run.record.started for run in side.runs] for side in (a, b))
    if max(began_a) < min(began_b) or max(began_b) < min(began_a):
        notes.append("one side ran before the other: the machine may have changed in between; alternate the runs")
    return notes


@dataclass(frozen=True)
class Run:
    """A run with its measured steps, at least one, one row per step."""

    folder: Path
    record: RunRecord
    steps: list[StepRow]
    model: StepModel  # of the steps; figures use its stretch
    # what the mean rank waits for others in each part, where that is not the part's own
    waits_s: Mapping[str, float] = field(default_factory=dict)

    def mean(self, part: str) -> Interval:
        """The mean of ``part`` in a step; with fewer than three steps its interval is unbounded."""
        x = np.array([row.time(part) for row in self.steps])
        here = float(x[self.model.first : self.model.end].mean())
        known = self.model.interval_of(x) or Interval(here, -math.inf, math.inf)
        own_s = max(known.mean - self.waits_s.get(part, 0.0), 0.0)
        # As uncertain as with the waiting, whose scatter from step to step is not recorded.
        return Interval(own_s, known.low - known.mean + own_s, known.high - known.mean + own_s, known.lag1)


@dataclass(frozen=True)
class Side:
    """One run or its repeats. ``notes`` say what a reader must know of them."""

    runs: list[Run]
    notes: list[str]

    def means(self, part: str) -> list[Interval]:
        return [run.mean(part) for run in self.runs]

    def typical_s(self, part: str) -> float:
        """The mean step; for repeats the geometric mean of their means, which their ratio compares."""
        return typical([own.mean for own in self.means(part)])

    def occurs(self, part: str) -> bool:
        return any(row.time(part) > 0.0 for run in self.runs for row in run.steps)

    def known(self, of: Quantity) -> list[Any] | None:
        """A figure of each run; None where a run does not know it."""
        values = [of.get(run.record) for run in self.runs]
        return None if None in values else values


def typical(values: Sequence[float]) -> float:
    """The geometric mean, or the mean where one of them is 0."""
    return geometric_mean(values) if min(values) > 0.0 else fmean(values)


def without_waiting(*sides: Side) -> list[Side]:
    """Return phases without waiting, if all runs know it: a phase that ends in a collective contains waiting."""
    ranks = [run.record.ranks for side in sides for run in side.runs]
    if None in ranks:
        return list(sides)
    return [Side([replace(run, waits_s=_waits_s(run.record.ranks)) for run in side.runs], side.notes) for side in sides]


def _waits_s(ranks: Ranks | None) -> dict[str, float]:
    """Return the waiting seconds of the mean rank by part; of the median rank if not every rank's is known."""
    if ranks is None:
        return {}
    waits_s = {part: spread.median_s for part, spread in ranks.waiting.items()}
    if len(ranks.by_rank) == ranks.heard:
        waits_s = {part: fmean(of.waiting_s.get(part, 0.0) for of in ranks.by_rank) for part in waits_s}
    return {**waits_s, "forward_backward": waits_s.get("forward", 0.0) + waits_s.get("backward", 0.0)}


def read_side(label: str, entries: Sequence[Entry]) -> Side:
    """Return the runs that measured something; ``label`` is A or B."""
    runs, left_out, doubts = list[Run](), list[tuple[Path, str]](), list[tuple[Path, str]]()
    for entry in entries:
        steps = _measured(entry)
        if entry.record is None or not steps:
            why = f"{entry.status}, {_reason(entry)}" if entry.reason else entry.status
            left_out.append((entry.folder, f"it has no measured step ({why})"))
            continue
        runs.append(Run(entry.folder, entry.record, steps, model_of(steps)))
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
    """Return one note for each kind of statement about runs, with its first run: twenty equal notes help nobody."""
    alike: dict[str, list[tuple[Path, str]]] = {}
    for folder, text in said:
        alike.setdefault(re.split("[:(]", text)[0], []).append((folder, text))
    firsts = [(*these[0], len({folder for folder, _ in these}) - 1) for these in alike.values()]
    return [
        f"{folder} {text}" + (f"; likewise {more} more of {runs} runs" if more else "") for folder, text, more in firsts
    ]


def _measured(entry: Entry) -> list[StepRow]:
    """Measured steps, the mean over the ranks, with the device's time."""
    if entry.record is None or not entry.record.steps:  # the run ended before its first step, so it has no steps.csv
        return []
    steps = mean_over_ranks(entry.rows.of_stages("measure"))
    return [row for row in steps if row.seconds is not None]


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
    """Return why the run failed, without the further lines, which are remedies."""
    return (entry.reason or "no reason given").partition("\n")[0]


def _as_repeat(first: Run, other: Run) -> list[str]:
    """Return what differs in the environments of two repeats; nothing else may differ."""
    passed_over = SEEDS | {"program"}  # the program's own arguments may hold a seed too
    config = [each for each in in_config(first.record, other.record) if each.path not in passed_over]
    for difference in (*unlike(first.record, other.record), *config):
        raise UsageError(
            f"{other.folder}: expected a repeat of {first.folder}, "
            f"given {difference.path} {difference.b} instead of {difference.a}\n"
            "the runs of a side are repeats of one another; of a sweep, give one cell's folder"
        )
    return [difference.path for difference in in_environment(first.record, other.record) or ()]
