"""The typical step of a run: which steps are odd, what the shares of the others are, and on what they agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.analysis.steps.statistics import FAR_OUT, beyond_fences, finite
from lm_profiler.record.quantities import PARTS, TIMED, TIMES
from lm_profiler.record.run import OddStep
from lm_profiler.record.steps import StepRow

AGREEMENT = 0.95
"""Of the resamples that must give an answer before it is more than this run's luck."""

_SMALLEST = 0.10  # of the median: less moves no share by anything to speak of
_RARE = 20
_RESAMPLES = 200


def odd_steps(step_s: ArrayLike) -> list[int]:
    """Indices of the steps far out by Tukey's fences (1977) and at least 10 % off the median, the farthest first.

    None below four steps.
    """
    x = finite(step_s)
    middle = float(np.median(x)) if x.size else 0.0
    if middle <= 0.0:
        return []
    off = np.abs(x - middle)
    odd = np.flatnonzero(beyond_fences(x, FAR_OUT) & (off > _SMALLEST * middle))
    return [int(i) for i in odd[np.argsort(-off[odd], kind="stable")]]


def resamples(count: int) -> Iterator[NDArray[np.intp]]:
    """Indices of ``count`` steps drawn with replacement, again and again, with a fixed seed (Efron 1979)."""
    rng = np.random.default_rng(0)
    return (rng.integers(count, size=count) for _ in range(_RESAMPLES))


def agree(answers: Sequence[object], with_: object) -> bool:
    """Whether `AGREEMENT` of ``answers``, and at least one, equal ``with_``."""
    return bool(answers) and sum(answer == with_ for answer in answers) >= AGREEMENT * len(answers)


def typical(steps: Sequence[StepRow]) -> list[StepRow]:
    """Those of ``steps`` that shares are of: all but the odd ones, while those are at most one, or one in twenty.

    More of them belong to the run: a loader that stalls at each eighth batch costs what it costs.
    """
    far = odd_steps([row.time("step") for row in steps])
    left_out = set(far if len(far) <= max(1, len(steps) // _RARE) else ())
    return [row for at, row in enumerate(steps) if at not in left_out]


def shares(steps: Sequence[StepRow]) -> dict[str, float]:
    """Of each part in the mean of ``steps``: unlike medians they add up to the step. Empty where it took no time."""
    whole = sum(row.time("step") for row in steps)
    return {part: sum(row.time(part) for row in steps) / whole for part in TIMES} if whole > 0.0 else {}


def near_median(steps: Sequence[StepRow]) -> list[StepRow]:
    """The middle half of ``steps`` by their step time: none far from the median one, which is among them."""
    ranked = sorted(steps, key=lambda row: row.time("step"))
    outer = (len(ranked) + 1) // 4
    return ranked[outer : len(ranked) - outer]


def odd(steps: Sequence[StepRow]) -> list[OddStep]:
    """Steps far from the others, the farthest first, each with the part in which it differs most."""
    far = odd_steps([row.time("step") for row in steps])
    medians = {part: median(row.time(part) for row in steps) for part in TIMED} if far else {}
    return [_odd(steps[i], medians) for i in far]


def _odd(row: StepRow, medians: Mapping[str, float]) -> OddStep:
    excess_s = {part: row.time(part) - medians[part] for part in PARTS}
    step_s, typical_s = row.time("step"), medians["step"]
    part = (max if step_s > typical_s else min)(excess_s, key=excess_s.__getitem__)
    return OddStep(step=row.step, step_s=step_s, ratio=step_s / typical_s, part=part, excess_s=excess_s[part])
