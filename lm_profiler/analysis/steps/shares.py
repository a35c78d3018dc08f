"""The typical step of a run: what its parts' shares are of, and which steps are far from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lm_profiler.analysis.steps.typical import odd_steps, typical_steps
from lm_profiler.record.quantities import PARTS, TIMED, TIMES
from lm_profiler.record.run import OddStep
from lm_profiler.record.steps import StepRow


def typical(steps: Sequence[StepRow]) -> list[StepRow]:
    """Those of ``steps`` that shares are of: all but odd ones that are too few to belong to the run."""
    return [steps[i] for i in typical_steps([row.time("step") for row in steps])]


def shares(steps: Sequence[StepRow]) -> dict[str, float]:
    """Of each part in the mean of ``steps``: unlike medians they add up to the step. Empty where it took no time."""
    whole = sum(row.time("step") for row in steps)
    return {part: sum(row.time(part) for row in steps) / whole for part in TIMES} if whole > 0.0 else {}


def odd(steps: Sequence[StepRow]) -> list[OddStep]:
    """Steps far from the others, the farthest first, each with the part in which it differs most."""
    far = odd_steps([row.time("step") for row in steps])
    medians = {part: median(row.time(part) for row in steps) for part in TIMED} if far else {}
    return [_odd(steps[i], medians) for i in far]


def _odd(row: StepRow, medians: Mapping[str, float]) -> OddStep:
    excess_s = {part: row.time(part) - medians[part] for part in PARTS}
    slower = row.time("step") > medians["step"]
    part = (max if slower else min)(excess_s, key=excess_s.__getitem__)
    return OddStep(
        step=row.step,
        step_s=row.time("step"),
        ratio=row.time("step") / medians["step"],
        part=part,
        excess_s=excess_s[part],
    )
