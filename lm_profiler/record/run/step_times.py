"""How long steps took, how they differ, and what went through them."""

from __future__ import annotations

from typing import Annotated, Literal

from lm_profiler.record.run.part import Newer, Part


class TimeSummary(Part):
    """Seconds a step over the measured steps. None where there are too few steps to say.

    ``ci_low`` and ``ci_high`` are the 95 % order-statistic interval of the median; ``outliers`` counts values outside
    Tukey's fences, which stay in.
    """

    n: int
    mean: float | None = None
    std: float | None = None
    cv: float | None = None
    median: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    p5: float | None = None
    p95: float | None = None
    min: float | None = None
    max: float | None = None
    outliers: int = 0


class Throughput(Part):
    """Over all ranks, at the median step. None where the module does not say how many tokens a batch has.

    ``samples`` are rows of a batch, as the first one had them.
    """

    tokens_per_step: int | None
    tokens_per_s: float | None
    samples_per_step: int | None = None
    samples_per_s: float | None = None


class Steadiness(Part):
    """Whether the measured steps were level, and from which one on: earlier ones are in no summary.

    ``word`` is ``noisy`` (the median is not known to 5 %), ``steady``, ``slowing`` (later steps slower), ``unsettled``
    (never level), or None where there are too few steps to tell; ``also`` is ``slowing`` or ``unsettled`` of a noisy
    run that certainly is. ``known_to`` is how far the median may be off, a share of it: half its 95 % interval, widened
    for autocorrelation; None where there is no interval. ``cut`` steps were left out; ``bias_of_mean`` is how far off,
    relative to the mean, they would have made it. ``drift`` is the second half's median over the first's, less 1;
    ``lag1`` the autocorrelation. ``recompilations`` of torch.compile happened while measuring.
    """

    word: Annotated[Literal["noisy", "steady", "slowing", "unsettled"] | None, Newer]
    cut: int
    drift: float | None
    lag1: float | None
    bias_of_mean: float | None
    evidence: str
    recompilations: int = 0
    also: Annotated[Literal["slowing", "unsettled"] | None, Newer] = None
    known_to: float | None = None

    @property
    def words(self) -> list[str]:
        """``word`` and ``also``, as far as there are any."""
        return [word for word in (self.word, self.also) if word is not None]
