"""Judge whether a change keeps losses and gradients within a stated tolerance. This module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.analysis.remedies.remedy import OTHER_BATCH, UNKNOWN
from lm_profiler.analysis.steps.statistics import student
from lm_profiler.improve.decision import Checked
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import RunRecord

# The tolerated share of the mean loss of the first steps, and the largest share that chance may explain.
LOSS_TOLERANCE, _MOST_BY_CHANCE = 0.01, 0.1

# The tolerated distance of the gradients from those in float32, as a share. Mixed bfloat16 of a Transformer stays
# within 2 %; a matmul that loses half of its bits exceeds it.
GRADIENT_TOLERANCE = 0.05

# The tolerated shares of each first step's loss and gradient norm, for an option whose effect is unknown. float32 sums
# in another order stay below them; another activation, no dropout or fewer bits do not. The mean loss alone cannot tell
# these apart: at the start, all models with the same vocabulary have about the same loss.
OWN_LOSS_TOLERANCE, OWN_NORM_TOLERANCE = 1e-5, 1e-4

_COUNTED = ("samples", "tokens")


def checked_numbers(
    a: RunRecord, b: RunRecord, may_change: str | None, free_batch: bool = False, first: RunRecord | None = None
) -> Checked:
    """Return whether run ``b``, with a change, computes the same as run ``a`` without it; and if not, why.

    Both runs have the same seed, and the same batches unless ``other_step`` says otherwise. Losses of other batches,
    which ``free_batch`` allows, cannot be compared: then only the gradients count. The loss of b is also compared with
    that of the ``first`` setting's run, because small distances of several winners add up.
    """
    other = other_step(a, b)
    loss, by_chance = _loss_off(a, b)
    if first is not None and loss is not None and other_step(first, b) is None:
        loss = max(loss, _loss_off(first, b)[0] or 0.0)
    gradients = None if a.numerics is None or b.numerics is None else b.numerics.gradient_error
    limits = [("gradients", gradients, GRADIENT_TOLERANCE)]
    if other is None and may_change != OTHER_BATCH:
        limits.insert(0, ("loss", loss, min(max(LOSS_TOLERANCE, by_chance), _MOST_BY_CHANCE)))
    off = [] if other is None or free_batch else ["--global_batch free allows it"]
    if may_change == UNKNOWN:
        off += _unlike(a, b)
        limits += _own_limits(a, b, other is None)
    within, why = _judged(off, limits)
    size = None if other is None else f"a step has {other[2]} {other[0]} instead of {other[1]}"
    hint = "--accept_numerics takes it" if within is False and may_change == UNKNOWN else None
    return Checked(within, 0.0, loss, gradients, "; ".join(filter(None, (size, why, hint))) or None)


def _judged(off: Sequence[str], limits: Sequence[tuple[str, float | None, float]]) -> tuple[bool | None, str | None]:
    """Return whether all distances are within limits, None if one is unknown; and what is off."""
    off = [*off, *(_off_text(what, by, most) for what, by, most in limits if by is not None and not by <= most)]
    unknown = [what for what, by, _ in limits if by is None]
    if off:
        return False, off[0]
    return (None, f"{' and '.join(unknown)} unknown") if unknown else (True, None)


def _off_text(what: str, by: float, allowed: float) -> str:
    told = "more than can be told" if by == inf else f"{by:.1%}" if by >= 0.01 else f"{by * 100:.2g} %"
    return f"{what} off by {told}; {allowed * 100:.2g} % is tolerated"


def _loss_off(a: RunRecord, b: RunRecord) -> tuple[float | None, float]:
    """Return the distance of b's mean loss from a's, as a share, None if unknown; and the share that chance explains.

    The means are over the steps that both runs have. The distance may be infinite.
    """
    pairs = zip(_losses(a), _losses(b), strict=False)
    both = [(x, inf if y is None else y) for x, y in pairs if x is not None]
    mean = fmean(x for x, _ in both) if both else 0.0
    if not mean:
        return None, 0.0
    # Another number of workers, or another kernel, draws other random numbers: single steps are then off in both
    # directions. A real error goes in one direction, so its steps scatter by less than their mean.
    steps = [(y - x) / abs(x) for x, y in both if x and y < inf]
    error = stdev(steps) / sqrt(len(steps)) if len(steps) > 1 else 0.0
    return abs(fmean(y for _, y in both) - mean) / abs(mean), error and error * student(len(steps) - 1.0, 0.95)


def _losses(run: RunRecord) -> Sequence[float | None]:
    return [] if run.numerics is None else run.numerics.losses


def _own_limits(a: RunRecord, b: RunRecord, same_batches: bool) -> list[tuple[str, float | None, float]]:
    """Return how far an option with unknown effect is off, in values that may differ only by the order of sums."""
    if a.model is None or b.model is None or a.numerics is None or b.numerics is None:
        return [("what the option changes", None, 0.0)]
    norms = _furthest(a.numerics.gradient_norms, b.numerics.gradient_norms)
    steps = [
        ("loss of a first step", _furthest(_losses(a), _losses(b)), OWN_LOSS_TOLERANCE),
        ("norm of the gradients of a first step", norms, OWN_NORM_TOLERANCE),
    ]
    return steps if same_batches else []  # with other batches, only the models can be compared


def _unlike(a: RunRecord, b: RunRecord) -> list[str]:
    """Return signs that b trains another model, or trains differently."""
    # Losses do not show different clipping if no step was clipped.
    clips = (Entry(Path(), run).option("trainer.gradient_clip_val") for run in (a, b))
    facts = {"gradient clipping": tuple(clips)}
    if a.model is not None and b.model is not None:
        names = ("optimizers", "parameters", "trainable_parameters", "bytes")
        facts |= {name.replace("_", " "): (getattr(a.model, name), getattr(b.model, name)) for name in names}
    return [f"{what}: {its} instead of {before}" for what, (before, its) in facts.items() if its != before]


def _furthest(a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    """Return the largest distance of a value of b from that of a, as a share; None where steps cannot be paired."""
    if not a or len(a) != len(b) or None in a:
        return None
    return max(
        inf if y is None else 0.0 if x == y else abs(y - x) / abs(x) if x else inf for x, y in zip(a, b, strict=True)
    )


def other_step(a: RunRecord, b: RunRecord) -> tuple[str, int, int] | None:
    """Return the unit in which steps of ``a`` and ``b`` differ in size, with both counts; None if they do not.

    The unit is samples, else tokens. If neither was counted in the batches, the options give it.
    """
    one, two = _sizes(a), _sizes(b)
    both = [what for what in one if what in two]
    for what in [what for what in both if what in _COUNTED] or both[:1]:
        if abs(two[what] - one[what]) > MARGIN * one[what]:  # tokens of texts of varying length differ a little anyway
            return what.split()[0], one[what], two[what]
    return None


def _sizes(run: RunRecord) -> dict[str, int]:
    """Return the size of a step of ``run`` in each known unit, counted units first."""
    batches = 1 if run.model is None else run.model.accumulate_grad_batches
    size = Entry(Path(), run).option("data.batch_size")
    sizes = {what: getattr(run.throughput, f"{what}_per_step", None) for what in _COUNTED}
    sizes |= {"samples by its options": batches * size if isinstance(size, int) else None, "batches": batches}
    return {what: count for what, count in sizes.items() if count}
