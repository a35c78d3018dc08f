"""Whether a change leaves the numbers as they were, within a tolerance that is stated. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, stdev

from lm_profiler.analysis.remedies.remedy import OTHER_BATCH, WITHOUT_CLIPPING
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import NumericsFacts, RunRecord

LOSS_TOLERANCE = 0.01
"""Of the mean loss of the first steps. What runs of the first setting differ by under other seeds takes its place where
that is more: a loader with other workers draws other random numbers. What is wrong by a factor is beyond both."""

SEEDS = (20_231, 20_232, 20_233, 20_234)
"""Under which the first setting is run anew, where a loss is off by more than ``LOSS_TOLERANCE``."""

_OF_SEEDS = 3.93
"""Stds of five runs' mean losses by which a sixth lies from one of them in one case of twenty: Student's t."""

GRADIENT_TOLERANCE = 0.05
"""Of the gradients' distance from float32's. Mixed bfloat16 of a Transformer keeps within 2 %; a product that loses
half of its bits is beyond it."""

OWN_LOSS_TOLERANCE, OWN_NORM_TOLERANCE = 1e-5, 1e-4
"""Of each of the first steps' losses and gradient norms, with an option that is not known: float32 sums taken in
another order stay below them. Another activation, no dropout, or fewer bits do not, whose mean loss may well be within
``LOSS_TOLERANCE``: at its start every model of a vocabulary has the same."""

_THE_MODEL = {"parameters": "parameters", "trainable_parameters": "parameters that are trained", "bytes": "bytes"}


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


def loss_tolerance(same: Sequence[NumericsFacts | None]) -> float:
    """By what share the mean losses of the first steps of runs of one setting differ anyway; ``LOSS_TOLERANCE`` where
    that is less, or too few have told theirs.
    """
    known = [of.losses for of in same if of is not None and of.losses and None not in of.losses]
    means = [fmean(x for x in losses if x is not None) for losses in known]
    if len(means) < len(SEEDS) or not (middle := abs(fmean(means))):
        return LOSS_TOLERANCE
    return max(LOSS_TOLERANCE, _OF_SEEDS * stdev(means) / middle)


def judge(
    loss: float | None,
    gradients: float | None,
    may_change: str | None,
    other_step: tuple[str, int, int] | None = None,
    free_batch: bool = False,
    tolerance: float = LOSS_TOLERANCE,
) -> tuple[bool | None, str | None]:
    """Whether the distances are within their tolerance, None where one is unknown; and why not.

    Losses of other batches are no measure: where somebody has asked for them (``free_batch``), the gradients alone
    are. ``other_step`` is what a step has another number of: how many without the change, and with it. ``tolerance`` is
    that of the loss.
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
        told.insert(0, ("loss", loss, tolerance))
    for what, off, allowed in told:
        if off is not None and not off <= allowed:
            by = f"{off:.1%}" if off < inf else "more than can be told"
            return False, f"{what} off by {by}; {allowed * 100:.2g} % is tolerated"
    unknown = [what for what, off, _ in told if off is None]
    return (None, f"{' and '.join(unknown)} unknown") if unknown else (True, None)


def trains_the_same(a: RunRecord, b: RunRecord, same_batches: bool = True) -> tuple[bool | None, str | None]:
    """Whether b's training is a's but for the order of float32 sums, None where that is unknown; and why not.

    It is what an option must leave as it was of which nobody has said what it changes. Of other batches, where they are
    allowed, only the model can be compared.
    """
    why = next(_unlike(a, b), None)
    if why is not None:
        return False, f"{why}; --accept_numerics takes it"
    if a.model is None or b.model is None or a.numerics is None or b.numerics is None:
        return None, "what the option changes is unknown"
    if not same_batches:
        return True, None
    one, two = a.numerics, b.numerics
    for what, without, with_it, tolerance in (
        ("loss", one.losses, two.losses, OWN_LOSS_TOLERANCE),
        ("norm of the gradients", one.gradient_norms, two.gradient_norms, OWN_NORM_TOLERANCE),
    ):
        off = _furthest(without, with_it)
        if off is None:
            return None, f"{what} of the first steps unknown"
        if not off <= tolerance:
            by = f"{off * 100:.2g} %" if off < inf else "more than can be told"
            return False, (
                f"{what} of a step off by {by}: of an option that is not known {tolerance * 100:g} % is tolerated; "
                "--accept_numerics takes it"
            )
    return True, None


def _unlike(a: RunRecord, b: RunRecord) -> Iterator[str]:
    """What shows that another model is trained, or in another way."""
    clip, other = (Entry(Path(), run).option("trainer.gradient_clip_val") for run in (a, b))
    if clip != other:  # equal steps do not show it where none of them was clipped
        yield f"gradients are clipped at {other} instead of {clip}"
    if a.model is None or b.model is None:
        return
    if a.model.optimizers != b.model.optimizers:
        yield f"another optimizer: {', '.join(b.model.optimizers)}"
    for name, what in _THE_MODEL.items():
        without, with_it = getattr(a.model, name), getattr(b.model, name)
        if without != with_it:
            yield f"another model: {with_it:,} {what} instead of {without:,}"


def _furthest(a: list[float | None], b: list[float | None]) -> float | None:
    """The largest distance of b's from a's, as a share; None where they cannot be compared step by step."""
    if not a or len(a) != len(b) or None in a:
        return None
    return max(
        inf if y is None else 0.0 if x == y else abs(y - x) / abs(x) if x else inf for x, y in zip(a, b, strict=True)
    )
