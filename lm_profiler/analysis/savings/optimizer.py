"""Finds time that the optimizer costs, and other costs of a step that do not depend on the batch size."""

from __future__ import annotations

from collections.abc import Iterator

from lm_profiler.analysis.savings.outside_phases import belongs_to_loop
from lm_profiler.analysis.savings.python_code import find_slow_python
from lm_profiler.analysis.savings.step_costs import (
    MANY_CALLS,
    MODEL_PHASES,
    WORTH,
    StepCosts,
)
from lm_profiler.record.run_record import LIGHTNING, Finding

# phases whose time does not depend on the batch size
_FIXED_PHASES = ("zero_grad", "clip", "optimizer")
_LARGE_FIXED_SHARE = 0.2  # of the step: a smaller fixed cost is normal
_FEW_SAMPLES = 2  # in a batch
# A sample may be long: with 24 % of fixed cost, four times as large a batch made two sequences of 128 tokens 6 to 18 %
# cheaper.
_CERTAIN_FIXED_SHARE = 1.0 / 3.0
# calls the model and backward itself, several times per step
CLOSURE_OPTIMIZER = "LBFGS"
# samples: a smaller batch is expected to grow to this size, if memory allows
_USUAL_BATCH = 8
_LEAST_GROWTH = 2.0  # the smallest factor by which a batch grows in the advice
_MANY_GROUPS = 16  # of parameters: fewer cost little
# The share of the optimizer's time that fused=True saves on a CPU: 64 to 82 % with Adam and AdamW, 9 to 84 % with SGD,
# more of it with momentum (models of 0.1 to 10 million parameters).
_SAVED_BY_FUSING_ON_CPU = 0.75
_FASTER_IF_FUSED_ON_CPU = {"Adam", "AdamW"}
_SAVED_BY_FUSING_SGD_ON_CPU = 0.6


def find_small_batch(costs: StepCosts) -> Iterator[Finding]:
    """Find a high cost per step that does not depend on the batch size: a batch k times as large divides it by k."""
    fixed_s = _fixed_s(costs)
    if fixed_s < _LARGE_FIXED_SHARE * costs.step_s:
        return
    if costs.settings.memory_is_full:
        return

    growth = _batch_growth(costs)
    facts = {"growth": growth}
    tokens = costs.settings.tokens_per_batch
    if tokens is not None:
        facts["tokens_per_batch"] = float(tokens)
    samples = costs.settings.samples_per_batch
    if samples is not None:
        facts["samples_per_batch"] = float(samples)
    # With one or two samples and so much fixed cost, a larger batch is certain to help.
    has_few_samples = (
        samples is not None and samples <= _FEW_SAMPLES and growth > _LEAST_GROWTH
    )
    is_certain = has_few_samples and fixed_s >= _CERTAIN_FIXED_SHARE * costs.step_s
    saved_share = 1.0 - 1.0 / growth
    fixed_s = min(fixed_s, costs.step_s)
    most_fixed_s = max(costs.step_s - _proportional_s(costs), fixed_s)
    yield costs.finding(
        "small_batch",
        saved_share * fixed_s,
        high_s=saved_share * most_fixed_s,
        may=not is_certain,
        facts=facts,
    )


def _batch_growth(costs: StepCosts) -> float:
    """Return the factor by which the batch may grow: to the usual size if it is smaller, as far as memory allows."""
    growth = _LEAST_GROWTH
    samples = costs.settings.samples_per_batch
    if samples:
        growth = max(_USUAL_BATCH / samples, _LEAST_GROWTH)
    free_share = costs.settings.memory_free_share
    if free_share is not None:
        growth_that_fits = 1.0 / (1.0 - free_share)
        growth = max(min(growth, growth_that_fits), _LEAST_GROWTH)
    return growth


def _proportional_s(costs: StepCosts) -> float:
    """Return the seconds of a step that surely grow with the batch size: the data, and the least time of the model.

    In a larger batch, matrix products and convolutions run at a higher rate. Four times as large a batch made a sample
    50 to 63 % cheaper, although the costs of a step that are known to be fixed were 23 to 34 % of it.
    """
    batch_s = costs.mean_s("data") + costs.mean_s("transfer")
    products_s = costs.term_s("ideal")
    traffic_s = 0.0
    if costs.record.waterfall is not None:
        for term in costs.record.waterfall.terms:
            if term.name == "bandwidth":
                # the traffic of the optimizer does not depend on the batch
                traffic_s += sum(term.phases.get(phase, 0.0) for phase in MODEL_PHASES)
    return batch_s + products_s + traffic_s


def _fixed_s(costs: StepCosts) -> float:
    """Return the seconds of a step that do not depend on the batch size, and that no other finding explains."""
    fixed_s = sum(costs.regular_s(phase) for phase in _FIXED_PHASES)
    fixed_s -= _early_clip_s(costs)
    products_s = costs.term_s("optimizer_products")
    own_code_s = sum(finding.saves_s for finding in find_costly_optimizer_code(costs))
    fixed_s -= min(products_s + own_code_s, costs.regular_s("optimizer"))
    if costs.contended:
        # Other programs lengthen gaps and the loop's actions, of which only the means are known.
        return fixed_s
    python_s = sum(finding.saves_s for finding in find_slow_python(costs))
    fixed_s += max(costs.term_s("gaps") - python_s, 0.0)
    for action in costs.actions():
        if belongs_to_loop(action):
            fixed_s += action.seconds
    return fixed_s


def find_slow_optimizer(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer whose step could be fused into few kernels, and needless or slow clipping of gradients.

    An optimizer is reported if it could be fused and is not, or if it updates weight by weight on a device. The finding
    is certain (``may`` is False) if the user requested updates weight by weight with ``foreach=False``, or if the fused
    version is known to be faster.
    """
    by_weight = costs.settings.weight_by_weight
    could_be_fused = costs.settings.fused_optimizer is False
    has_kernels_by_weight = by_weight and costs.on_device
    if could_be_fused or has_kernels_by_weight:
        is_certain = by_weight or (could_be_fused and _is_surely_faster_if_fused(costs))
        saves_s = _saved_by_fusing(costs)
        yield costs.finding("optimizer", saves_s, may=not is_certain, phase="optimizer")
    yield from _needless_groups(costs)
    yield from _costly_clipping(costs)


def _costly_clipping(costs: StepCosts) -> Iterator[Finding]:
    """Find gradients that are clipped after each of several batches; if there are none, find slow clipping.

    Gradients are complete only after the last batch, so the clipping before that is needless, unless the program means
    to clip the gradients of each batch. Clipping is slow if it takes twice the share of the step that other findings
    need.
    """
    settings = costs.settings
    clip_s = costs.regular_s("clip")
    if settings.early_clips > 0:
        needed_clips = max(settings.clipped_batches - settings.early_clips, 1)
        yield costs.finding(
            "clip",
            _early_clip_s(costs),
            may=True,
            phase="clip",
            facts={"batches": settings.clipped_batches / needed_clips},
        )
        return
    clips_slowly = clip_s >= 2 * WORTH * costs.whole_s
    if clips_slowly:
        yield costs.finding("clip", clip_s, may=True, phase="clip")


def _early_clip_s(costs: StepCosts) -> float:
    """Return the seconds for which a step clips gradients to which later batches still add."""
    settings = costs.settings
    early_share = settings.early_clips / max(settings.clipped_batches, 1)
    return early_share * costs.regular_s("clip")


def _is_surely_faster_if_fused(costs: StepCosts) -> bool:
    """Return whether the fused version of the optimizer was faster in all models that were tried, all on the CPU."""
    model = costs.record.model
    optimizers = set() if model is None else set(model.optimizers)
    is_known = bool(optimizers) and optimizers <= _FASTER_IF_FUSED_ON_CPU
    return is_known and not costs.on_device


def _saved_by_fusing(costs: StepCosts) -> float:
    """Return the seconds that a fused optimizer saves."""
    # without the program's own Python code in the optimizer's step, which a fused optimizer runs, too
    own_code_s = 0.0
    for finding in find_slow_python(costs):
        if finding.phase == "optimizer":
            own_code_s += finding.saves_s
    optimizer_s = max(costs.regular_s("optimizer") - own_code_s, 0.0)
    # A fused optimizer still has to move its bytes. Their least time is subtracted if it is known; on a busy machine
    # the memory bandwidth is not known well enough.
    floor = costs.record.floors.get("optimizer")
    floor_s = 0.0
    if floor is not None and not costs.contended:
        floor_s = floor.seconds or 0.0
    above_floor_s = max(optimizer_s - floor_s, 0.0)
    if costs.on_device:
        return above_floor_s
    model = costs.record.model
    share = _SAVED_BY_FUSING_ON_CPU
    if model is not None and set(model.optimizers) == {"SGD"}:
        share = _SAVED_BY_FUSING_SGD_ON_CPU
    return min(share * optimizer_s, above_floor_s)


def _needless_groups(costs: StepCosts) -> Iterator[Finding]:
    """Find groups of parameters with equal options: an optimizer updates one group after another."""
    groups = costs.settings.parameter_groups
    different = costs.settings.different_groups
    if groups is None or different is None or groups < _MANY_GROUPS:
        return
    needless_share = 1.0 - different / groups
    if needless_share >= 0.5:
        yield costs.finding(
            "groups",
            needless_share * costs.regular_s("optimizer"),
            may=True,
            phase="optimizer",
            facts={"groups": float(groups), "different": float(different)},
        )


def find_optimizer_products(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer that spends its time on matrix products of its own, as Muon, SOAP and Shampoo do."""
    floor = costs.record.floors.get("optimizer")
    if floor is None or not floor.flops:
        return
    model = costs.record.model
    if model is not None and CLOSURE_OPTIMIZER in model.optimizers:
        return  # the products are those of the model, which the optimizer calls
    # Without a waterfall, the whole optimizer counts: its products are most of it.
    products_s = costs.regular_s("optimizer", clock="time")
    if costs.record.waterfall is not None:
        products_s = costs.term_s("optimizer_products")
    if products_s <= 0.0:
        return
    flops = sum(floor.flops.values())
    facts = {"flops": float(flops), "flops_per_s": flops / products_s}
    yield costs.finding(
        "optimizer_products", products_s, may=True, phase="optimizer", facts=facts
    )


def find_costly_optimizer_code(costs: StepCosts) -> Iterator[Finding]:
    """Find functions of the program's own optimizer that mostly run long torch operators.

    Optimizers with many short operators, and those that mostly compute matrix products, have findings of their own.
    """
    products_s = sum(finding.saves_s for finding in find_optimizer_products(costs))
    for all_rows in costs.rows_of_functions(["optimizer"]):
        rows = [row for row in all_rows if row.what not in ("library", LIGHTNING)]
        if not rows:
            continue
        seconds = sum(row.seconds for row in rows)
        longest = max(rows, key=lambda row: row.seconds)
        seconds = min(seconds, costs.mean_s("optimizer"))
        has_many_calls = longest.calls >= MANY_CALLS
        if longest.what != "torch" or has_many_calls or products_s > 0.5 * seconds:
            continue
        yield costs.finding(
            "owner",
            seconds,
            phase="optimizer",
            owner=longest.function,
            file=longest.file,
            line=longest.line,
        )
