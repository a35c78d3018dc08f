"""Judge whether a change keeps losses and gradients within a stated tolerance. This module is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.analysis.remedies.remedy import OTHER_BATCH, UNKNOWN
from lm_profiler.analysis.steps.statistics import student_quantile
from lm_profiler.improve.decision import NumericsCheck
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import RunRecord

# The tolerated relative error of the mean loss of the first steps, and the largest error that chance may explain.
LOSS_TOLERANCE, _LARGEST_BY_CHANCE = 0.01, 0.1

# The tolerated relative error of the gradients against float32. Mixed bfloat16 of a Transformer stays
# within 2 %; a matmul that loses half of its bits exceeds it.
GRADIENT_TOLERANCE = 0.05

# The tolerated relative errors of loss and gradient norm in each of the first steps, for an option whose effect is
# unknown. Summing float32 values in another order stays below them; another activation, no dropout or fewer bits do
# not. The mean loss cannot show such changes: at the start, all models with one vocabulary have about the same loss.
STEP_LOSS_TOLERANCE, STEP_NORM_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True)
class _Limit:
    """A relative error between the numbers of two runs, and its tolerance."""

    subject: str  # what is compared: "loss", "gradients"
    distance: float | None  # None if unknown; it may be infinite
    tolerance: float

    @property
    def is_exceeded(self) -> bool:
        if self.distance is None:
            return False
        return not self.distance <= self.tolerance  # NaN exceeds it too

    @property
    def excess_text(self) -> str:
        return f"{self.subject} off by {_distance_text(self.distance)}; {self.tolerance * 100:.2g} % is tolerated"


def check_numbers(
    a: RunRecord,
    b: RunRecord,
    may_change: str | None,
    free_batch: bool = False,
    first_setting: RunRecord | None = None,
) -> NumericsCheck:
    """Return whether run ``b``, with a change, computes the same numbers as run ``a`` without it.

    Both runs have the same seed, and the same batches unless their steps differ in size. Losses of different batches,
    which ``free_batch`` allows, cannot be compared: then only gradients are compared. The loss of b is also compared
    with the loss of the ``first_setting``'s run, because small errors of several accepted changes add up.
    """
    difference = size_difference(a, b)
    has_same_batches = difference is None
    loss_error, chance = _loss_distance(a, b)
    if first_setting is not None and loss_error is not None:
        loss_error = max(loss_error, _loss_error_since(first_setting, b))
    gradient_error = None
    if a.numerics is not None and b.numerics is not None:
        gradient_error = b.numerics.gradient_error

    remarks = []
    if difference is not None:
        remarks.append(
            f"a step has {difference.size_b} {difference.unit} instead of {difference.size_a}"
        )
    is_tolerated: bool | None
    if difference is not None and not free_batch:
        is_tolerated = False
        remarks.append("--global_batch free allows it")
    else:
        limits = _tolerance_limits(
            loss_error, chance, gradient_error, has_same_batches, may_change
        )
        training_differences = []
        if may_change == UNKNOWN:
            training_differences = _training_differences(a, b)
            limits += _step_limits(a, b, has_same_batches)
        is_tolerated, reason = _verdict_and_reason(training_differences, limits)
        if reason is not None:
            remarks.append(reason)
    if is_tolerated is False and may_change == UNKNOWN:
        remarks.append("--accept_numerics accepts this")
    return NumericsCheck(
        is_tolerated,
        loss_error=loss_error,
        gradient_error=gradient_error,
        reason="; ".join(remarks) or None,
    )


def _loss_error_since(first_setting: RunRecord, b: RunRecord) -> float:
    """Return the relative error of run b's losses against the first run's; 0 if unknown, or if their batches differ."""
    has_same_batches = size_difference(first_setting, b) is None
    if not has_same_batches:
        return 0.0
    loss_error, _ = _loss_distance(first_setting, b)
    return loss_error or 0.0


def _tolerance_limits(
    loss_error: float | None,
    chance: float,
    gradient_error: float | None,
    has_same_batches: bool,
    may_change: str | None,
) -> list[_Limit]:
    """Return the limits of the mean loss, if the losses can be compared, and of the gradients."""
    limits = []
    if has_same_batches and may_change != OTHER_BATCH:
        tolerance = min(max(LOSS_TOLERANCE, chance), _LARGEST_BY_CHANCE)
        limits.append(_Limit(subject="loss", distance=loss_error, tolerance=tolerance))
    limits.append(
        _Limit(
            subject="gradients", distance=gradient_error, tolerance=GRADIENT_TOLERANCE
        )
    )
    return limits


def _verdict_and_reason(
    training_differences: Sequence[str], limits: Sequence[_Limit]
) -> tuple[bool | None, str | None]:
    """Return whether the change is tolerated, with the reason if it is not, or None if a distance is unknown."""
    exceeded = [limit.excess_text for limit in limits if limit.is_exceeded]
    problems = [*training_differences, *exceeded]
    if problems:
        return False, problems[0]
    unknown = [limit.subject for limit in limits if limit.distance is None]
    if unknown:
        return None, f"{' and '.join(unknown)} unknown"
    return True, None


def _distance_text(distance: float | None) -> str:
    """Return a relative error as a percentage, with two significant digits below 1 %."""
    if distance is None or distance == inf:
        return "an unknown amount"
    if distance >= 0.01:
        return f"{distance:.1%}"
    return f"{distance * 100:.2g} %"


# -- losses ------------------------------------------------------------------------------------------------------------


def _loss_distance(a: RunRecord, b: RunRecord) -> tuple[float | None, float]:
    """Return the relative error of b's mean loss against a's, and the error that chance explains.

    The means are over the steps that both runs have. The error is None if it is unknown, and may be infinite.
    """
    pairs = _loss_pairs(a, b)
    if not pairs:
        return None, 0.0
    mean_a = fmean(loss_a for loss_a, _ in pairs)
    mean_b = fmean(loss_b for _, loss_b in pairs)
    if mean_a == 0.0:
        return None, 0.0
    distance = abs(mean_b - mean_a) / abs(mean_a)
    return distance, _chance_distance(pairs)


def _loss_pairs(a: RunRecord, b: RunRecord) -> list[tuple[float, float]]:
    """Return the losses of a and b in the steps that both have; a loss that is missing only in b is infinite."""
    pairs = []
    for loss_a, loss_b in zip(_losses(a), _losses(b), strict=False):
        if loss_a is None:
            continue
        if loss_b is None:
            loss_b = inf
        pairs.append((loss_a, loss_b))
    return pairs


def _chance_distance(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the relative error of the mean loss that chance may explain.

    It is the half width of the 95 % interval of the mean relative difference, from how the differences scatter. Another
    number of workers, or another kernel, draws other random numbers, so some steps have a higher and some a lower loss.
    A real error has one direction, so its steps scatter by less than their mean.
    """
    distances = []
    for loss_a, loss_b in pairs:
        if loss_a != 0.0 and loss_b < inf:
            distances.append((loss_b - loss_a) / abs(loss_a))
    steps = len(distances)
    if steps < 2:
        return 0.0
    standard_error = stdev(distances) / sqrt(steps)
    return standard_error * student_quantile(steps - 1.0, confidence=0.95)


def _losses(run: RunRecord) -> Sequence[float | None]:
    if run.numerics is None:
        return []
    return run.numerics.losses


# -- an option whose effect is unknown ---------------------------------------------------------------------------------


def _step_limits(a: RunRecord, b: RunRecord, has_same_batches: bool) -> list[_Limit]:
    """Return the limits of losses and gradients of the first steps, which may differ only by the order of sums.

    If a run recorded no numbers, one limit has an unknown distance, and the change is not accepted. If the runs have
    different batches, their steps cannot be compared and there is no limit here: only the models are compared.
    """
    if a.model is None or b.model is None or a.numerics is None or b.numerics is None:
        return [_Limit("the effect of the option", distance=None, tolerance=0.0)]
    if not has_same_batches:
        return []
    loss_distance = _largest_distance(_losses(a), _losses(b))
    norm_distance = _largest_distance(
        a.numerics.gradient_norms, b.numerics.gradient_norms
    )
    return [
        _Limit(
            subject="loss of a first step",
            distance=loss_distance,
            tolerance=STEP_LOSS_TOLERANCE,
        ),
        _Limit(
            subject="norm of the gradients of a first step",
            distance=norm_distance,
            tolerance=STEP_NORM_TOLERANCE,
        ),
    ]


def _largest_distance(
    a: Sequence[float | None], b: Sequence[float | None]
) -> float | None:
    """Return the largest relative error of b's values against a's; None if the steps cannot be paired."""
    if not a or len(a) != len(b):
        return None
    largest = 0.0
    for value_a, value_b in zip(a, b, strict=True):
        if value_a is None:
            return None
        largest = max(largest, _distance(value_a, value_b))
    return largest


def _distance(value_a: float, value_b: float | None) -> float:
    """Return the relative error of b against a; infinite if b is unknown, or if only a is 0."""
    if value_b is None:
        return inf
    if value_b == value_a:
        return 0.0
    if value_a == 0.0:
        return inf
    return abs(value_b - value_a) / abs(value_a)


def _training_differences(a: RunRecord, b: RunRecord) -> list[str]:
    """Return signs that b trains another model, or trains differently."""
    facts_a, facts_b = _training_facts(a), _training_facts(b)
    differences = []
    for name, fact_a in facts_a.items():
        if name in facts_b and facts_b[name] != fact_a:
            differences.append(f"{name}: {facts_b[name]} instead of {fact_a}")
    return differences


def _training_facts(run: RunRecord) -> dict[str, Any]:
    """Return the facts of ``run`` that differ if it trains another model, or trains differently."""
    # Losses do not show different clipping if no step was clipped.
    facts = {
        "gradient clipping": Entry(Path(), run).option("trainer.gradient_clip_val")
    }
    if run.model is not None:
        facts["optimizers"] = run.model.optimizers
        facts["parameters"] = run.model.parameters
        facts["trainable parameters"] = run.model.trainable_parameters
        facts["bytes"] = run.model.bytes
    return facts


# -- the size of a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeDifference:
    """The sizes of two runs' steps, which differ."""

    unit: str  # samples, tokens or batches
    size_a: int
    size_b: int


def size_difference(a: RunRecord, b: RunRecord) -> SizeDifference | None:
    """Return the sizes of a step of ``a`` and of ``b`` if they differ.

    Sizes that were counted in the batches of both runs are compared in samples, then in tokens: the first unit in which
    they differ is returned. If no unit was counted in both, the runs' options are compared in samples, or in batches
    if the number of samples per batch is unknown.
    """
    counted_a = _counted_sizes(a)
    counted_b = _counted_sizes(b)
    counted_units = [unit for unit in counted_a if unit in counted_b]
    if counted_units:
        return _first_difference(counted_units, counted_a, counted_b)
    configured_a = _configured_sizes(a)
    configured_b = _configured_sizes(b)
    # With equal samples per step, a different number of batches is no difference.
    has_samples = "samples" in configured_a and "samples" in configured_b
    configured_unit = "samples" if has_samples else "batches"
    return _first_difference([configured_unit], configured_a, configured_b)


def _first_difference(
    units: Sequence[str], a: Mapping[str, int], b: Mapping[str, int]
) -> SizeDifference | None:
    """Return the step sizes of ``a`` and ``b`` in the first of ``units`` in which they differ; None if none differs."""
    for unit in units:
        # The number of tokens differs slightly anyway if texts vary in length.
        tolerated = MARGIN * a[unit]
        if abs(b[unit] - a[unit]) > tolerated:
            return SizeDifference(unit, size_a=a[unit], size_b=b[unit])
    return None


def _counted_sizes(run: RunRecord) -> dict[str, int]:
    """Return the size of a step of ``run`` by unit, as far as it was counted in the batches."""
    sizes: dict[str, int] = {}
    if run.throughput is None:
        return sizes
    if run.throughput.samples_per_step:
        sizes["samples"] = run.throughput.samples_per_step
    if run.throughput.tokens_per_step:
        sizes["tokens"] = run.throughput.tokens_per_step
    return sizes


def _configured_sizes(run: RunRecord) -> dict[str, int]:
    """Return the size of a step of ``run`` by unit, by its options."""
    batches = 1
    if run.model is not None:
        batches = run.model.accumulate_grad_batches
    sizes = {}
    batch_size = Entry(Path(), run).option("data.batch_size")
    if isinstance(batch_size, int) and batch_size:
        sizes["samples"] = batches * batch_size
    sizes["batches"] = batches
    return sizes
