"""The changes from A to B in pairs of runs that alternated, with intervals that are corrected for repeated looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lm_profiler.analysis.compare.comparison import PartChange, SidePair
from lm_profiler.analysis.compare.ratio import CONFIDENCE, change_word
from lm_profiler.analysis.compare.sides import Side, read_side
from lm_profiler.analysis.steps.statistics import Interval
from lm_profiler.improve.decision import pooled_spread, sequential_interval
from lm_profiler.record.entry import Entry
from lm_profiler.record.process_spread import ProcessSpread


def paired_changes(
    a: Sequence[Entry],
    b: Sequence[Entry],
    error: float,
    machine_spread: ProcessSpread,
    looks: tuple[int, ...],
    same_within: float,
) -> list[PartChange]:
    """Return the changes from A to B that decide which side is faster.

    On an idle machine the step decides. On a busy one, figures decide that waiting for a CPU does not lengthen, as in
    ``compare``. If these are unknown, the step decides: A and B alternated, so other programs slowed both equally.

    Intervals are corrected for repeated checks: the probability that any of them misses the true value at any of the
    ``looks`` (numbers of pairs) is at most ``error``.
    """
    side_a = read_side("A", a)
    side_b = read_side("B", b)
    sides = SidePair(side_a, side_b, machine_spread, same_within)
    changes = []
    if sides.is_busy:
        changes = sides.work_changes(CONFIDENCE)
    if not changes:
        changes = [sides.part_change("step", CONFIDENCE)]
    error_per_change = error / len(changes)
    return [
        _with_paired_interval(row, sides, error_per_change, machine_spread, looks)
        for row in changes
    ]


def _with_paired_interval(
    row: PartChange,
    sides: SidePair,
    error: float,
    machine_spread: ProcessSpread,
    looks: tuple[int, ...],
) -> PartChange:
    """Return ``row`` with the interval of the ratios of pairs, instead of one that ignores which runs were a pair."""
    means_a = _mean_seconds(sides.a, row.part)
    means_b = _mean_seconds(sides.b, row.part)
    ratios = [b_s / a_s for a_s, b_s in zip(means_a, means_b, strict=True)]
    spread = pooled_spread([means_a, means_b], machine_spread)
    interval = sequential_interval(ratios, error, spread, looks)
    return replace(
        row, interval=interval, verdict=change_word(interval, sides.same_within)
    )


def _mean_seconds(side: Side, part: str) -> list[float]:
    intervals: list[Interval] = side.figures(part) or []
    return [interval.mean for interval in intervals]
