"""How long steps took, how they differ, and what went through them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import Place, figure
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

    tokens_per_s: float | None = figure(
        "tokens/s",
        "tokens/s",
        "tokens of a step / its time; of an evaluation, the slowest rank's",
        goes_by_step=True,
        place=Place.HEADLINE,
        run_tag="tokens_per_s",
        tag="throughput/tokens_per_s",
    )
    tokens_per_step: int | None = figure("tokens/step", "count", "tokens of a step on all ranks, the mean")
    samples_per_s: float | None = figure(
        "samples/s", "samples/s", "samples of a step / its time", goes_by_step=True, default=None
    )
    samples_per_step: int | None = figure(
        "samples/step", "count", "rows of a step's batches on all ranks, the mean", default=None
    )


class StepLevel(Part):
    """Measured steps ``first`` to ``last``, counted from 1, whose regular ones take ``seconds`` on average."""

    first: int = figure("from step", "count", "the first measured step of the level")
    last: int = figure("to step", "count", "the last measured step of the level")
    seconds: float = figure("level", "ms", "mean of its regular steps")


class StepPattern(Part):
    """Of ``every`` so many steps, those at the places ``slow`` (from 1, the first measured step's) differ.

    The one that differs most takes ``extra`` of the level longer; ``part`` is what of the step differs most.
    """

    every: int = figure("every so many steps", "count", "after how many steps the pattern repeats", "pattern_every")
    slow: list[int] = figure("slow step", "count", "its place among so many steps", "pattern_slow")
    extra: float = figure("slower by", "%", "by what share of the level the slowest steps of the pattern differ")
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
    also: Annotated[Literal["slowing", "unsettled"] | None, Newer] = None
    level_s: float | None = figure(
        "level",
        "ms",
        "mean of the regular steps: neither odd nor slow by a pattern",
        interval=("level_low_s", "level_high_s"),
        default=None,
    )
    level_low_s: float | None = None
    level_high_s: float | None = None
    known_to: float | None = figure("level known to", "%", "half the 95 % interval of the level, over it", default=None)
    pattern_s: float | None = figure("pattern", "ms", "what every so many-th step adds to the mean step", default=None)
    odd_s: float | None = figure("cost of odd steps", "ms", "what odd steps add to the mean step", default=None)
    pattern: StepPattern | None = None
    rise: float | None = figure("rise", "%", "of a trend: the last step's level over the first's, less 1", default=None)
    first: int | None = figure("first step told", "count", "the first measured step that figures are of", default=None)
    last: int | None = figure("last step told", "count", "the last measured step that figures are of", default=None)
    levels: list[StepLevel] = Field(default_factory=list)
    lag1: float | None = figure("lag-1", "number", "autocorrelation of a step's time with the next one's")
    cut: int = figure("steps left out", "count", "measured steps left out because they were not level yet")
    bias_of_mean: float | None = figure("bias of the mean", "%", "shift of the mean if the steps left out were counted")
    recompilations: int = figure("recompilations", "count", "of torch.compile, while measuring", default=0)
    drift: float | None = None
    evidence: str = ""

    @property
    def words(self) -> list[str]:
        """``word`` and ``also``, as far as there are any."""
        return [word for word in (self.word, self.also) if word is not None]
