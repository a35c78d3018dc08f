"""What is put to the test by ``benchmarks.statistics``: this version's functions, or those of 0.2.

Both are asked the same. Modules are imported where they are used, for one of the two versions lacks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from benchmarks.simulation import Simulated, Times


class Subject(Protocol):
    """Answers about step times in seconds."""

    def tells_change(self, times: Times) -> bool: ...

    def word(self, times: Times) -> str | None: ...

    def period(self, times: Times) -> int: ...

    def centre(self, run: Simulated) -> float:
        """What its interval is meant to hold, from a very long run."""
        ...

    def holds(self, run: Simulated, centre: float) -> bool | None: ...

    def stops_at(self, times: Times, target: float) -> int: ...

    def compares(
        self, a: Sequence[Times], b: Sequence[Times], equal_means: Sequence[float]
    ) -> str: ...


class Now:
    """This version: one model of step times."""

    def _model(self, times: Times) -> Any:
        from lm_profiler.analysis.steps.step_model import fit

        return fit(times)

    def word(self, times: Times) -> str | None:
        from lm_profiler.analysis.steps.step_model import word_of

        return word_of(self._model(times))

    def tells_change(self, times: Times) -> bool:
        """Or leaves steps out as warm-up, which is told too."""
        from lm_profiler.analysis.steps.step_model import word_of

        model = self._model(times)
        return word_of(model) in ("slowing", "unsettled") or model.cut > 0

    def period(self, times: Times) -> int:
        pattern = self._model(times).pattern
        return 0 if pattern is None else int(pattern.period)

    def centre(self, run: Simulated) -> float:
        return float(run.level_s or np.nan)

    def holds(self, run: Simulated, centre: float) -> bool | None:
        known = self._model(run.times_s).level
        return None if known is None else bool(known.low <= centre <= known.high)

    def stops_at(self, times: Times, target: float) -> int:
        from lm_profiler.callbacks.instruments.profiling_options import StageOptions
        from lm_profiler.callbacks.stages import StoppingRule

        rule = StoppingRule(
            StageOptions(until_ci=target, max_steps=times.size, max_seconds=1e9),
            lambda more: more,
        )
        end = 0
        while not end or (
            end < times.size and not rule.is_enough(end, times[:end].tolist(), 1.0)
        ):
            end = min(rule.next_check, times.size)
        return end

    def compares(
        self, a: Sequence[Times], b: Sequence[Times], equal_means: Sequence[float]
    ) -> str:
        from lm_profiler.analysis.compare.ratio import (
            SAME_WITHIN,
            change_word,
            repeats_interval,
            single_interval,
        )
        from lm_profiler.analysis.compare.sides import mean_over_levels
        from lm_profiler.record.process_spread import ASSUMED_SPREAD, spread_of

        means_a = [mean_over_levels(self._model(run), run) for run in a]
        means_b = [mean_over_levels(self._model(run), run) for run in b]
        if len(a) == len(b) == 1:
            spread = spread_of(equal_means) or ASSUMED_SPREAD
            return change_word(
                single_interval(means_a[0], means_b[0], spread=spread), SAME_WITHIN
            )
        interval = repeats_interval(
            [mean.mean for mean in means_a], [mean.mean for mean in means_b]
        )
        return change_word(interval, SAME_WITHIN)


class Before:
    """Version 0.2: rank tests and medians; one run each is taken to differ by 1 %."""

    def __init__(self) -> None:
        from importlib import import_module

        self._steps = import_module("lm_profiler.analysis.steps.statistics")
        self._steadiness = import_module(
            "lm_profiler.analysis.steps.steadiness"
        ).steadiness
        self._ratio = import_module("lm_profiler.analysis.compare.ratio")

    def word(self, times: Times) -> str | None:
        said = self._steadiness(times)
        word = said.also or said.word
        return None if word is None else str(word)

    def tells_change(self, times: Times) -> bool:
        said = self._steadiness(times)
        return (said.also or said.word) in ("slowing", "unsettled") or said.cut > 0

    def period(self, times: Times) -> int:
        return 0

    def centre(self, run: Simulated) -> float:
        return float(np.median(run.times_s))

    def holds(self, run: Simulated, centre: float) -> bool | None:
        known = self._steps.median_interval(
            run.times_s[self._steadiness(run.times_s).cut :]
        )
        return None if known is None else bool(known[0] <= centre <= known[1])

    def stops_at(self, times: Times, target: float) -> int:
        looks = range(10, times.size + 1, 5)
        return next(
            (n for n in looks if self._steps.precise_enough(times[:n], target)),
            times.size,
        )

    def compares(
        self, a: Sequence[Times], b: Sequence[Times], equal_means: Sequence[float]
    ) -> str:
        return str(self._ratio.change(self._ratio.ratio_interval(a, b)))


@cache
def subject() -> Subject:
    """Whichever version is imported."""
    try:
        from lm_profiler.analysis.steps import step_model  # noqa: F401  its being there is the question
    except ImportError:
        return Before()
    return Now()
