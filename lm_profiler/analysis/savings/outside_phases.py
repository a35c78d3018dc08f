"""Finds the costs outside the phases: between steps, and the owners of the time in ``other``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from lm_profiler.analysis.savings.step_costs import (
    BACKWARD_PER_FORWARD,
    RARE_SHARE,
    LoopLine,
    ProgramCode,
    StepCosts,
)
from lm_profiler.record.run_record import (
    CHECKPOINT,
    EPOCH,
    FIRST_BATCH,
    FIRST_STEP,
    LIGHTNING,
    OURS,
    TRAIN_DATALOADER,
    VALIDATION,
    Finding,
    FindingName,
    OutsideSteps,
    OwnedTime,
)

# the least share of a gap that its costliest line must have to be named
_LEAST_LINE_SHARE = 0.2
# the least share of a gap in which the model must run without gradients to be mentioned
_ACTING_SHARE = 0.1
# What is left of an owner's time without the calls that each step needs is too uncertain below this share.
_LEAST_AVOIDABLE_SHARE = 0.25
_LOGGER_ENDINGS = ("Logger", "Monitor")  # of class names


def _line_outside(costs: StepCosts, event: str) -> ProgramCode | None:
    """Return the line in which ``event`` spends most of its time, with its caller in ``what``; None if unknown."""
    for activity in costs.outside_steps:
        if activity.what == event and activity.file is not None:
            return ProgramCode(
                owner=activity.function,
                file=activity.file,
                line=activity.line,
                what=_caller_of(activity),
            )
    return None


def _caller_of(activity: OutsideSteps) -> str | None:
    """Return the line of the loop that calls ``activity``, such as ``train.py:12``.

    None if it is unknown, or if it is the line itself in which most of the activity's time is spent.
    """
    costliest_line = f"{PurePath(activity.file or '').name}:{activity.line}"
    return None if activity.caller == costliest_line else activity.caller


def find_costs_between_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find the costs of validation, checkpoints and epoch boundaries, inside or outside the measured steps."""
    # How often a validation comes that was seen only once is not known.
    is_single = costs.times_outside(VALIDATION) == 1
    yield costs.finding(
        "validation",
        costs.outside_s(VALIDATION),
        may=is_single,
        code=_line_outside(costs, VALIDATION),
    )
    yield costs.finding("checkpoint", costs.outside_s(CHECKPOINT))
    loader_calls: list[OutsideSteps] = []
    for activity in costs.outside_steps:
        if activity.what == TRAIN_DATALOADER:
            loader_calls.append(activity)
        elif activity.owner is not None:
            yield costs.finding("owner", activity.per_step_s, owner=activity.owner)
    for loader_call in loader_calls:
        yield costs.finding("reload", loader_call.per_step_s, owner=loader_call.owner)

    # The cost of a new epoch, apart from creating its loader: ending the old epoch and starting the new one, and the
    # additional time of its first step.
    epoch_boundary_s = costs.outside_s(EPOCH)
    first_step_s = costs.outside_s(FIRST_BATCH) + costs.outside_s(FIRST_STEP)
    starts_workers = (
        costs.settings.num_workers and not costs.settings.persistent_workers
    )
    line = _line_outside(costs, EPOCH) or _line_outside(costs, FIRST_BATCH)
    if loader_calls:
        yield costs.finding("epoch", epoch_boundary_s, code=line)
    elif starts_workers:
        yield costs.finding("worker_start", epoch_boundary_s + first_step_s)
    else:
        yield costs.finding("epoch", epoch_boundary_s + first_step_s, code=line)


def find_costly_owners(costs: StepCosts) -> Iterator[Finding]:
    """Find the owners of the time in ``other``: callbacks, loggers, hooks of the module.

    Checkpoints have a finding of their own.
    """
    seconds_by_owner: defaultdict[str, float] = defaultdict(float)
    longest_action: dict[str, str] = {}  # by owner
    actions = _actions_of_program(costs)
    scales = _scales_of_actions(costs, actions)
    share_of_owners = 1.0 - _lock_wait_share(costs)
    for action in actions:
        # Gaps, and actions named by the program, have no owner: each is treated as its own owner.
        owner = action.owner or action.name
        scale = scales.scale_of(costs, action) * share_of_owners
        seconds_by_owner[owner] += _mean_action_s(costs, action) * scale
        # actions are sorted, the longest first
        longest_action.setdefault(owner, action.name)

    most_s = max(seconds_by_owner.values(), default=0.0)
    for owner, seconds in seconds_by_owner.items():
        is_logging = owner.endswith(_LOGGER_ENDINGS) or owner == LIGHTNING
        name: FindingName = "logging" if is_logging else "owner"
        cost = _CodeCost(None, seconds)
        # The owner of a line is not recorded; the costliest line is assumed to belong to the costliest owner.
        if not is_logging and seconds == most_s:
            avoidable_s = seconds - costs.needed_calls_s
            if avoidable_s < _LEAST_AVOIDABLE_SHARE * seconds:
                continue
            cost = _cost_of_main_code(costs, avoidable_s)
        facts = {} if cost.code is None else cost.code.facts
        # The work of other processes would take time here, too. The outputs of a module that is not trained can be kept
        # only if data repeats.
        may = bool(facts.get("exchanges")) or _keeps_outputs(facts)
        yield costs.finding(
            name,
            cost.seconds,
            may=may,
            code=cost.code,
            high_s=cost.high_s,
            phase="other",
            owner=longest_action[owner],
        )
    yield from _find_function_missed_by_actions(costs, most_s)


def _actions_of_program(costs: StepCosts) -> list[OwnedTime]:
    """Return the actions that belong neither to this profiler nor to the loop, and that have no other finding."""
    has_checkpoint_finding = costs.outside_s(CHECKPOINT) > 0.0
    actions = []
    for action in costs.actions():
        if action.owner == OURS or belongs_to_loop(action):
            continue
        is_gap = not action.owner
        if is_gap and costs.calls_model_unmarked:
            continue
        is_checkpoint = (
            action.owner.endswith("Checkpoint") or action.action == "save_checkpoint"
        )
        if not (is_checkpoint and has_checkpoint_finding):
            actions.append(action)
    return actions


def _keeps_outputs(facts: Mapping[str, float]) -> bool:
    """Return whether a finding with these facts advises to keep the outputs of a module, and nothing surer."""
    return bool(facts.get("untrained")) and not facts.get("unfrozen")


def _lock_wait_share(costs: StepCosts) -> float:
    """Return the share of ``other`` in which the training thread waits for another thread, which has a finding."""
    lock_wait_s = costs.lock_wait_s("other")
    if lock_wait_s <= 0.0:
        return 0.0
    return lock_wait_s / costs.mean_s("other", clock="host_time")


def _find_function_missed_by_actions(
    costs: StepCosts, most_s: float
) -> Iterator[Finding]:
    """Find a function of the program that few or none of the timed steps called, although most steps do.

    The step whose code was traced called it. ``most_s`` are the seconds of the costliest owner in the timed steps.
    """
    owned = costs.record.other_by_owner
    function = costs.main_outer_call()
    if owned is None or function is None or costs.contended:
        return
    function_s = costs.outer_call_s(function) or 0.0
    timed_s = sum(action.seconds for action in owned.actions)
    missed_s = costs.mean_s("other", clock="host_time") - timed_s
    explains_most = function_s >= 0.5 * missed_s
    is_seen_in_actions = most_s >= 0.5 * function_s
    if missed_s > 0.0 and explains_most and not is_seen_in_actions:
        yield costs.finding(
            "owner", min(function_s, missed_s), code=function, phase="other"
        )


def _main_function(costs: StepCosts, seconds: float) -> ProgramCode | None:
    """Return the function to which most of ``seconds`` outside the phases are due; None if it is not known.

    It is the first of these, if there is one: a function that takes half of the time by itself; one that takes half of
    the time of all functions that the loop calls, with what they call; the function with the costliest line, if that
    takes a third. For the forward pass of a module that is not trained, it is that of the outermost module.
    """
    function = costs.main_line("other", seconds) or costs.main_outer_call()
    if function is not None and "untrained" in function.facts:
        return costs.main_untrained_call() or function
    if function is not None:
        return function
    function = costs.costliest_line("other", seconds / 3.0)
    if function is None:
        return None
    return function._replace(facts={"costliest_line": 1.0})


class _CodeCost(NamedTuple):
    """What the costliest code of an owner costs."""

    code: (
        ProgramCode | None
    )  # None if it is not known: then it is all code of the owner
    seconds: float
    high_s: float | None = None  # upper limit of ``seconds``; None: that of the owner


def _cost_of_main_code(costs: StepCosts, owner_s: float) -> _CodeCost:
    """Return the costliest code of an owner that takes ``owner_s``: a line of the program's own loop, or a function."""
    function = _main_function(costs, owner_s)
    loop_line = _main_loop_line(costs, owner_s, function)
    if loop_line is not None:
        code = _code_of_loop_line(costs, loop_line, owner_s)
        code_s = min(loop_line.seconds, owner_s)
    elif function is not None:
        code = function._replace(what=function.owner)
        code_s = _time_of_function_s(costs, function, owner_s)
    else:
        return _CodeCost(None, owner_s)
    # The code's time is as uncertain as that of other Python code. It is at most the owner's.
    high_s = min(
        code_s * (1.0 + costs.tolerance_of("python")),
        owner_s * (1.0 + costs.tolerance_of("owner")),
    )
    if "unfrozen" not in code.facts:
        return _CodeCost(code, code_s, high_s)
    # Without gradients its backward pass is saved; its forward pass, too, if its outputs are kept.
    backward_s = min(BACKWARD_PER_FORWARD * code_s, costs.mean_s("backward"))
    return _CodeCost(code, backward_s, high_s + backward_s)


def _main_loop_line(
    costs: StepCosts, owner_s: float, function: ProgramCode | None
) -> LoopLine | None:
    """Return the costliest line of the program's own loop; None if it takes too little of an owner's ``owner_s``.

    The main ``function`` is preferred to a line with less than half of the time. It is preferred to any line if it runs
    the forward pass of a module that is not trained.
    """
    lines = costs.loop_lines()
    if not lines:
        return None
    least_share = _LEAST_LINE_SHARE
    if function is not None:
        if "untrained" in function.facts:
            return None
        takes_half = "costliest_line" not in function.facts
        if takes_half:
            least_share = 0.5
    return lines[0] if lines[0].seconds >= least_share * owner_s else None


def _code_of_loop_line(costs: StepCosts, line: LoopLine, seconds: float) -> ProgramCode:
    """Return the code of ``line``, which takes a part of an owner's ``seconds``.

    If lines of the same file run the model without gradients for a tenth of ``seconds``, a fact names the longest one.
    """
    facts = {
        "loop_line": line.seconds / seconds,
        "exchanges": float(line.exchanges),
        **line.facts,
    }
    if line.main_call is not None:
        facts["short_torch_calls"] = float(costs.short_torch_calls(line.main_call))
    acting_lines = [
        other for other in costs.loop_lines() if other.acts and other.file == line.file
    ]
    if sum(acting.seconds for acting in acting_lines) >= _ACTING_SHARE * seconds:
        facts["acting_line"] = float(acting_lines[0].line)
    return ProgramCode(
        file=line.file, line=line.line, what=line.main_function, facts=facts
    )


def _time_of_function_s(
    costs: StepCosts, function: ProgramCode, owner_s: float
) -> float:
    """Return the seconds per step of ``function``, which an owner calls that takes ``owner_s``.

    Its time was recorded in one step. If it took less than a quarter of the owner's time there, that step was unlike
    the others, and all of the owner's time counts.
    """
    function_s = costs.outer_call_s(function)
    if function_s is None or function_s < 0.25 * owner_s:
        return owner_s
    return min(function_s, owner_s)


class _ActionScales(NamedTuple):
    """Factors by which the times of actions in the few timed steps are multiplied, so that they hold for all steps.

    The total time of ``other`` is known from all measured steps; how it divides among actions only from the few steps
    in which actions were timed.
    """

    usual: float  # of actions that most timed steps had
    rare: float

    def scale_of(self, costs: StepCosts, action: OwnedTime) -> float:
        return self.rare if _is_rare(costs, action) else self.usual


def _scales_of_actions(
    costs: StepCosts, actions_of_program: Sequence[OwnedTime]
) -> _ActionScales:
    """Return the factors from the times of actions in the few timed steps to those in all measured steps.

    The factor of the usual actions is ``other`` of all measured steps divided by the sum of their times. Time that the
    timed steps do not show, such as that of an evaluation once in 50 steps, is attributed to no action.
    """
    if costs.contended:
        # Here an action's time is that of its fastest step. The total includes the delay by other programs, which
        # affects all actions alike, those of the loop too: so they all share it, and the factor may exceed 1.
        actions: Sequence[OwnedTime] = [
            action for action in costs.actions() if action.owner != OURS
        ]
        largest_scale = math.inf
    else:
        # An action that runs only every few steps may be overrepresented in the timed steps: never scale up.
        actions = actions_of_program
        largest_scale = 1.0
    usual_s = 0.0
    rare_s = 0.0
    for action in actions:
        if _is_rare(costs, action):
            rare_s += _mean_action_s(costs, action)
        else:
            usual_s += _mean_action_s(costs, action)

    usual_scale = 1.0
    if usual_s > 0.0:
        usual_scale = min(_usual_total_s(costs) / usual_s, largest_scale)
    return _ActionScales(usual_scale, _rare_scale(costs, rare_s))


def _usual_total_s(costs: StepCosts) -> float:
    """Return the seconds of ``other`` in all measured steps that the usual actions share."""
    # With a pattern the timed steps are whole periods of it, so its longer steps belong to the total.
    if costs.contended and not costs.has_pattern:
        return costs.regular_s("other")
    return costs.mean_s("other", clock="host_time")


def _rare_scale(costs: StepCosts, rare_s: float) -> float:
    """Return the factor of the actions that few timed steps had, which took ``rare_s`` per timed step.

    They make the mean of ``other`` longer than its median, but in the timed steps they may be overrepresented.
    """
    summary = costs.record.host_time.get("other")
    if rare_s <= 0.0 or summary is None or summary.median is None:
        return 1.0
    rare_total_s = max((summary.mean or 0.0) - summary.median, 0.0)
    return min(rare_total_s / rare_s, 1.0)


def _is_rare(costs: StepCosts, action: OwnedTime) -> bool:
    """Return whether fewer than half of the timed steps had ``action``, and how often it comes is not known."""
    owned = costs.record.other_by_owner
    return (
        owned is not None
        and action.in_steps < 0.5 * owned.steps
        and not costs.has_pattern
    )


def _mean_action_s(costs: StepCosts, action: OwnedTime) -> float:
    """Return the seconds of ``action`` in a mean step: the mean of the timed steps, or less if it comes less often.

    On a busy machine its fastest step counts instead of the mean, if it is known.
    """
    mean_s = action.seconds
    if costs.contended and action.least_s is not None:
        mean_s = action.least_s
    owned = costs.record.other_by_owner
    if owned is None:
        return mean_s
    seconds_per_time = mean_s * owned.steps / max(action.in_steps, 1)
    is_before_validation = action.name.endswith(f" and {VALIDATION}")
    validations_per_step = costs.times_per_step(VALIDATION)
    if is_before_validation and validations_per_step is not None:
        # how often the loop validates is known from the whole run, and not only from the few timed steps
        mean_s = min(mean_s, seconds_per_time * validations_per_step)
    # An action that comes rarely makes its steps longer by its time.
    if _is_rare(costs, action) and costs.is_rarely_longer("other", seconds_per_time):
        mean_s = min(mean_s, seconds_per_time * RARE_SHARE)
    return mean_s


def belongs_to_loop(action: OwnedTime) -> bool:
    """Return whether ``action`` is Lightning's own work. Logging is not: the program requests it."""
    return action.owner == LIGHTNING and action.action != "logged metrics"
