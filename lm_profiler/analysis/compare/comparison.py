"""Two sets of runs side by side, as data: is B faster than A, in which phases, and does it need more memory?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lm_profiler.analysis.compare.differences import Difference, in_config, in_environment, unlike
from lm_profiler.analysis.compare.ratio import (
    CONFIDENCE,
    Change,
    RatioInterval,
    change,
    minimum_detectable_effect,
    repeats_interval,
    single_interval,
)
from lm_profiler.analysis.compare.sides import Side, read_side, typical, without_waiting
from lm_profiler.analysis.steps.statistics import Interval
from lm_profiler.record.entry import Entry
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread
from lm_profiler.record.quantities import MEMORY, PARTS, QUANTITIES
from lm_profiler.usage_error import UsageError

# how far one run of a program may lie from the next in resident memory; a dozen equal runs lay within 3 %
_RESIDENT_SCATTER = 0.05

PartVerdict = Change | Literal["ONLY A", "ONLY B"]
MemoryVerdict = Literal["LESS", "MORE", "SAME", "UNCLEAR"]


@dataclass(frozen=True)
class PartChange:
    """A part of the step on either side, in seconds: the mean step, of repeats their means' geometric mean."""

    part: str
    a_s: float
    b_s: float
    difference_s: float
    of_step: float | None  # the difference as a share of A's step
    interval: RatioInterval | None  # B over A; None where nothing can be said
    verdict: PartVerdict


@dataclass(frozen=True)
class MemoryChange:
    """A peak on either side, in bytes; of repeats the geometric mean."""

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
class Compilation:
    """One side is compiled, the other is not: what that costs, and when it is won back."""

    compiled: Literal["A", "B"]  # the side that is
    # by how much longer its steps before the steady ones took than the other side's; below zero nothing of it was seen
    cost_s: float
    saved_s: float  # what each steady step saves
    # after how many steps the cost is won back, with the ends of the step's interval; None where it is not known that a
    # step saves anything
    paid_back_steps: tuple[float, float, float] | None


@dataclass(frozen=True)
class Comparison:
    """The findings of ``compare``.

    The step's interval holds with ``CONFIDENCE``; those of the other parts hold with it all together (Bonferroni).

    Attributes:
        a: The folders of A's runs.
        unlike: Why the sides did not do the same work; empty where they may be compared.
        config, environment: What else differs; None: unknown.
        phases: Those that occur, by how much they change the step, the largest first. Of several ranks without their
            waiting, where all runs know it.
        ranks: Of several ranks own work and waiting of the mean one, by their names in the registry. Empty where a run
            does not know them.
        detectable: The smallest change of the step, as a share, that runs like these can detect.
        compilation: Where one side is compiled and the other is not.
        notes: What a reader must know before using the figures.
    """

    a: list[str]
    b: list[str]
    unlike: list[Difference]
    config: list[Difference]
    environment: list[Difference] | None
    step: PartChange
    forward_backward: PartChange
    phases: list[PartChange]
    ranks: list[PartChange]
    tokens: RateChange | None
    memory: list[MemoryChange]
    detectable: float | None
    compilation: Compilation | None
    notes: list[str]


def compare(a: Sequence[Entry], b: Sequence[Entry], spread: ProcessSpread = ASSUMED_SPREAD) -> Comparison:
    """B against A; several runs on a side are repeats of each other.

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
        compilation=_compilation(side_a, side_b, step),
        notes=[
            *side_a.notes,
            *side_b.notes,
            *_scatter(len(side_a.runs), len(side_b.runs), spread),
            *_order(side_a, side_b),
        ],
    )


def _interval(a: list[Interval], b: list[Interval], confidence: float, spread: ProcessSpread) -> RatioInterval | None:
    if len(a) == len(b) == 1:
        return single_interval(a[0], b[0], confidence, spread)
    return repeats_interval([own.mean for own in a], [own.mean for own in b], confidence)


def _part_change(part: str, a: Side, b: Side, confidence: float, spread: ProcessSpread) -> PartChange:
    a_s, b_s, step_s = a.typical_s(part), b.typical_s(part), a.typical_s("step")
    interval = _interval(a.means(part), b.means(part), confidence, spread)
    verdict: PartVerdict = change(interval)
    if a.occurs(part) != b.occurs(part):
        verdict = "ONLY A" if a.occurs(part) else "ONLY B"
    return PartChange(part, a_s, b_s, b_s - a_s, (b_s - a_s) / step_s if step_s > 0 else None, interval, verdict)


def _ranks(a: Side, b: Side) -> list[PartChange]:
    """Means of a run's steps: how they scatter only repeats can tell."""
    changes = []
    for name in ("own_work_s", "waiting_s"):
        seconds_a, seconds_b = (side.known(QUANTITIES[name]) for side in (a, b))
        if seconds_a is not None and seconds_b is not None:
            a_s, b_s, step_s = typical(seconds_a), typical(seconds_b), a.typical_s("step")
            interval = repeats_interval(seconds_a, seconds_b, CONFIDENCE)
            of_step = (b_s - a_s) / step_s if step_s > 0 else None
            changes.append(PartChange(name, a_s, b_s, b_s - a_s, of_step, interval, change(interval)))
    return changes


def _compilation(a: Side, b: Side, step: PartChange) -> Compilation | None:
    if {a.compiled(), b.compiled()} != {True, False}:
        return None
    of_b = bool(b.compiled())
    sign = 1.0 if of_b else -1.0
    cost_s, saved_s = sign * (b.warmed_up_s() - a.warmed_up_s()), -sign * step.difference_s
    steps = None
    if step.verdict == ("FASTER" if of_b else "SLOWER") and step.interval is not None and cost_s > 0.0:
        # Of the eager step, the interval's ends save as much.
        saved = [-sign * step.a_s * (ratio - 1.0) for ratio in (step.interval.low, step.interval.high)]
        steps = (cost_s / saved_s, cost_s / max(saved), cost_s / min(saved))
    return Compilation("B" if of_b else "A", cost_s, saved_s, steps)


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
    """Each peak that every run knows."""
    changes = []
    for reading, quantity in MEMORY.items():
        peaks_a, peaks_b = a.known(quantity), b.known(quantity)
        if peaks_a is not None and peaks_b is not None:
            interval = _peaks_interval(reading, peaks_a, peaks_b)
            word = _MEMORY_WORDS[change(interval)]
            changes.append(MemoryChange(reading, typical(peaks_a), typical(peaks_b), interval, word))
    return changes


def _peaks_interval(reading: str, a: Sequence[int], b: Sequence[int]) -> RatioInterval | None:
    """Return the interval of B's peak over A's.

    One run against one is enough: the allocator does the same in each run of a program, the system only nearly.
    """
    if max(len(a), len(b)) > 1:
        return repeats_interval(a, b, CONFIDENCE)
    if not a[0] or not b[0]:
        return None
    ratio, scatter = b[0] / a[0], _RESIDENT_SCATTER if reading == "resident_peak" else 0.0
    return RatioInterval(ratio, ratio * (1.0 - scatter), ratio * (1.0 + scatter), CONFIDENCE)


def _scatter(a: int, b: int, spread: ProcessSpread) -> list[str]:
    """Return what so many runs a side cannot say."""
    if a == b == 1:
        known = "were seen to" if spread.learned else "are taken to"
        remedy = "" if spread.learned else "; lm_profiler selftest shows by how much here"
        by = f"{spread.std:.1%} (std): three runs a side would do{remedy}"
        return [f"one run against one: equal processes {known} differ by {by}"]
    if single := "A" if a == 1 else "B" if b == 1 else "":
        return [f"{single} is a single run: taken to scatter as the other side's do"]
    if min(a, b) == 2:
        return ["two runs say little about how runs scatter: with three a side intervals are several times narrower"]
    return []


def _order(a: Side, b: Side) -> list[str]:
    """A machine changes with the hour; of one run against one, that is said already."""
    if len(a.runs) == len(b.runs) == 1:
        return []
    began_a, began_b = ([run.record.started for run in side.runs] for side in (a, b))
    for first, then, early, late in (("A", "B", began_a, began_b), ("B", "A", began_b, began_a)):
        if max(early) < min(late):
            return [f"all of {first} ran before {then}: the machine may have changed in between; alternate the runs"]
    return []
