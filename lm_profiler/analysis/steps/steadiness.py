"""What may be said of a run's steps: one word for their course, from the model of their times.

That no change of level was found in a few noisy steps is no steadiness: where the level is not known to 5 %, a run is
`noisy`, whatever else is known of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import numpy as np

from lm_profiler.analysis.steps.statistics import Series
from lm_profiler.analysis.steps.step_model import FEWEST_STEPS, SMALLEST_EFFECT, Pattern, StepModel
from lm_profiler.record.run import Steadiness, StepLevel, StepPattern

Word = Literal["steady", "slowing", "unsettled"]

KNOWN_TO = 0.05  # a level that may be off by a larger share than this is not known, and the run is `noisy`


def steadiness(model: StepModel, recompilations: int = 0, parts_s: Mapping[str, Series] = {}) -> Steadiness:
    """The course of a run's measured steps, one at least; ``recompilations`` were counted meanwhile.

    ``parts_s`` are the seconds of each part in the same steps, to say in which a pattern is.
    """
    level, pattern, word = model.level, model.pattern, word_of(model)
    known = None if level is None else level.known_to
    noisy = known is None or known > KNOWN_TO
    parts, kept = model.parts_of(model.seconds), float(model.seconds[model.cut :].mean())
    stretches = zip(pairwise(model.edges), model.levels, strict=True)
    return Steadiness(
        word="noisy" if noisy else word,
        also=word if noisy and word != "steady" else None,
        cut=model.cut,
        lag1=None if level is None else level.lag1,
        bias_of_mean=float(model.seconds.mean()) / kept - 1.0 if kept > 0.0 else None,
        recompilations=recompilations,
        known_to=known,
        first=model.first + 1,
        last=model.end,
        levels=[StepLevel(first=begin + 1, last=end, seconds=seconds) for (begin, end), seconds in stretches],
        rise=model.rise if np.any(model.shape) else None,
        pattern=None if pattern is None else _told(pattern, model, parts_s),
        level_s=parts.level,
        level_low_s=None if level is None else level.low,
        level_high_s=None if level is None else level.high,
        pattern_s=parts.pattern,
        odd_s=parts.odd,
    )


def _told(pattern: Pattern, model: StepModel, parts_s: Mapping[str, Series]) -> StepPattern:
    costs = {part: abs(model.parts_of(x).pattern) for part, x in parts_s.items()}
    part = max(costs, key=costs.__getitem__, default=None)
    return StepPattern(every=pattern.every, slow=[at + 1 for at in pattern.slow], extra=model.extra, part=part)


def word_of(model: StepModel) -> Word | None:
    """``slowing`` where a trend rises, or levels only rise; ``unsettled`` where they change otherwise, or where what
    dies away at the beginning takes more than half of the steps; ``steady`` else. None of fewer than ten steps.
    """
    if model.seconds.size < FEWEST_STEPS:
        return None
    if abs(model.rise) >= SMALLEST_EFFECT:
        return "slowing" if model.rise > 0.0 else "unsettled"
    levels = model.levels
    if min(levels) <= 0.0 or max(levels) / min(levels) - 1.0 < SMALLEST_EFFECT:
        return "steady" if model.settled else "unsettled"
    rises = levels[-1] / levels[0] - 1.0 >= SMALLEST_EFFECT
    falls = any(later / earlier < 1.0 - SMALLEST_EFFECT for earlier, later in pairwise(levels))
    return "slowing" if rises and not falls else "unsettled"
