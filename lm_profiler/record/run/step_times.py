"""How long steps took, how they differ, and what went through them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run.part import Newer, Part


class TimeSummary(Part):
    """Seconds a step over the measured steps. None where there are too few steps to say.

    ``mean_low`` and ``mean_high`` are the 95 % interval of the mean, which allows for steps that resemble their
    neighbours; records of version 0.2 have none.
    """

    n: int
    mean: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    std: float | None = None
    cv: float | None = None
    median: float | None = None
    p5: float | None = None
    p95: float | None = None
    min: float | None = None
    max: float | None = None


class Throughput(Part):
    """Over all ranks, at the mean step. None where the module does not say how many tokens a batch has.

    ``samples`` are rows of batches, of the mean step; rounded.
    """

    tokens_per_step: int | None
    tokens_per_s: float | None
    samples_per_step: int | None = None
    samples_per_s: float | None = None


class StepLevel(Part):
    """Measured steps ``first`` to ``last``, counted from 1, whose regular ones take ``seconds`` on average."""

    first: int
    last: int
    seconds: float


class StepPattern(Part):
    """Of ``every`` so many steps, those at the places ``slow`` (from 1, the first measured step's) differ.

    The one that differs most takes ``extra`` of the level longer; ``part`` is what of the step differs most.
    """

    every: int
    slow: list[int]
    extra: float
    part: str | None = None


class Steadiness(Part):
    """The course of the measured steps, counted from 1, and which of them the figures of the run are of.

    ``word`` is ``noisy`` (the level is not known to 5 %), ``steady``, ``slowing`` (later steps slower), ``unsettled``
    (another change of level), or None where there are too few steps to tell; ``also`` is ``slowing`` or ``unsettled``
    of a noisy run that certainly is. Figures are of steps ``first`` to ``last``: of the longest level; of a trend, of
    all but the ``cut`` steps of warm-up, which would have shifted the mean by the share ``bias_of_mean``. ``rise`` is
    by what share a trend's last step lies above its first.

    Their mean is ``level_s``, that of the regular steps, plus ``pattern_s``, what a pattern adds, plus ``odd_s``, what
    odd steps add. The 95 % interval of the level allows for ``lag1``, the steps' autocorrelation; ``known_to`` is half
    of it, a share of the level. ``recompilations`` of torch.compile happened meanwhile. ``drift`` and ``evidence`` are
    those of version 0.2.
    """

    word: Annotated[Literal["noisy", "steady", "slowing", "unsettled"] | None, Newer]
    cut: int
    drift: float | None = None
    lag1: float | None
    bias_of_mean: float | None
    evidence: str = ""
    recompilations: int = 0
    also: Annotated[Literal["slowing", "unsettled"] | None, Newer] = None
    known_to: float | None = None
    first: int | None = None
    last: int | None = None
    levels: list[StepLevel] = Field(default_factory=list)
    rise: float | None = None
    pattern: StepPattern | None = None
    level_s: float | None = None
    level_low_s: float | None = None
    level_high_s: float | None = None
    pattern_s: float | None = None
    odd_s: float | None = None

    @property
    def words(self) -> list[str]:
        """``word`` and ``also``, as far as there are any."""
        return [word for word in (self.word, self.also) if word is not None]
