"""Compares two sets of runs: whether B is faster than A, in which phases, and whether it needs more memory.

If other programs took CPU time from a run, its times are upper bounds and cannot be compared. Then two other figures
decide, which do not include waiting for a CPU: the step without that waiting, and the CPU time of the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from lm_profiler.analysis.compare.differences import (
    Difference,
    in_config,
    in_environment,
    incomparable_facts,
)
from lm_profiler.analysis.compare.ratio import (
    CONFIDENCE,
    MARGIN,
    SAME_WITHIN,
    Change,
    RatioInterval,
    change_word,
    minimum_detectable_effect,
    repeats_interval,
    single_interval,
)
from lm_profiler.analysis.compare.sides import (
    CPU_TIME,
    WITHOUT_CPU_WAITS,
    Run,
    Side,
    read_side,
    typical_value,
    used_gpu_of_others,
    without_waiting,
)
from lm_profiler.analysis.steps.statistics import Interval
from lm_profiler.analysis.steps.summaries import lower_bound_share
from lm_profiler.record.entry import Entry, machine_of
from lm_profiler.record.process_spread import ProcessSpread, known_spread
from lm_profiler.record.quantities import MEMORY, PARTS, QUANTITIES
from lm_profiler.usage_error import UsageError

# The largest difference in resident memory between runs of the same program. In a dozen runs it was 3 %.
_RESIDENT_SCATTER = 0.05

# Other programs lengthen CPU time too, because they use caches, lower the clock and share cores by hyper-threading.
# This is the standard deviation of the effect, extrapolated to a run that got no CPU time compared with one that got
# all of it.
_LOAD_BIAS = 0.15

# The standard deviation of the error of a step without waits for a CPU, as a share of these waits. 35 runs of three
# programs, which waited for 0.3 to 9 times as long as they ran, differed by 6, 8 and 20 %.
_WAITS_KNOWN_TO = 0.04

PartVerdict = Change | Literal["ONLY A", "ONLY B"]
MemoryVerdict = Literal["LESS", "MORE", "SAME", "UNCLEAR"]


@dataclass(frozen=True)
class PartChange:
    """The change of a part of the step, in seconds: between means, or with several runs per side, between geometric
    means of the runs' means."""

    part: str
    a_s: float
    b_s: float
    difference_s: float
    of_step: float | None  # the difference as a share of A's step
    interval: RatioInterval | None  # B over A; None if it is unknown or too wide
    verdict: PartVerdict


@dataclass(frozen=True)
class MemoryChange:
    """The change of a memory peak in bytes; with several runs per side, between geometric means of their peaks."""

    reading: str
    a_bytes: float
    b_bytes: float
    interval: RatioInterval | None
    verdict: MemoryVerdict


@dataclass(frozen=True)
class RateChange:
    """The change of tokens per second.

    ``interval`` is the ratio of B's rate to A's. ``verdict`` is about the time per token, so FASTER means a higher
    rate. A rate whose bound is ``at least`` is a lower bound, because other programs used the machine.
    """

    a_per_s: float
    b_per_s: float
    interval: RatioInterval | None
    verdict: Change
    a_bound: Literal["at least"] | None = None
    b_bound: Literal["at least"] | None = None


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    The interval of the step has the confidence ``CONFIDENCE``. The intervals of all other parts together have it too
    (Bonferroni's correction).
    """

    a: list[str]  # the folders of A's runs
    b: list[str]
    # differences because of which the sides did not do the same work; empty if they can be compared
    unlike: list[Difference]
    config: list[Difference]  # other differences of the options
    environment: list[Difference] | None  # None means unknown
    step: PartChange  # always UNCLEAR if the machine was busy, because times are then upper bounds
    forward_backward: PartChange
    # the phases that occur, the one with the largest difference first; with several ranks, without waiting for other
    # ranks if all runs have measured it
    phases: list[PartChange]
    # own work and waiting of the mean rank, by their names in the registry of figures
    ranks: list[PartChange]
    tokens: RateChange | None
    useful_tokens: RateChange | None  # the change of the rate of tokens without padding
    memory: list[MemoryChange]
    # the smallest change of the step, as a share, that runs like these can detect
    detectable: float | None
    notes: list[str]  # what a reader must know before using the figures
    # the figures that decide if the machine was busy: the step without waits for a CPU, and CPU time; otherwise empty
    work: list[PartChange]
    # the phases without waits for a CPU, the one with the largest difference first; a single run has no intervals for
    # them, because they are measured in few steps
    work_phases: list[PartChange]
    flops: float | None  # FLOPs of B's step over those of A's; None means unknown
    decision: PartChange  # the row whose verdict is that of the comparison: ``step``, or one of ``work``
    # the assumption about the spread of processes, if each side is a single run
    assumption: str | None
    advice: str | None = None  # how to get a clearer verdict, if it is UNCLEAR

    @property
    def verdict(self) -> PartVerdict:
        return self.decision.verdict


def compare(
    a: Sequence[Entry],
    b: Sequence[Entry],
    spread: ProcessSpread | None = None,
    same_within: float = SAME_WITHIN,
) -> Comparison:
    """Compare B with A; several runs on a side must be repeats of each other.

    Args:
        a: the runs of A.
        b: the runs of B.
        spread: how much processes of the same program differ; None for the result of a self-test on A's machine, or
            else a default.
        same_within: the largest change, as a share, for the verdict SAME.

    Raises:
        UsageError: a side has no measured step, or runs that are not repeats; or a run is on both sides.
        RecordError: a ``steps.csv`` cannot be read.
    """
    side_a, side_b = without_waiting(read_side("A", a), read_side("B", b))
    _check_no_common_run(side_a, side_b)
    if spread is None:
        spread = known_spread(machine_of(a))
    pair = SidePair(side_a, side_b, spread, same_within)

    step = pair.part_change("step", CONFIDENCE)
    forward_backward, *phases = _part_changes(pair)
    # On a busy machine, figures that do not include waiting for a CPU decide instead of the step, if they are known.
    work: list[PartChange] = []
    work_phases: list[PartChange] = []
    decision = step
    if pair.is_busy:
        work = pair.work_changes(CONFIDENCE)
    if work:
        work_phases = pair.work_phases()
        decision = decide(work)
    detectable = None
    if decision.interval is not None:
        detectable = minimum_detectable_effect(decision.interval)

    record_a = side_a.runs[0].record
    record_b = side_b.runs[0].record
    notes = [*side_a.notes, *side_b.notes]
    notes += _busy_notes(pair, decided_by_work=bool(work))
    notes += _notes_on_runs(side_a, side_b)
    return Comparison(
        a=[str(run.folder) for run in side_a.runs],
        b=[str(run.folder) for run in side_b.runs],
        unlike=incomparable_facts(record_a, record_b),
        config=in_config(record_a, record_b),
        environment=in_environment(record_a, record_b),
        step=step,
        forward_backward=forward_backward,
        phases=_largest_first(phases),
        ranks=_rank_changes(side_a, side_b),
        tokens=_token_rate_change(side_a, side_b, step),
        useful_tokens=_token_rate_change(
            side_a, side_b, step, "useful_tokens_per_step"
        ),
        memory=_memory_changes(side_a, side_b),
        detectable=detectable,
        notes=notes,
        work=work,
        work_phases=work_phases,
        flops=_flops_ratio(side_a, side_b),
        decision=decision,
        assumption=pair.assumption,
    )


def _check_no_common_run(a: Side, b: Side) -> None:
    """Raise UsageError if a run is on both sides."""
    folders_a = {run.folder.resolve() for run in a.runs}
    folders_b = {run.folder.resolve() for run in b.runs}
    common_folders = folders_a & folders_b
    if common_folders:
        raise UsageError(
            f"{min(common_folders)}: expected on one side only, given on both"
        )


def _part_changes(pair: SidePair) -> list[PartChange]:
    """Return the change of forward and backward together, and then that of each phase that occurs."""
    parts = ["forward_backward"]
    for part in PARTS:
        if pair.a.occurs(part) or pair.b.occurs(part):
            parts.append(part)
    # so that all intervals together have the confidence (Dunn 1961, JASA 56:52)
    confidence_of_each = 1.0 - (1.0 - CONFIDENCE) / len(parts)
    return [pair.part_change(part, confidence_of_each) for part in parts]


def decide(rows: Sequence[PartChange]) -> PartChange:
    """Return the row that decides: the first one, or a clear second one that the first one does not contradict.

    The first row is a time of the step. There may be a second one, CPU time, which alone is not enough: a program that
    sleeps instead of computing uses less of it. So it decides only if the first row has changed in the same direction,
    even if not clearly.
    """
    step = rows[0]
    verdicts = {row.verdict for row in rows}
    are_contradictory = {"FASTER", "SLOWER"} <= verdicts
    if are_contradictory:
        return replace(step, verdict="UNCLEAR")
    for row in rows:
        is_clear = row.verdict in ("FASTER", "SLOWER")
        if is_clear and (row is step or _same_direction(step.interval, row.interval)):
            return row
    return step


def _same_direction(
    interval_a: RatioInterval | None, interval_b: RatioInterval | None
) -> bool:
    """Return whether both ratios are beyond the margin, on the same side of 1."""
    if interval_a is None or interval_b is None:
        return False
    both_faster = max(interval_a.ratio, interval_b.ratio) < 1.0 - MARGIN
    both_slower = min(interval_a.ratio, interval_b.ratio) > 1.0 + MARGIN
    return both_faster or both_slower


def _largest_first(rows: Sequence[PartChange]) -> list[PartChange]:
    return sorted(rows, key=lambda row: -abs(row.difference_s))


@dataclass(frozen=True)
class SidePair:
    """The two sides of a comparison, and how much their runs may differ by chance."""

    a: Side
    b: Side
    spread: ProcessSpread
    same_within: float = SAME_WITHIN

    @property
    def is_single(self) -> bool:
        """Whether each side is a single run, so that their spread is unknown."""
        return len(self.a.runs) == len(self.b.runs) == 1

    @property
    def assumption(self) -> str | None:
        """The assumption that is needed if each side is a single run; None if the runs show their spread."""
        if not self.is_single:
            return None
        if self.is_busy:
            return (
                f"{self.spread.text}, and the waits for a CPU were measured with an error of {_WAITS_KNOWN_TO:.0%} "
                "(std)"
            )
        return self.spread.text

    @property
    def is_busy(self) -> bool:
        return self.a.is_contended or self.b.is_contended

    @property
    def load_bias(self) -> float:
        """The standard deviation, as a share, of the difference of CPU times that is due to different loads."""
        missed_a = fmean(run.cpu_share_missed for run in self.a.runs)
        missed_b = fmean(run.cpu_share_missed for run in self.b.runs)
        return _LOAD_BIAS * abs(missed_a - missed_b)

    @property
    def bias_of_waits(self) -> float:
        """The standard deviation of the error of subtracting waits; 0 with repeats, whose spread includes it."""
        if not self.is_single:
            return 0.0
        waited_a = self.a.runs[0].waited_share
        waited_b = self.b.runs[0].waited_share
        return _WAITS_KNOWN_TO * math.hypot(waited_a, waited_b)

    def part_change(self, part: str, confidence: float) -> PartChange:
        """Return the change of ``part`` from A to B, with its verdict."""
        row = self._time_change(
            part, self.a.means(part), self.b.means(part), confidence
        )
        if self.a.occurs(part) and not self.b.occurs(part):
            return replace(row, verdict="ONLY A")
        if self.b.occurs(part) and not self.a.occurs(part):
            return replace(row, verdict="ONLY B")
        if self.is_busy:
            return replace(row, verdict="UNCLEAR")
        return row

    def work_changes(self, confidence: float) -> list[PartChange]:
        """Return the changes of figures that do not include waiting for a CPU, if all runs have measured them.

        They are the step without that waiting, and the CPU time. Empty if other programs used the GPU of a run.
        """
        if any(used_gpu_of_others(run) for run in (*self.a.runs, *self.b.runs)):
            return []
        names = [WITHOUT_CPU_WAITS]
        # With one thread, CPU time shows nothing more. And it cannot be compared if the sides divide their work among
        # different numbers of threads or workers.
        has_several_threads = _thread_count(self.a.runs[0]) != 1
        if has_several_threads and _same_parallelism(self.a.runs[0], self.b.runs[0]):
            names.append(CPU_TIME)
        # so that both intervals together have the ``confidence`` (Bonferroni)
        confidence_of_each = 1.0 - (1.0 - confidence) / len(names)
        rows = []
        for name in names:
            means_a = self.a.figures(name)
            means_b = self.b.figures(name)
            if means_a is None or means_b is None:
                continue
            bias = math.hypot(self.load_bias, self.bias_of_waits)
            rows.append(
                self._time_change(name, means_a, means_b, confidence_of_each, bias)
            )
        return rows

    def work_phases(self) -> list[PartChange]:
        """Return the changes of the phases without waits for a CPU, from steps in which these were measured."""
        rows = []
        for phase in PARTS:
            seconds_a = _phase_without_cpu_waits(self.a, phase)
            seconds_b = _phase_without_cpu_waits(self.b, phase)
            if seconds_a is None or seconds_b is None:
                continue
            interval = repeats_interval(
                seconds_a, seconds_b, CONFIDENCE, self.load_bias
            )
            a_s = typical_value(seconds_a)
            b_s = typical_value(seconds_b)
            rows.append(_change_of_part(phase, self.a, a_s, b_s, interval))
        return _largest_first(rows)

    def _time_change(
        self,
        name: str,
        a: Sequence[Interval],
        b: Sequence[Interval],
        confidence: float,
        bias: float = 0.0,
    ) -> PartChange:
        """Return the change of a time from A to B.

        Args:
            name: the name of the figure, such as that of a phase.
            a: the mean of each run of A, with its interval.
            b: the same for B.
            confidence: of the interval of the change.
            bias: the standard deviation of other differences between the sides, as a share.
        """
        means_a = [interval.mean for interval in a]
        means_b = [interval.mean for interval in b]
        if self.is_single:
            interval = single_interval(a[0], b[0], confidence, self.spread, bias)
        else:
            interval = repeats_interval(means_a, means_b, confidence, bias)
        a_s = typical_value(means_a)
        b_s = typical_value(means_b)
        return _change_of_part(name, self.a, a_s, b_s, interval, self.same_within)


def _change_of_part(
    name: str,
    a: Side,
    a_s: float,
    b_s: float,
    interval: RatioInterval | None,
    same_within: float = SAME_WITHIN,
) -> PartChange:
    """Return the change of the part ``name`` from ``a_s`` to ``b_s``; ``interval`` is that of the ratio of B to A."""
    step_s = a.typical_s("step")
    difference_s = b_s - a_s
    return PartChange(
        part=name,
        a_s=a_s,
        b_s=b_s,
        difference_s=difference_s,
        of_step=difference_s / step_s if step_s > 0 else None,
        interval=interval,
        verdict=change_word(interval, same_within),
    )


def _phase_without_cpu_waits(side: Side, phase: str) -> list[float] | None:
    """Return the seconds of ``phase`` without waiting for a CPU, for each run; None if a run has not measured them."""
    seconds = []
    for run in side.runs:
        use = run.record.thread_use.get(phase)
        if use is None:
            return None
        seconds.append(use.ran_s + use.asleep_s)
    return seconds


def _same_parallelism(a: Run, b: Run) -> bool:
    """Return whether both runs use the same numbers of threads and workers."""
    return _thread_count(a) == _thread_count(b) and _worker_count(a) == _worker_count(b)


def _thread_count(run: Run) -> int | None:
    environment = run.record.environment
    return None if environment is None else environment.threads


def _worker_count(run: Run) -> int | None:
    loader = run.record.loader
    return None if loader is None else loader.workers


def _flops_ratio(a: Side, b: Side) -> float | None:
    """Return the FLOPs of B's step over those of A's; None if either is unknown."""
    flops_a, flops_b = _flops_of_step(a), _flops_of_step(b)
    if not flops_a or not flops_b:
        return None
    return flops_b / flops_a


def _flops_of_step(side: Side) -> int | None:
    """Return the FLOPs of a step of the first run, recomputation included; None if they are unknown."""
    use = side.runs[0].record.utilisation
    return None if use is None else use.flops.all


def _rank_changes(a: Side, b: Side) -> list[PartChange]:
    """Return the changes of own work and of waiting; they have intervals only if a side has several runs."""
    changes = []
    for name in ("own_work_s", "waiting_s"):
        seconds_a = a.values(QUANTITIES[name])
        seconds_b = b.values(QUANTITIES[name])
        if seconds_a is None or seconds_b is None:
            continue
        interval = repeats_interval(seconds_a, seconds_b, CONFIDENCE)
        a_s = typical_value(seconds_a)
        b_s = typical_value(seconds_b)
        changes.append(_change_of_part(name, a, a_s, b_s, interval))
    return changes


def _token_rate_change(
    a: Side, b: Side, step: PartChange, name: str = "tokens_per_step"
) -> RateChange | None:
    """Return the change of the tokens per second; the figure ``name`` counts the tokens per step.

    None if the tokens or the times are unknown. Its interval is that of ``step``.
    """
    counts_a = a.values(QUANTITIES[name])
    counts_b = b.values(QUANTITIES[name])
    if not counts_a or not counts_b:
        return None
    if min(*counts_a, *counts_b, step.a_s, step.b_s) <= 0:
        return None
    tokens_a = typical_value(counts_a)
    tokens_b = typical_value(counts_b)
    rates = RateChange(
        a_per_s=tokens_a / step.a_s * _certain_share_of_rate(a),
        b_per_s=tokens_b / step.b_s * _certain_share_of_rate(b),
        interval=None,
        verdict="UNCLEAR",
        a_bound="at least" if a.is_contended else None,
        b_bound="at least" if b.is_contended else None,
    )
    if step.interval is None:
        return rates
    # the ratios, B over A, of the tokens per step, of the time per token, and of the tokens per second
    tokens_ratio = tokens_b / tokens_a
    token_time = RatioInterval(
        ratio=step.interval.ratio / tokens_ratio,
        low=step.interval.low / tokens_ratio,
        high=step.interval.high / tokens_ratio,
    )
    rate = RatioInterval(
        1.0 / token_time.ratio, low=1.0 / token_time.high, high=1.0 / token_time.low
    )
    verdict = change_word(token_time)
    # If the step's interval is clear but its verdict is not, the machine was busy: then the rate is not clear either.
    step_is_unclear = step.verdict not in ("FASTER", "SLOWER", "SAME")
    if step_is_unclear and change_word(step.interval) != "UNCLEAR":
        verdict = "UNCLEAR"
    return replace(rates, interval=rate, verdict=verdict)


def _certain_share_of_rate(side: Side) -> float:
    """Return the share of the side's rate that is certain; 1 if no other program used the machine."""
    shares = []
    for run in side.runs:
        share = lower_bound_share(QUANTITIES["tokens_per_s"], run.record)
        shares.append(1.0 if share is None else share)
    return fmean(shares)


_MEMORY_WORDS: dict[Change, MemoryVerdict] = {
    "FASTER": "LESS", "SLOWER": "MORE", "SAME": "SAME", "UNCLEAR": "UNCLEAR",
}  # fmt: skip


def _memory_changes(a: Side, b: Side) -> list[MemoryChange]:
    """Return the changes of the memory peaks that all runs have measured."""
    changes = []
    for reading, quantity in MEMORY.items():
        peaks_a = a.values(quantity)
        peaks_b = b.values(quantity)
        if peaks_a is not None and peaks_b is not None:
            interval = _peaks_interval(reading, peaks_a, peaks_b)
            word = _MEMORY_WORDS[change_word(interval)]
            changes.append(
                MemoryChange(
                    reading,
                    a_bytes=typical_value(peaks_a),
                    b_bytes=typical_value(peaks_b),
                    interval=interval,
                    verdict=word,
                )
            )
    return changes


def _peaks_interval(
    reading: str, a: Sequence[int], b: Sequence[int]
) -> RatioInterval | None:
    """Return the ratio of peaks with its interval.

    Single runs can be compared: the peaks of an allocator repeat exactly, and resident memory nearly so.
    """
    if max(len(a), len(b)) > 1:
        return repeats_interval(a, b, CONFIDENCE)
    if not a[0] or not b[0]:
        return None
    ratio = b[0] / a[0]
    scatter = _RESIDENT_SCATTER if reading == "resident_peak" else 0.0
    return RatioInterval(
        ratio,
        low=ratio * (1.0 - scatter),
        high=ratio * (1.0 + scatter),
        confidence=CONFIDENCE,
    )


def _busy_notes(pair: SidePair, decided_by_work: bool) -> list[str]:
    """Return a note if other programs lengthened the times; it states whether other figures decide."""
    if not pair.is_busy:
        return []
    if decided_by_work:
        return [
            (
                "other programs used the machine: times are upper bounds; the verdict uses figures that exclude "
                "waits for a CPU"
            )
        ]
    return [
        "other programs used the machine: times are upper bounds, and no figure that excludes their effect is known"
    ]


def _notes_on_runs(a: Side, b: Side) -> list[str]:
    """Return notes on too few runs per side, and on sides that were not run alternately."""
    runs_a, runs_b = len(a.runs), len(b.runs)
    notes = []
    if runs_a == runs_b == 1:
        return []
    if runs_a == 1:
        notes.append("A is a single run: its variation is assumed to equal that of B")
    elif runs_b == 1:
        notes.append("B is a single run: its variation is assumed to equal that of A")
    elif min(runs_a, runs_b) == 2:
        notes.append(
            "two runs per side hardly show how much runs differ; with three, intervals are several times narrower"
        )
    began_a = [run.record.started for run in a.runs]
    began_b = [run.record.started for run in b.runs]
    if max(began_a) < min(began_b) or max(began_b) < min(began_a):
        notes.append(
            "one side ran before the other: the machine may have changed in between; alternate the runs"
        )
    return notes
