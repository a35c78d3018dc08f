"""Finds time that the computation of forward and backward costs: precision, fusion, recomputation, waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lm_profiler.analysis.savings.function_results import same_results_s
from lm_profiler.analysis.savings.needless_work import all_needless_s
from lm_profiler.analysis.savings.python_code import (
    find_sleeping_phases,
    find_slow_python,
)
from lm_profiler.analysis.savings.step_costs import (
    MODEL_PHASES,
    ProgramCode,
    StepCosts,
)
from lm_profiler.record.parts import WORKING_PHASES
from lm_profiler.record.run_record import Contributor, Finding, Waterfall

# Recomputation runs forward again with additional bookkeeping on cold caches: without it, a step was shorter by 1.27
# times the time of forward.
_RECOMPUTING_FACTOR = 1.3
# the share of the device's memory that stored activations may need
_ENOUGH_FREE_MEMORY = 0.3
# the share of forward's time by its share of the FLOPs, for the blocks of a model without its logits
_TIME_PER_FLOPS_SHARE = 1.3
# torch's name of the code of a dispatch mode in a trace
_DISPATCH_MODE = "PythonDispatchMode"
# A mode costs more than its own code: without FlopCounterMode, a step was shorter by 1.9 times that.
_DISPATCH_MODE_FACTOR = 2.0
# how the waterfall and the recorded Python time name what anomaly detection does
_SEARCHES_FOR_NAN = ("backward: aten::isnan", "backward: aten::any")
_RECORDING_STACKS = ("traceback", "linecache", "posix.stat")
# Anomaly detection costs more than that code: without it, a step was shorter by 1.27 times its time.
_ANOMALY_DETECTION_FACTOR = 1.4
# the largest share of the time in float64 that float32 may save
_MOST_SHARE_OF_DOUBLE = 0.75
# terms of the waterfall whose operators can be fused
_FUSABLE_TERMS = ("bandwidth", "beyond_bandwidth")
# Parts of the names of operators that compiled code for the CPU does not make faster: random numbers, and kernels that
# torch has for whole operators. Compiled, a T5 with much dropout took 51 % longer, and a MobileNetV2 9 %.
_SLOW_IN_COMPILED_CODE = ("dropout", "bernoulli", "batch_norm", "conv")
_COSTLY_SHARE = 0.1  # of the step: an operator with this share is named in the advice
# The share of the fusable time that torch.compile saves on a CPU: 0 to 48 % in four small models.
_SAVED_BY_COMPILING_ON_CPU = 0.5


def find_slow_ranks(costs: StepCosts) -> Iterator[Finding]:
    """Find that the ranks wait for a slow one."""
    ranks = costs.record.ranks
    if ranks is None:
        return
    slow = ranks.finding
    if slow.saves_s:
        yield costs.finding(
            "ranks",
            slow.saves_s,
            low_s=slow.low_s,
            high_s=slow.high_s,
            phase=slow.phase,
        )


def find_diagnostics(costs: StepCosts) -> Iterator[Finding]:
    """Find diagnostics that cost time: anomaly detection, a dispatch mode, and the Trainer's own profiler."""
    if costs.settings.anomalies:
        compute_s = sum(costs.mean_s(phase) for phase in MODEL_PHASES)
        detection_s = min(_anomaly_detection_s(costs) or compute_s, compute_s)
        most_s = min(_ANOMALY_DETECTION_FACTOR * detection_s, compute_s)
        yield costs.finding("anomalies", detection_s, high_s=most_s)
    mode_s = _dispatch_mode_s(costs)
    yield costs.finding("dispatch_mode", mode_s, high_s=_DISPATCH_MODE_FACTOR * mode_s)
    if costs.settings.profiler is not None:
        yield costs.finding(
            "profiler", costs.step_s, may=True, owner=costs.settings.profiler
        )


def _anomaly_detection_s(costs: StepCosts) -> float:
    """Return the seconds in which anomaly detection records stacks in forward and searches gradients for NaN.

    0 if there is no waterfall, or if recording stacks takes no Python time: something else then searches for NaN.
    """
    if costs.record.waterfall is None:
        return 0.0
    searching_s = 0.0
    for term in costs.record.waterfall.terms:
        for contributor in term.contributors:
            if contributor.what in _SEARCHES_FOR_NAN:
                searching_s += contributor.seconds
    recording_s = 0.0
    for row in costs.record.python_times:
        if row.phase == "forward" and row.what in _RECORDING_STACKS:
            recording_s += row.seconds
    if recording_s <= 0.0:
        return 0.0
    return searching_s + recording_s


def _dispatch_mode_s(costs: StepCosts) -> float:
    """Return the seconds in which the code of a ``TorchDispatchMode`` ran at the operators of the traced steps."""
    if costs.record.waterfall is None:
        return 0.0
    seconds = 0.0
    for term in costs.record.waterfall.terms:
        for contributor in term.contributors:
            if contributor.what.endswith(_DISPATCH_MODE):
                seconds += contributor.seconds
    return seconds


def find_syncs(costs: StepCosts) -> Iterator[Finding]:
    """Find lines that make the host wait for the device. Their cost is the gaps with a synchronization or a copy."""
    waterfall = costs.record.waterfall
    syncs = costs.record.syncs
    if waterfall is None or not syncs:
        return
    waits_s = 0.0
    for term in waterfall.terms:
        if term.name != "gaps":
            continue
        for contributor in term.contributors:
            # "ync" matches both "Synchronize" and "sync"
            is_sync_or_copy = "ync" in contributor.what or "cpy" in contributor.what
            if is_sync_or_copy:
                waits_s += contributor.seconds
    worst = max(syncs, key=lambda sync: sync.count)
    yield costs.finding(
        "sync",
        waits_s,
        file=worst.file,
        line=worst.line,
        what=worst.call or worst.function,
    )


def find_unfused_operators(costs: StepCosts) -> Iterator[Finding]:
    """Find gaps and memory traffic of forward and backward that torch.compile could save by fusing operators.

    Needs a model that is not compiled, and a waterfall that other programs did not distort.
    """
    waterfall = costs.record.waterfall
    if costs.settings.compiled is not False or waterfall is None or costs.contended:
        return
    fusable_s = _fusable_s(costs, waterfall)
    explained_s = 0.0  # by other findings
    for finding in (*find_slow_python(costs), *find_sleeping_phases(costs)):
        if finding.phase in MODEL_PHASES:
            explained_s += finding.saves_s
    explained_s += sum(costs.lock_wait_s(phase) for phase in MODEL_PHASES)
    explained_s += max(all_needless_s(costs), same_results_s(costs))
    share = 1.0 if costs.on_device else _SAVED_BY_COMPILING_ON_CPU
    yield costs.finding(
        "compile",
        share * max(fusable_s - explained_s, 0.0),
        may=True,
        code=_costliest_operator(costs),
    )


def _fusable_s(costs: StepCosts, waterfall: Waterfall) -> float:
    """Return the seconds of gaps and memory traffic, without those of operators that torch.compile cannot help.

    May be negative: the waterfall may count less of the time of such operators than is subtracted.
    """
    fusable_s = 0.0
    for term in waterfall.terms:
        if term.name not in ("gaps", *_FUSABLE_TERMS):
            continue
        if not term.phases:  # unknown
            fusable_s += term.seconds
            continue
        fusable_s += sum(term.phases.get(phase, 0.0) for phase in MODEL_PHASES)
    for phase, uncompiled_share in costs.record.uncompiled_shares.items():
        fusable_s -= uncompiled_share * costs.mean_s(phase)
    if not costs.on_device:
        fusable_s -= _slow_in_compiled_code_s(waterfall)
    return fusable_s


def _slow_in_compiled_code_s(waterfall: Waterfall) -> float:
    """Return the seconds of operators that compiled code for the CPU does not make faster."""
    seconds = 0.0
    for term in waterfall.terms:
        if term.name in _FUSABLE_TERMS:
            for contributor in term.contributors:
                if _is_slow_in_compiled_code(contributor):
                    seconds += contributor.seconds
    return seconds


def _is_slow_in_compiled_code(contributor: Contributor) -> bool:
    return any(name in contributor.what for name in _SLOW_IN_COMPILED_CODE)


def _costliest_operator(costs: StepCosts) -> ProgramCode | None:
    """Return the module with the costliest fusable operator; None if that takes less than a tenth of the step."""
    waterfall = costs.record.waterfall
    if waterfall is None or costs.step_s <= 0.0:
        return None
    seconds_by_place: defaultdict[tuple[str, str], float] = defaultdict(float)
    for term in waterfall.terms:
        if term.name in _FUSABLE_TERMS:
            for contributor in term.contributors:
                is_slow = not costs.on_device and _is_slow_in_compiled_code(contributor)
                if contributor.module is not None and not is_slow:
                    place = (contributor.module, contributor.what)
                    seconds_by_place[place] += contributor.seconds
    if not seconds_by_place:
        return None
    module, operator = max(seconds_by_place, key=seconds_by_place.__getitem__)
    share = seconds_by_place[module, operator] / costs.step_s
    if share < _COSTLY_SHARE:
        return None
    return ProgramCode(owner=module, what=operator, facts={"costliest": share})


def find_high_precision(costs: StepCosts) -> Iterator[Finding]:
    """Find matrix products in a higher precision than needed: float64, float32, or float32 without TF32."""
    settings = costs.settings
    products_s = _matmul_s(costs)
    is_double = settings.precision == "float64" or str(settings.precision).startswith(
        "64"
    )
    if is_double and (_is_recorded(costs) or costs.record.factorizing_operators):
        # The data flow shows which operators are large enough to be faster in float32. Factorizing matrices or solving
        # systems may need the digits of float64.
        return
    if is_double:
        # float64 has twice the bytes and at best half the FLOP/s: float32 saves at least half of the time. It may
        # save more, because some operators, such as convolutions on a CPU, have no fast float64 version.
        working_s = sum(costs.mean_s(phase) for phase in WORKING_PHASES)
        yield costs.finding(
            "double",
            products_s or working_s / 2.0,
            high_s=_MOST_SHARE_OF_DOUBLE * working_s,
        )
    elif settings.full_precision and settings.half_precision:
        yield costs.finding(
            "precision", products_s, may=True, what=settings.half_precision
        )
    if settings.full_precision and settings.tf32 is False and costs.on_device:
        yield costs.finding("tf32", products_s, may=True)


def _is_recorded(costs: StepCosts) -> bool:
    """Return whether the operators of a step were recorded for the data flow."""
    has_stage = costs.record.steps.get("memory", 0) > 0
    return has_stage and costs.settings.compiled is False


def _matmul_s(costs: StepCosts) -> float:
    """Return the seconds that matmuls take: by the waterfall, or else by the utilisation of the device."""
    if costs.record.waterfall is not None:
        if costs.contended:
            # Other programs slow down matmuls and lower the clock: only the time at peak rate is certain.
            return costs.term_s("ideal")
        return costs.term_s("ideal", "slow_products", "clock")
    use = costs.record.utilisation
    if use is None:
        return 0.0
    used_share = use.of_ceiling or use.hfu or 0.0
    # The utilisation is a share of the measured step, without the wait that prefetched batches hid.
    measured_step_s = costs.step_s - costs.hidden_wait_s
    return used_share * measured_step_s


def find_recomputation(costs: StepCosts) -> Iterator[Finding]:
    """Find activation checkpointing in a run with enough free memory to store the activations."""
    free_share = costs.settings.memory_free_share
    may_fit = free_share is None or free_share >= _ENOUGH_FREE_MEMORY
    if costs.settings.checkpointing and may_fit:
        repeated_s = _recomputation_s(costs)
        yield costs.finding(
            "recomputation",
            repeated_s,
            high_s=repeated_s * _RECOMPUTING_FACTOR,
            may=free_share is None,
        )


def _recomputation_s(costs: StepCosts) -> float:
    """Return the seconds of recomputation: the waterfall's term, or an estimate from FLOPs if that is larger.

    The term counts only recomputed matmuls, at peak rate. The estimate goes by the recomputed share of forward's FLOPs.
    Its share of the time is larger, because what is not recomputed is mostly one large matmul, that of the logits.
    """
    term_s = costs.term_s("recomputation")
    use = costs.record.utilisation
    if use is None or not use.flops.forward:
        return term_s
    flops_share = use.flops.recomputation / use.flops.forward
    repeated_share = min(_TIME_PER_FLOPS_SHARE * flops_share, 1.0)
    estimated_s = repeated_share * costs.regular_s("forward", clock="time")
    return max(term_s, estimated_s)


def find_communication(costs: StepCosts) -> Iterator[Finding]:
    """Find communication that no computation overlaps, by the figures of the ranks, or else by the waterfall."""
    ranks = costs.record.ranks
    exposed_s = 0.0
    if ranks is not None:
        exposed_s = sum(ranks.exposed_s.values())
    yield costs.finding(
        "communication", exposed_s or costs.term_s("communication"), may=True
    )
