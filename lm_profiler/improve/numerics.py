"""Whether a change leaves the numbers as they were, within a tolerance that is stated. Pure."""

from __future__ import annotations

from math import inf
from statistics import fmean

from lm_profiler.improve.changes import OTHER_BATCH, WITHOUT_CLIPPING
from lm_profiler.record.run import NumericsFacts

LOSS_TOLERANCE = 0.01
"""Of the mean loss of the first steps. Random numbers that are drawn in another order (dropout) stay below it; what is
wrong by a factor does not."""

GRADIENT_TOLERANCE = 0.05
"""Of the gradients' distance from float32's. Mixed bfloat16 of a Transformer keeps within 2 %; a product that loses
half of its bits is beyond it."""


def distances(a: NumericsFacts | None, b: NumericsFacts | None) -> tuple[float | None, float | None]:
    """How far b's mean loss is from a's, as a share, and b's gradients from float32's; None is unknown.

    The losses are of the steps that both have, over the same batches and seed. Infinite where b's are not finite.
    """
    if a is None or b is None:
        return None, None
    both = [(x, y) for x, y in zip(a.losses, b.losses, strict=False) if x is not None]
    if not both:
        return None, b.gradient_error
    without = fmean(x for x, _ in both)
    with_it = fmean(inf if y is None else y for _, y in both)
    return abs(with_it - without) / abs(without) if without else None, b.gradient_error


def judge(
    loss: float | None,
    gradients: float | None,
    may_change: str | None,
    other_step: tuple[str, int, int] | None = None,
    free_batch: bool = False,
) -> tuple[bool | None, str | None]:
    """Whether the distances are within their tolerance, None where one is unknown; and why not.

    Losses of other batches are no measure: where somebody has asked for them (``free_batch``), the gradients alone
    are. ``other_step`` is what a step has another number of: how many without the change, and with it.
    """
    if other_step is not None:
        what, without, with_it = other_step
        said = f"a step has {with_it} {what} instead of {without}"
        if not free_batch:
            return False, f"{said}; --global_batch free allows it"
        within, why = judge(loss, gradients, OTHER_BATCH)
        return within, f"{said}; {why}" if why else said
    if may_change == WITHOUT_CLIPPING:
        return False, may_change  # equal losses of a few steps say nothing of the step that needs it
    told = [("gradients", gradients, GRADIENT_TOLERANCE)]
    if may_change != OTHER_BATCH:
        told.insert(0, ("loss", loss, LOSS_TOLERANCE))
    for what, off, tolerance in told:
        if off is not None and not off <= tolerance:
            by = f"{off:.1%}" if off < inf else "more than can be told"
            return False, f"{what} off by {by}; {tolerance:.0%} is tolerated"
    unknown = [what for what, off, _ in told if off is None]
    return (None, f"{' and '.join(unknown)} unknown") if unknown else (True, None)
