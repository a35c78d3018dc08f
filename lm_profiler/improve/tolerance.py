"""Judge whether a change keeps losses and gradients within a stated tolerance. This module is pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, stdev

from lm_profiler.analysis.remedies.remedy import OTHER_BATCH, WITHOUT_CLIPPING
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import NumericsFacts, RunRecord

# The tolerated share of the mean loss of the first steps. The spread of the first setting's losses between seeds takes
# its place where it is larger, because another number of workers draws other random numbers. Real errors exceed both.
LOSS_TOLERANCE = 0.01

# the seeds of further runs of the first setting, made where a loss is off by more than ``LOSS_TOLERANCE``
SEEDS = (20_231, 20_232, 20_233, 20_234)

# Standard deviations of five runs' mean losses. A sixth run differs from one of them by more in one case of twenty:
# Student's t for 4 degrees of freedom, 2.776, times the square root of 2 for the difference of two runs.
_SEED_STDS = 3.93

# The tolerated distance of the gradients from those in float32, as a share. Mixed bfloat16 of a Transformer stays
# within 2 %; a matmul that loses half of its bits exceeds it.
GRADIENT_TOLERANCE = 0.05

# The tolerated shares of each first step's loss and gradient norm, for an option whose effect is unknown. float32 sums
# in another order stay below them; another activation, no dropout or fewer bits do not. The mean loss alone cannot tell
# these apart: at the start, all models with the same vocabulary have about the same loss.
OWN_LOSS_TOLERANCE, OWN_NORM_TOLERANCE = 1e-5, 1e-4

_THE_MODEL = {"parameters": "parameters", "trainable_parameters": "parameters that are trained", "bytes": "bytes"}


def distances(a: NumericsFacts | None, b: NumericsFacts | None) -> tuple[float | None, float | None]:
    """Return the distance of b's mean loss from a's, as a share, and of b's gradients from float32's; None is unknown.

    The mean loss is over the steps that both runs have, with the same batches and seed. It may be infinite.
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
    """Return by what share the mean losses of one setting differ between seeds, at least ``LOSS_TOLERANCE``.

    With fewer than ``len(SEEDS)`` known losses it is ``LOSS_TOLERANCE``.
    """
    known = [of.losses for of in same if of is not None and of.losses and None not in of.losses]
    means = [fmean(x for x in losses if x is not None) for losses in known]
    if len(means) < len(SEEDS) or not (middle := abs(fmean(means))):
        return LOSS_TOLERANCE
    return max(LOSS_TOLERANCE, _SEED_STDS * stdev(means) / middle)


def judge(
    loss: float | None,
    gradients: float | None,
    may_change: str | None,
    other_step: tuple[str, int, int] | None = None,
    free_batch: bool = False,
    tolerance: float = LOSS_TOLERANCE,
) -> tuple[bool | None, str | None]:
    """Return whether the distances are within their tolerances, None where one is unknown; and why they are not.

    Args:
        loss: The distance of the mean loss, as a share.
        gradients: The distance of the gradients from float32's.
        may_change: What the change may affect.
        other_step: The unit in which the steps differ in size, with the counts without and with the change.
        free_batch: Whether that is allowed. Losses of other batches cannot be compared: then gradients alone count.
        tolerance: The tolerance of the loss.
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
    """Return whether b trains as a does except for the order of float32 sums, None where that is unknown; and why not.

    An option whose effect is unknown has to pass this test. With other batches, only the models can be compared.
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
    """Yield what shows that b trains another model, or in another way."""
    clip, other = (Entry(Path(), run).option("trainer.gradient_clip_val") for run in (a, b))
    if clip != other:  # losses do not show it where no step was clipped
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
    """Return the largest distance of a value of b from that of a, as a share; None where steps cannot be paired."""
    if not a or len(a) != len(b) or None in a:
        return None
    return max(
        inf if y is None else 0.0 if x == y else abs(y - x) / abs(x) if x else inf for x, y in zip(a, b, strict=True)
    )
