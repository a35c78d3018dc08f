"""Slack and virtual speed-ups of a pipeline, from steps in which one place at a time was delayed.

A pipeline's mean step is the longest of its cycles: of the loader's workers, of the host, of the device (max-plus
algebra: Baccelli et al., Synchronization and Linearity, 1992). A delay d in one place lengthens the cycles through it:
the step becomes base + max(0, d - slack). To delay all others by d and subtract d shows the step with a place that is d
faster (Curtsinger & Berger, Coz, SOSP 2015).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.step_model import FINEST_TARGET
from lm_profiler.record.run import PlaceName, PlaceSlack, Saving, Slack

LEVELS = (0.1, 0.25, 0.6)  # delays, as shares of the median step

_SMALL = 2  # the first so many levels tell the slope

_UNDELAYED = 2  # blocks without a delay in each round: every cost is against them

# each delay is held at least, and at most, so often: the difference between two blocks of one delay is the noise
_ROUNDS = (2, 4)

# steps of a block that count, at least; with so many a further round is worth more than longer blocks, whose first
# steps are lost to settling
_KEPT, _ENOUGH = 4, 16

_RESAMPLES = 2000
_GRID = 241
_TAIL = 2.5


HOST_PLACES = ("data", "forward", "backward", "optimizer")  # the phases in which the host can be delayed


@dataclass(frozen=True)
class DelayBlock:
    """Steps of the stage, counted from 0, from ``first`` to before ``end``, with one delay held in ``place``.

    ``level`` is the delay as a share of the median step; those before ``kept`` let the pipeline settle.
    """

    round: int
    place: str | None
    level: float
    first: int
    kept: int
    end: int


@dataclass(frozen=True)
class Experiment:
    """The blocks that were held, and of each how long a step was really delayed, in seconds."""

    blocks: Sequence[DelayBlock]
    delays_s: Sequence[float]
    workers: int


@dataclass(frozen=True)
class Held:
    """What a block measured: ``delay_s`` a step that was really taken, and the mean step, both over its kept steps."""

    round: int
    place: str | None
    level: float
    delay_s: float
    step_s: float


def _cells(places: Sequence[str]) -> list[tuple[str | None, float]]:
    return [(None, 0.0)] * _UNDELAYED + [(place, level) for place in places for level in LEVELS]


def _kept_at_least(workers: int) -> int:
    """A multiple of the workers, which deliver in turns."""
    unit = max(workers, 1)
    return unit * math.ceil(_KEPT / unit)


def steps_needed(places: Sequence[str], settle: int, workers: int) -> int:
    """The fewest steps in which ``plan`` can do it."""
    return _ROUNDS[0] * len(_cells(places)) * (settle + _kept_at_least(workers))


def plan(places: Sequence[str], steps: int, settle: int, workers: int, seed: int = 0) -> list[DelayBlock]:
    """Every delay of every place in each of some rounds, shuffled within it, so that no drift favours one of them.

    Args:
        places: one or more.
        steps: at most; ``steps_needed`` or more.
        settle: of each block, which do not count.
        workers: of the loader.
        seed: of the order.
    """
    cells = _cells(places)
    least, most = _ROUNDS
    rounds = max(least, min(most, steps // (len(cells) * (settle + _ENOUGH))))
    unit = max(workers, 1)
    length = settle + (steps // (rounds * len(cells)) - settle) // unit * unit
    order, blocks = random.Random(seed), list[DelayBlock]()
    for number in range(rounds):
        for place, level in order.sample(cells, len(cells)):
            first = len(blocks) * length
            blocks.append(DelayBlock(number, place, level, first, first + settle, first + length))
    return blocks


def held_in(blocks: Sequence[DelayBlock], delays_s: Sequence[float], step_s: Sequence[float]) -> list[Held]:
    """Return what the blocks measured whose steps all ended: ``step_s`` are all of the stage, ``delays_s`` a block's
    each."""
    return [
        Held(block.round, block.place, block.level, delay_s, float(np.mean(step_s[block.kept : block.end])))
        for block, delay_s in zip(blocks, delays_s, strict=True)
        if block.end <= len(step_s)
    ]


def slack(held: Sequence[Held], workers: int, own_s: Mapping[str, float] | None = None) -> Slack | None:
    """Return what the blocks say, None of less than two whole rounds; a place in which no delay was ever taken is left
    out.

    ``own_s`` is what each place on the host takes of a step, more than which it cannot be faster; where it is unknown,
    nothing is said of a faster one.

    Costs are differences of mean steps, with the rounds' own means taken out. Intervals are percentiles of a bootstrap
    of the residuals (Efron & Tibshirani 1993, section 9.4), which are widened for the means that were fitted.
    """
    counts = Counter(block.round for block in held)
    whole = [block for block in held if counts[block.round] == max(counts.values(), default=0)]
    rounds = len({block.round for block in whole})
    if rounds < _ROUNDS[0]:
        return None
    cells = list(dict.fromkeys((block.place, block.level) for block in sorted(whole, key=lambda b: b.level)))
    steps = _MeanSteps(whole, cells, rounds)
    delays = {place: steps.delays(place) for place in dict.fromkeys(b.place for b in held) if place is not None}
    delays = {place: delays[place] for place in get_args(PlaceName) if place in delays and delays[place].min() > 0.0}
    costs = {place: steps.costs(place) for place in delays}
    unsure_s = FINEST_TARGET * float(steps.means[0, 0])
    return Slack(
        step_s=float(steps.means[0, 0]),
        blocks=len(whole),
        workers=workers,
        places=[_place(place, delays[place], costs[place], unsure_s) for place in costs],
        savings=list(_savings(delays, costs, unsure_s, own_s or {})) if "loader" in costs else [],
    )


class _MeanSteps:
    """Mean steps of each cell: in the first row as measured, below it as resampled."""

    def __init__(self, held: Sequence[Held], cells: Sequence[tuple[str | None, float]], rounds: int) -> None:
        self._held, self._cells = held, cells
        of_cell = np.array([cells.index((block.place, block.level)) for block in held])
        of_round = np.array([block.round for block in held])
        step_s = np.array([block.step_s for block in held])
        for number in np.unique(of_round):
            step_s[of_round == number] += step_s.mean() - step_s[of_round == number].mean()
        averaging = np.array([(of_cell == cell) / np.count_nonzero(of_cell == cell) for cell in range(len(cells))])
        means = averaging @ step_s
        freedom = len(held) - len(cells) - (rounds - 1)
        residuals = (step_s - means[of_cell]) * math.sqrt(len(held) / freedom)
        drawn = np.random.default_rng(0).choice(residuals, (_RESAMPLES, len(held)))
        self.means: NDArray[np.float64] = np.vstack([means, means + drawn @ averaging.T])

    def delays(self, place: str) -> NDArray[np.float64]:
        return np.array(
            [np.mean([b.delay_s for b in self._held if (b.place, b.level) == (place, level)]) for level in LEVELS]
        )

    def costs(self, place: str) -> NDArray[np.float64]:
        """Return the cost of each level: its mean step less the steps without a delay."""
        columns = [self._cells.index((place, level)) for level in LEVELS]
        return self.means[:, columns] - self.means[:, [self._cells.index((None, 0.0))]]


def _place(place: str, delays: NDArray[np.float64], costs: NDArray[np.float64], unsure_s: float) -> PlaceSlack:
    small = delays[:_SMALL]
    slope = _with_interval(costs[:, :_SMALL] @ small / (small @ small), 0.0).tolist()
    # The hinge: of all slacks on a grid the one whose costs are nearest.
    slacks = np.linspace(0.0, delays[-1], _GRID)
    expected = np.maximum(0.0, delays - slacks[:, None])
    off = ((costs[:, None, :] - expected) ** 2).sum(axis=2)
    known = _with_interval(slacks[off.argmin(axis=1)], unsure_s).clip(0.0, delays[-1]).tolist()
    return PlaceSlack(
        place=place,  # type: ignore[arg-type]  # pydantic keeps to the names
        **dict(zip(("slope", "slope_low", "slope_high"), slope, strict=True)),
        **dict(zip(("slack_s", "slack_low_s", "slack_high_s"), known, strict=True)),
        largest_s=float(delays[-1]),
    )


def _savings(
    delays: dict[str, NDArray[np.float64]],
    costs: dict[str, NDArray[np.float64]],
    unsure_s: float,
    own_s: Mapping[str, float],
) -> Iterator[Saving]:
    """Coz: all others were delayed, and the delay is subtracted.

    Of the host's places each delays the one thread: their mean is the host's. Host and device are delayed one at a
    time, and the dearer one counts: in a pipeline the longest cycle does, and where they take turns both cost the same.

    Coz stops the other threads only. So without a device, a place on the host saves what all of ``compute`` does, as
    far as it takes that long; with one, host and device may take turns or not, which single delays do not tell apart.
    """
    host = [place for place in costs if place not in ("loader", "device")]
    others = [(np.mean([delays[p] for p in host], axis=0), np.mean([costs[p] for p in host], axis=0))]
    if "device" in costs:
        others.append((delays["device"], costs["device"]))
    compute_s = np.minimum.reduce([delay - cost for delay, cost in others])
    faster_s = np.mean([delay for delay, _ in others], axis=0)
    yield from _at_levels("loader", faster_s, compute_s, unsure_s)
    by_loader, saved_s = delays["loader"], delays["loader"] - costs["loader"]
    yield from _at_levels("compute", by_loader, saved_s, unsure_s)
    if "device" in costs:
        return
    levels = np.concatenate([[0.0], by_loader])
    for place in (place for place in host if own_s.get(place)):
        faster_s = np.unique(np.minimum(by_loader, own_s[place]))
        # Between two levels on a straight line.
        weights = np.array([np.interp(faster_s, levels, unit) for unit in np.eye(len(levels))[1:]])
        yield from _at_levels(place, faster_s, saved_s @ weights, unsure_s)


def _at_levels(
    place: str, faster_s: NDArray[np.float64], saved_s: NDArray[np.float64], unsure_s: float
) -> Iterator[Saving]:
    for level, faster in enumerate(faster_s.tolist()):
        saves, low, high = (
            _with_interval(saved_s[:, level], unsure_s).clip(0.0, faster).tolist()
        )  # never more than that
        yield Saving(place=place, faster_s=faster, saves_s=saves, low_s=low, high_s=high)  # type: ignore[arg-type]


def _with_interval(values: NDArray[np.float64], unsure: float) -> NDArray[np.float64]:
    """Return the first value, and the interval of the others, wider by what one process cannot promise."""
    low, high = np.percentile(values[1:], [_TAIL, 100 - _TAIL])
    return np.array([values[0], low - unsure, high + unsure])
