"""Two sets of runs side by side, as data: is B faster than A, in which phases, and does it need more memory?

If other programs took CPU time from a run, its times are upper bounds, and they are not compared. Two figures that
waiting for a CPU does not lengthen decide then: the step without that waiting, and the CPU time of the process.
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

# how far one run of a program may lie from the next in resident memory; a dozen equal runs lay within 3 %
_RESIDENT_SCATTER = 0.05

# The std by which CPU time differs between two runs of which one got all of its CPU time and the other none: neighbours
# take caches and clocks, and hyper-threads their half of a core, which all of it stretches CPU time.
_LOAD_BIAS = 0.15

# The std, as a share of the waits for a CPU, by which a step without them is off. 35 runs of three programs, which
# waited for 0.3 to 9 times as long as they ran, differed by 6, 8 and 20 %.
_WAITS_KNOWN_TO = 0.04

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
    interval: RatioInterval | None  # B over A; None if nothing can be said
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
    """Tokens per second; ``interval`` is B's rate over A's, ``verdict`` that of the time a token takes.

    A rate whose ``bound`` is ``at least`` is a lower bound: other programs used the machine.
    """

    a_per_s: float
    b_per_s: float
    interval: RatioInterval | None
    verdict: Change
    a_bound: Literal["at least"] | None = None
    b_bound: Literal["at least"] | None = None


@dataclass(frozen=True)
class Comparison:
    """The findings of ``compare``.

    The step's interval holds with ``CONFIDENCE``; the intervals of the other parts hold together with it (Bonferroni).
    """

    a: list[str]  # the folders of A's runs
    b: list[str]
    # why the sides did not do the same work; empty if they may be compared
    unlike: list[Difference]
    config: list[Difference]  # what else differs
    environment: list[Difference] | None  # None: unknown
    step: PartChange  # UNCLEAR if the machine was busy, whatever its interval: times are then upper bounds
    forward_backward: PartChange
    # the phases that occur, the one that changes the step most first; with several ranks, without their waiting if all
    # runs have measured it
    phases: list[PartChange]
    # own work and waiting of the mean rank, by their names in the registry
    ranks: list[PartChange]
    tokens: RateChange | None
    useful_tokens: RateChange | None  # tokens without padding
    memory: list[MemoryChange]
    # the smallest change of the step, as a share, that runs like these can detect
    detectable: float | None
    notes: list[str]  # what a reader must know before using the figures
    # what decides if the machine was busy: the step without waits for a CPU, and CPU time; empty on a calm machine
    work: list[PartChange]
    # phases without waits for a CPU, the one that changes most first; without intervals, since few steps are read so
    # closely
    work_phases: list[PartChange]
    flops: float | None  # FLOPs of B's step over those of A's; None means unknown
    decision: PartChange  # the row whose verdict is that of the comparison: the step's, or one of ``work``
    # what one run a side takes for granted about how far processes differ; None if the runs show it themselves
    assumption: str | None
    advice: str | None = None  # how to be surer, if the verdict is UNCLEAR

    @property
    def verdict(self) -> PartVerdict:
        return self.decision.verdict


def compare(
    a: Sequence[Entry],
    b: Sequence[Entry],
    spread: ProcessSpread | None = None,
    same_within: float = SAME_WITHIN,
) -> Comparison:
    """Compare B with A; several runs on a side are repeats of each other.

    ``spread`` is how far processes of one program differ; None: what self-tests have shown of A's machine, or else
    what is assumed.

    Raises:
        UsageError: a side has no measured step, or its runs are no repeats; a run is on both sides.
        RecordError: a ``steps.csv`` cannot be read.
    """
    side_a, side_b = without_waiting(read_side("A", a), read_side("B", b))
    folders_a = [run.folder for run in side_a.runs]
    folders_b = [run.folder for run in side_b.runs]
    real_folders_a = {folder.resolve() for folder in folders_a}
    on_both_sides = real_folders_a & {folder.resolve() for folder in folders_b}
    if on_both_sides:
        raise UsageError(
            f"{min(on_both_sides)}: expected on one side only, given on both"
        )
    if spread is None:
        spread = known_spread(machine_of(a))
    pair = SidePair(side_a, side_b, spread, same_within)
    record_a = side_a.runs[0].record
    record_b = side_b.runs[0].record
    step = pair.part_change("step", CONFIDENCE)
    parts = ["forward_backward"]
    for part in PARTS:
        if side_a.occurs(part) or side_b.occurs(part):
            parts.append(part)
    confidence_of_each = 1.0 - (1.0 - CONFIDENCE) / len(parts)  # Dunn 1961, JASA 56:52
    forward_backward, *phases = [
        pair.part_change(part, confidence_of_each) for part in parts
    ]
    work = pair.work_changes(CONFIDENCE) if pair.is_busy else []
    decision = decide(work) if work else step
    detectable = None
    if decision.interval is not None:
        detectable = minimum_detectable_effect(decision.interval)
    notes = [*side_a.notes, *side_b.notes]
    notes += _busy_notes(pair, work)
    notes += _notes_on_runs(side_a, side_b)
    return Comparison(
        a=[str(folder) for folder in folders_a],
        b=[str(folder) for folder in folders_b],
        unlike=incomparable_facts(record_a, record_b),
        config=in_config(record_a, record_b),
        environment=in_environment(record_a, record_b),
        step=step,
        forward_backward=forward_backward,
        phases=_largest_first(phases),
        ranks=_ranks(side_a, side_b),
        tokens=_tokens(side_a, side_b, step),
        useful_tokens=_tokens(side_a, side_b, step, "useful_tokens_per_step"),
        memory=_memory(side_a, side_b),
        detectable=detectable,
        notes=notes,
        work=work,
        work_phases=pair.work_phases() if work else [],
        flops=_flops_ratio(side_a, side_b),
        decision=decision,
        assumption=pair.assumption,
    )


def decide(rows: Sequence[PartChange]) -> PartChange:
    """Return the row that decides: the first, or a clear one that the first does not contradict.

    CPU time alone is not the step's time: a program that sleeps where it used to compute uses less. So another row
    decides only if the first has changed in the same direction, sure or not.
    """
    main = rows[0]
    words = {row.verdict for row in rows}
    if {"FASTER", "SLOWER"} <= words:
        return replace(main, verdict="UNCLEAR")
    for row in rows:
        is_clear = row.verdict in ("FASTER", "SLOWER")
        if is_clear and (row is main or _same_direction(main.interval, row.interval)):
            return row
    return main


def _same_direction(
    interval_a: RatioInterval | None, interval_b: RatioInterval | None
) -> bool:
    """Whether both ratios lie beyond the margin on the same side of 1."""
    if interval_a is None or interval_b is None:
        return False
    both_faster = max(interval_a.ratio, interval_b.ratio) < 1.0 - MARGIN
    both_slower = min(interval_a.ratio, interval_b.ratio) > 1.0 + MARGIN
    return both_faster or both_slower


def _largest_first(rows: Sequence[PartChange]) -> list[PartChange]:
    return sorted(rows, key=lambda row: -abs(row.difference_s))


@dataclass(frozen=True)
class SidePair:
    """Two sides, and what is known of the scatter of their runs."""

    a: Side
    b: Side
    spread: ProcessSpread
    same_within: float = SAME_WITHIN

    @property
    def is_single(self) -> bool:
        """Whether one run is compared with one, so that nothing shows how runs scatter."""
        return len(self.a.runs) == len(self.b.runs) == 1

    @property
    def assumption(self) -> str | None:
        """The assumption that one run per side needs; None if the runs show the spread themselves."""
        if not self.is_single:
            return None
        if self.is_busy:
            return f"{self.spread.text}, and waits for a CPU are known to {_WAITS_KNOWN_TO:.0%}"
        return self.spread.text

    @property
    def is_busy(self) -> bool:
        return self.a.is_contended or self.b.is_contended

    @property
    def load_bias(self) -> float:
        """The std of what another load does to the CPU time of a side, as a share."""
        missed_a = fmean(run.cpu_share_missed for run in self.a.runs)
        missed_b = fmean(run.cpu_share_missed for run in self.b.runs)
        return _LOAD_BIAS * abs(missed_a - missed_b)

    @property
    def bias_of_waits(self) -> float:
        """The std of what subtracting the waits for a CPU adds to one run a side; repeats show it themselves."""
        if not self.is_single:
            return 0.0
        waited_a = self.a.runs[0].waited_share
        waited_b = self.b.runs[0].waited_share
        return _WAITS_KNOWN_TO * math.hypot(waited_a, waited_b)

    def part_change(self, part: str, confidence: float) -> PartChange:
        """Return the change of ``part`` from A to B, with its verdict."""
        row = self._row(part, self.a.means(part), self.b.means(part), confidence)
        if self.a.occurs(part) and not self.b.occurs(part):
            return replace(row, verdict="ONLY A")
        if self.b.occurs(part) and not self.a.occurs(part):
            return replace(row, verdict="ONLY B")
        if self.is_busy:
            return replace(row, verdict="UNCLEAR")
        return row

    def work_changes(self, confidence: float) -> list[PartChange]:
        """Return what waiting for a CPU does not stretch, as far as all runs have measured it.

        The intervals of two rows hold together. For one thread, CPU time shows nothing beyond the first row. It means
        nothing if more processes or threads share the work on one side. Nothing of this helps if others used the
        GPU.
        """
        if any(used_gpu_of_others(run) for run in (*self.a.runs, *self.b.runs)):
            return []
        names = [WITHOUT_CPU_WAITS]
        has_several_threads = _threads(self.a.runs[0]) != 1
        if has_several_threads and _same_parallelism(self.a.runs[0], self.b.runs[0]):
            names.append(CPU_TIME)
        confidence_of_each = 1.0 - (1.0 - confidence) / len(names)
        rows = []
        for name in names:
            means_a, means_b = self.a.figures(name), self.b.figures(name)
            if means_a is not None and means_b is not None:
                bias = math.hypot(self.load_bias, self.bias_of_waits)
                rows.append(self._row(name, means_a, means_b, confidence_of_each, bias))
        return rows

    def work_phases(self) -> list[PartChange]:
        """Return each phase without waits for a CPU, in the steps of which the thread's use of the CPU is known."""
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
            rows.append(_changed(phase, self.a, a_s, b_s, interval))
        return _largest_first(rows)

    def _row(
        self,
        name: str,
        a: Sequence[Interval],
        b: Sequence[Interval],
        confidence: float,
        bias: float = 0.0,
    ) -> PartChange:
        """Return the change of a time from A to B; ``a`` and ``b`` hold the mean of each run of a side."""
        means_a = [interval.mean for interval in a]
        means_b = [interval.mean for interval in b]
        if self.is_single:
            interval = single_interval(a[0], b[0], confidence, self.spread, bias)
        else:
            interval = repeats_interval(means_a, means_b, confidence, bias)
        a_s = typical_value(means_a)
        b_s = typical_value(means_b)
        return _changed(name, self.a, a_s, b_s, interval, self.same_within)


def _changed(
    name: str,
    a: Side,
    a_s: float,
    b_s: float,
    interval: RatioInterval | None,
    same_within: float = SAME_WITHIN,
) -> PartChange:
    """Return how the part ``name`` changed from ``a_s`` to ``b_s``; ``interval`` is the interval of b over a."""
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
    """Return each run's seconds of ``phase`` without waiting for a CPU; None if a run does not have them."""
    seconds = []
    for run in side.runs:
        use = run.record.thread_use.get(phase)
        if use is None:
            return None
        seconds.append(use.ran_s + use.asleep_s)
    return seconds


def _same_parallelism(a: Run, b: Run) -> bool:
    """Whether both runs share their work among as many threads and workers, as far as that is known."""
    return _threads(a) == _threads(b) and _workers(a) == _workers(b)


def _threads(run: Run) -> int | None:
    environment = run.record.environment
    return None if environment is None else environment.threads


def _workers(run: Run) -> int | None:
    loader = run.record.loader
    return None if loader is None else loader.workers


def _flops_ratio(a: Side, b: Side) -> float | None:
    flops_a, flops_b = _flops(a), _flops(b)
    if not flops_a or not flops_b:
        return None
    return flops_b / flops_a


def _flops(side: Side) -> int | None:
    use = side.runs[0].record.utilisation
    return None if use is None else use.flops.all


def _ranks(a: Side, b: Side) -> list[PartChange]:
    """Return own work and waiting, as means of a run's steps; only repeats show how these scatter."""
    changes = []
    for name in ("own_work_s", "waiting_s"):
        seconds_a = a.values(QUANTITIES[name])
        seconds_b = b.values(QUANTITIES[name])
        if seconds_a is None or seconds_b is None:
            continue
        interval = repeats_interval(seconds_a, seconds_b, CONFIDENCE)
        a_s = typical_value(seconds_a)
        b_s = typical_value(seconds_b)
        changes.append(_changed(name, a, a_s, b_s, interval))
    return changes


def _tokens(
    a: Side, b: Side, step: PartChange, name: str = "tokens_per_step"
) -> RateChange | None:
    """Return the rates of the tokens that the figure ``name`` counts per step."""
    counts_a = a.values(QUANTITIES[name])
    counts_b = b.values(QUANTITIES[name])
    if not counts_a or not counts_b:
        return None
    if min(*counts_a, *counts_b, step.a_s, step.b_s) <= 0:
        return None
    tokens_a = typical_value(counts_a)
    tokens_b = typical_value(counts_b)
    rates = RateChange(
        a_per_s=tokens_a / step.a_s * _certain_share(a),
        b_per_s=tokens_b / step.b_s * _certain_share(b),
        interval=None,
        verdict="UNCLEAR",
        a_bound="at least" if a.is_contended else None,
        b_bound="at least" if b.is_contended else None,
    )
    if step.interval is None:
        return rates
    more_work = tokens_b / tokens_a
    token_time = RatioInterval(
        ratio=step.interval.ratio / more_work,
        low=step.interval.low / more_work,
        high=step.interval.high / more_work,
    )
    rate = RatioInterval(
        1.0 / token_time.ratio, low=1.0 / token_time.high, high=1.0 / token_time.low
    )
    verdict = change_word(token_time)
    # The step's own interval was clear, but its verdict is not, because the machine was busy.
    is_doubtful = step.verdict not in ("FASTER", "SLOWER", "SAME")
    if is_doubtful and change_word(step.interval) != "UNCLEAR":
        verdict = "UNCLEAR"
    return replace(rates, interval=rate, verdict=verdict)


def _certain_share(side: Side) -> float:
    """Return the share of the side's rate that is certain; 1 if it had the machine to itself."""
    shares = []
    for run in side.runs:
        share = lower_bound_share(QUANTITIES["tokens_per_s"], run.record)
        shares.append(1.0 if share is None else share)
    return fmean(shares)


_MEMORY_WORDS: dict[Change, MemoryVerdict] = {
    "FASTER": "LESS", "SLOWER": "MORE", "SAME": "SAME", "UNCLEAR": "UNCLEAR",
}  # fmt: skip


def _memory(a: Side, b: Side) -> list[MemoryChange]:
    """Return each peak that all runs have measured."""
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
    """Return the ratio's interval. Two runs suffice: an allocator's peaks repeat exactly, the system's only nearly."""
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


def _busy_notes(pair: SidePair, work: Sequence[PartChange]) -> list[str]:
    """Return the note that other programs lengthened the times, and what decides in spite of that."""
    if not pair.is_busy:
        return []
    if work:
        return [
            "the machine was busy: times are upper bounds; figures without waiting for a CPU decide"
        ]
    return [
        "the machine was busy: times are upper bounds, and no figure without the effect of its load is known"
    ]


def _notes_on_runs(a: Side, b: Side) -> list[str]:
    """Return notes on what this number of runs per side cannot show, or what their order in time may fake."""
    runs_a, runs_b = len(a.runs), len(b.runs)
    notes = []
    if runs_a == runs_b == 1:
        return []
    if runs_a == 1:
        notes.append("A is a single run: its scatter is assumed to equal that of B")
    elif runs_b == 1:
        notes.append("B is a single run: its scatter is assumed to equal that of A")
    elif min(runs_a, runs_b) == 2:
        notes.append(
            "two runs hardly show how runs scatter: with three per side intervals are several times narrower"
        )
    began_a = [run.record.started for run in a.runs]
    began_b = [run.record.started for run in b.runs]
    if max(began_a) < min(began_b) or max(began_b) < min(began_a):
        notes.append(
            "one side ran before the other: the machine may have changed in between; alternate the runs"
        )
    return notes
