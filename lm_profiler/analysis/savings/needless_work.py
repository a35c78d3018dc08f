"""Finds work of a step that may be needless: by the trace, and by the data flow of its operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from lm_profiler.analysis.savings.step_costs import (
    MODEL_PHASES,
    ProgramCode,
    StepCosts,
)
from lm_profiler.record.findings import MODEL_REASONS, PLACE_REASONS
from lm_profiler.record.run_record import (
    VALIDATION,
    Finding,
    FindingName,
    NeedlessKind,
    NeedlessOperators,
    NeedlessReason,
    NeedlessWork,
    OuterCall,
)

# by the reason of the data flow, the kinds of needless work with which the trace reports the same problem
_TRACED_KINDS: dict[NeedlessReason, tuple[NeedlessKind, ...]] = {
    "repeated": ("repeated_forward", "repeated_backward"),
    "unused": ("unused_gradients",),
    "broadcast": ("broadcast",),
}
_SURELY_MORE = 1.2  # a factor by which a traced time must exceed a limit
# The trace, which names the module, is preferred if it shows at least this share of what the data flow shows.
_ENOUGH_IN_TRACE = 0.6
# If at least this share of forward and of backward is repeated, then whole passes are repeated. The share would be half
# or more if the step did not also compute something else.
_SHARE_OF_PASSES = 0.35
# The line of the data flow is that of a traced pass if it shows at least this share of it. Of two passes with dropout
# it shows only what comes before.
_MOST_OF_PASS = 0.5
# the time that the gradients of a module's weights take, as a multiple of its forward pass: usually, and at most
_USUAL_PER_FORWARD = 1.25
_MOST_PER_FORWARD = 2.0
_CERTAINLY_NEEDLESS = ("unused", "constant")
# By this factor the saving may exceed its estimate: the share of needless operators was measured in a single step.
_NEEDLESS_TOLERANCE = 1.35
# The same for float64, which may take more than twice as long as float32.
_DOUBLE_TOLERANCE = 1.5
# The same for many small parameters: zero_grad and autograd handle each of them, too, without an operator. One instead
# of 800 parameters saved 49 % of a step, of which their operators took 24 %.
_SMALL_PARAMETERS_TOLERANCE = 2.2
# The same for layers whose results are added: adding their weights takes some of the saving.
_SUMMED_TOLERANCE = 1.1
# The same for half precision that is slower than float32. In three programs float32 saved 1.5 to 2.1 times the
# estimate: conversions have an overhead, and the time of short operators in float32 is not measured.
_NARROW_TOLERANCE = 2.1
_TOLERANCES: dict[NeedlessReason, float] = {
    "narrow": _NARROW_TOLERANCE,
    "some_double": _DOUBLE_TOLERANCE,
    "double": _DOUBLE_TOLERANCE,
    "summed": _SUMMED_TOLERANCE,
    "small_parameters": _SMALL_PARAMETERS_TOLERANCE,
}


def find_needless_work(costs: StepCosts) -> Iterator[Finding]:
    """Find work that the trace shows as possibly needless: repeated passes, unused gradients, large broadcasts.

    It may be intended: a second pass may draw other random numbers, and a program may want a table of all pairs.
    """
    longest_repetition_s = max(
        (
            work.seconds
            for work in _traced_works(costs)
            if work.kind in _TRACED_KINDS["repeated"]
        ),
        default=0.0,
    )
    for (kind, module), works in _works_by_module(costs).items():
        passes = _number_of_passes(works)
        # whether the first of the passes only evaluates, so that the later one cannot be saved as a whole
        only_evaluates = kind == "repeated_forward" and _first_pass_evaluates(
            costs, works, passes
        )
        saved_works = works
        if only_evaluates:
            saved_works = [work for work in works if work.phase == "forward"]
        saves_s = sum(work.seconds for work in saved_works)
        # The first pass is validation for us if it ran in evaluation mode: then its own time is known.
        evaluation_s = costs.outside_s(VALIDATION)
        if only_evaluates and evaluation_s > 0.0:
            saves_s = min(saves_s, evaluation_s)
        longest = max(saved_works, key=lambda work: work.seconds)
        high_s = saves_s
        # what the data flow shows as repeated is attributed to the longest repetition
        is_longest = longest.seconds == longest_repetition_s
        if is_longest and not only_evaluates:
            high_s = max(high_s, _limit_of_repetition_s(costs))
        yield costs.finding(
            cast(FindingName, kind),
            saves_s,
            may=True,
            code=_line_of_repetition(costs, works),
            high_s=high_s,
            phase=longest.phase,
            what=module,
            facts={"passes": passes},
        )


def _works_by_module(
    costs: StepCosts,
) -> Mapping[tuple[NeedlessKind, str | None], list[NeedlessWork]]:
    """Return the traced work that may be needless, by its kind and its module.

    Kinds of which the data flow shows more are left out: ``find_needless_operators`` reports them.
    """
    kinds_of_data_flow: set[NeedlessKind] = set()
    for operators in costs.record.needless_operators:
        if not _is_shown_by_trace(costs, operators):
            kinds_of_data_flow.update(_TRACED_KINDS.get(operators.reason, ()))
    works = defaultdict[tuple[NeedlessKind, str | None], list[NeedlessWork]](list)
    for work in _traced_works(costs):
        if work.kind not in kinds_of_data_flow:
            works[work.kind, work.what].append(work)
    return works


def find_unfrozen_modules(costs: StepCosts) -> Iterator[Finding]:
    """Find modules outside of the model that pass gradients on, and whose own weights get gradients for nothing.

    The gradients of weights need as many operations as the forward pass (Kaplan et al. 2020, section 2.1: each of the
    two products of the backward pass costs as much as that of the forward pass). Those of convolutions take longer.
    """
    # by file, line and function of the forward pass; without a function, of the line of the loop
    calls_by_place: defaultdict[tuple[str, int, str], list[OuterCall]] = defaultdict(
        list
    )
    for call in costs.record.outer_calls:
        if call.forward == "passing_unfrozen":
            calls_by_place[call.file, call.line, call.outer_function].append(call)
    backward_s = costs.mean_s("backward")
    for calls in calls_by_place.values():
        forward_s = sum(call.seconds for call in calls) * costs.slowdown_in("other")
        first = calls[0]
        yield costs.finding(
            "unused_gradients",
            min(_USUAL_PER_FORWARD * forward_s, backward_s),
            code=ProgramCode(first.outer_function, first.file, first.line),
            high_s=min(_MOST_PER_FORWARD * forward_s, backward_s),
            phase="backward",
        )


def _limit_of_repetition_s(costs: StepCosts) -> float:
    """Return the most seconds that the operators take which the data flow shows as repeated; 0 if it shows none.

    It follows all operators, sums of gradients included; the trace only follows the code of modules.
    """
    limit_s = 0.0
    for operators in costs.record.needless_operators:
        if operators.reason == "repeated":
            tolerance = costs.tolerance_of("repeated")
            limit_s = max(limit_s, (1.0 + tolerance) * _needless_s(costs, operators))
    return limit_s


def _line_of_repetition(
    costs: StepCosts, works: list[NeedlessWork]
) -> ProgramCode | None:
    """Return the line that runs the forward pass of ``works`` again.

    None if the data flow shows less than half of that pass as repeated.
    """
    repeated_s = sum(
        work.seconds
        for work in works
        if work.kind == "repeated_forward" and work.phase == "forward"
    )
    for operators in costs.record.needless_operators:
        if operators.reason != "repeated" or repeated_s <= 0.0:
            continue
        share = operators.phase_shares.get("forward", 0.0)
        if share * costs.mean_s("forward") >= _MOST_OF_PASS * repeated_s:
            return _line_of_operators(operators)
    return None


def _number_of_passes(works: list[NeedlessWork]) -> float:
    """Return how often the work is done in a step: by its forward pass, if ``works`` have one."""
    for work in works:
        if work.phase == "forward":
            return work.count
    return works[0].count


def _first_pass_evaluates(
    costs: StepCosts, works: list[NeedlessWork], passes: float
) -> bool:
    """Return whether the first of the passes that ``works`` repeat has no backward pass: it only evaluates.

    The later one then trains, so that of the two only a forward pass can be saved. If each of n passes had a backward
    pass, those of the later ones would take (n - 1) / n of the phase.
    """
    backward_s = sum(work.seconds for work in works if work.phase == "backward")
    most_s = passes / (passes + 1.0) * costs.mean_s("backward")
    has_forward = any(work.phase == "forward" for work in works)
    return has_forward and backward_s > _SURELY_MORE * most_s


def find_needless_operators(costs: StepCosts) -> Iterator[Finding]:
    """Find operators that the data-flow analysis of a step shows as possibly needless: one finding per reason.

    Problems that the trace shows too, and with the module's name, are left out.
    """
    for operators in costs.record.needless_operators:
        if _is_shown_by_trace(costs, operators):
            continue
        saves_s = _needless_s(costs, operators)
        shares = operators.phase_shares
        facts = {"share": operators.share, "operators": float(operators.count)}
        if _repeats_passes(operators):
            facts["passes"] = 1.0
        phase = max(shares, key=lambda phase: shares[phase] * costs.mean_s(phase))
        uncompiled_share = costs.record.uncompiled_shares.get(phase, 0.0)
        if operators.reason in PLACE_REASONS and uncompiled_share > 0.0:
            facts["uncompiled"] = uncompiled_share
        yield costs.finding(
            operators.reason,
            saves_s,
            may=operators.reason not in _CERTAINLY_NEEDLESS,
            code=_line_of_operators(operators),
            high_s=_most_saved_s(costs, operators, saves_s),
            phase=phase,
            what=operators.what,
            facts=facts,
        )


def _most_saved_s(
    costs: StepCosts, operators: NeedlessOperators, saves_s: float
) -> float:
    """Return the most seconds that a step may save without ``operators``, where ``saves_s`` is the estimate."""
    tolerance = _TOLERANCES.get(operators.reason, _NEEDLESS_TOLERANCE)
    most_s = tolerance * saves_s
    if operators.reason == "accumulated":
        # One large batch in place of several small ones also computes its products at a higher rate.
        most_s = max(most_s, operators.share * _slow_computing_s(costs))
    return most_s


def _repeats_passes(operators: NeedlessOperators) -> bool:
    """Return whether ``operators`` repeat whole forward and backward passes, as a closure does that is called twice.

    What a module repeats in its ``forward`` is within a single pass.
    """
    is_within_pass = (operators.function or "").endswith(".forward")
    if operators.reason != "repeated" or is_within_pass:
        return False
    shares = operators.phase_shares
    return all(shares.get(phase, 0.0) >= _SHARE_OF_PASSES for phase in MODEL_PHASES)


def _slow_computing_s(costs: StepCosts) -> float:
    """Return the seconds of forward and backward beyond those of their matrix products at the peak rate.

    Large batches approach that rate.
    """
    computing_s = sum(costs.mean_s(phase) for phase in MODEL_PHASES)
    return max(computing_s - costs.term_s("ideal"), 0.0)


def _line_of_operators(operators: NeedlessOperators) -> ProgramCode | None:
    """Return the line of ``operators``; None for a reason about the whole model."""
    if operators.reason in MODEL_REASONS:
        return None
    return ProgramCode(operators.function, operators.file, operators.line)


def _traced_works(costs: StepCosts) -> Sequence[NeedlessWork]:
    """Return the work that the trace shows as possibly needless."""
    waterfall = costs.record.waterfall
    return () if waterfall is None else waterfall.needless


def _is_shown_by_trace(costs: StepCosts, operators: NeedlessOperators) -> bool:
    """Return whether the trace shows about as much of the problem of ``operators``, with the name of a module.

    If whole passes are repeated, the trace can only name the whole model, and the line of the data flow shows more.
    """
    if _repeats_passes(operators):
        return False
    seconds_by_module: defaultdict[str | None, float] = defaultdict(float)
    for work in _traced_works(costs):
        if work.kind in _TRACED_KINDS.get(operators.reason, ()):
            seconds_by_module[work.what] += work.seconds
    if not seconds_by_module:
        return False
    needless_s = _needless_s(costs, operators)
    return max(seconds_by_module.values()) >= _ENOUGH_IN_TRACE * needless_s


def all_needless_s(costs: StepCosts) -> float:
    """Return the seconds of a mean step of all operators that may be needless.

    The operators of side work may have another reason, too: they count once.
    """
    side_work_s = 0.0
    other_reasons_s = 0.0
    for operators in costs.record.needless_operators:
        if operators.reason in MODEL_REASONS:
            continue  # fusing operators saves their time, too
        if operators.reason in PLACE_REASONS:
            side_work_s += _needless_s(costs, operators)
        else:
            other_reasons_s += _needless_s(costs, operators)
    return max(side_work_s, other_reasons_s)


def _needless_s(costs: StepCosts, operators: NeedlessOperators) -> float:
    """Return the seconds of a mean step that ``operators`` take.

    Recording slowed down the step in which they were timed, so only their share of each phase is used.
    """
    return sum(
        share * costs.mean_s(phase) for phase, share in operators.phase_shares.items()
    )
