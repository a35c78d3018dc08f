"""Finds functions of the program that sleep, compute outside of torch, call torch too often, or delay other threads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lm_profiler.analysis.savings.step_costs import StepCosts, are_many_short_calls
from lm_profiler.record.parts import PARTS, WORKING_PHASES
from lm_profiler.record.run_record import LIGHTNING, Finding, FindingName, PythonTime

# Gaps of a phase are attributed to a function only if it has this share of the Python time recorded in the phase.
_MAIN_SHARE = 0.75
# Recording makes Python slower: a function must take longer than the usual time of its phase by this factor.
_LONGER_THAN_USUAL = 1.5
_TRACEBACK = "traceback"  # the package in which anomaly detection spends its time
_PYTHON = "python"  # `PythonTime.what` of a line that calls nothing


def find_slow_python(costs: StepCosts) -> Iterator[Finding]:
    """Find functions of the program that sleep, compute outside of torch, or call torch too often."""
    # Python delays a device only while the device is idle: less than a tenth of the step is not worth a finding.
    if costs.on_device and costs.term_s("gaps") < 0.1 * costs.step_s:
        return
    for rows in costs.rows_of_functions(WORKING_PHASES):
        # Anomaly detection records the stack of each operator, and has a finding of its own.
        is_anomaly_detection = any(row.what == _TRACEBACK for row in rows)
        if costs.settings.anomalies and is_anomaly_detection:
            continue
        if _runs_in_longer_steps_only(costs, rows):
            continue
        yield _python_finding(costs, rows)


def _runs_in_longer_steps_only(costs: StepCosts, rows: Sequence[PythonTime]) -> bool:
    """Return whether a function makes every n-th step longer, so that the finding about the pattern reports it.

    This is so if the function took longer, in the one step in which Python was recorded, than its whole phase takes in
    a shorter step. How often it runs is then unknown, but the pattern's mean time per step is measured.
    """
    phase = rows[0].phase
    steady = costs.record.steadiness
    if steady is None or steady.pattern is None or steady.pattern_s is None:
        return False
    if steady.pattern.part != phase or steady.pattern_s <= 0.0:
        return False
    # in the shorter steps: ``pattern_s`` is what the longer ones add to the mean
    usual_s = costs.mean_s(phase) - steady.pattern_s
    recorded_s = sum(_outside_torch_s(row) for row in rows)
    return recorded_s > _LONGER_THAN_USUAL * usual_s


def _python_finding(costs: StepCosts, rows: Sequence[PythonTime]) -> Finding:
    """Return the finding about one function of the program: ``rows`` are its times, by what it called."""
    longest = max(rows, key=_outside_torch_s)
    phase = longest.phase
    phase_s = costs.mean_s(phase)
    function = _time_of_function(costs, phase, rows)
    most_s = function.most_s * (1.0 + costs.tolerance_of("python"))

    # The function sleeps if C functions take most of its time, and its thread slept for at least half of that.
    mostly_waits = function.waits_s > 0.5 * function.seconds
    use = costs.record.thread_use.get(phase)
    limit_s = phase_s - costs.lock_wait_s(phase)
    # The function may have waited in the one recorded step alone, for longer than a mean step.
    waits_s = min(function.waits_s, phase_s)
    sleeps = mostly_waits and use is not None and use.asleep_s >= 0.5 * waits_s
    name: FindingName = "python"
    if sleeps:
        name = "sleep"
    elif longest.what == LIGHTNING:
        name = "logging"
    # On a busy machine the time of a C function that does not sleep may include that of other programs.
    is_uncertain = costs.contended and mostly_waits and not sleeps
    return costs.finding(
        name,
        min(function.seconds, limit_s),
        high_s=min(most_s, limit_s),
        may=is_uncertain,
        phase=phase,
        owner=longest.function,
        file=longest.file,
        line=longest.line,
        what=longest.what,
        facts={"calls": float(longest.calls)},
    )


class _FunctionTime(NamedTuple):
    """The estimated seconds per step that a function of the program takes."""

    seconds: float  # outside of torch
    # Upper limit of ``seconds``. In phases other than forward it includes the function's torch calls.
    most_s: float
    waits_s: float  # the part of ``seconds`` in C functions, which may wait


def _time_of_function(
    costs: StepCosts, phase: str, rows: Sequence[PythonTime]
) -> _FunctionTime:
    """Estimate the seconds per step of one function, from the time recorded in one step and from the phase's gaps.

    ``rows`` are the recorded times of the function in ``phase``, by what it called.
    """
    recorded = _recorded_time(rows)
    python_limit_s = _python_limit_s(costs, phase)

    # what it computes outside of torch: likely, and at most
    computes_s = recorded.computes_s + min(recorded.python_s, python_limit_s)
    if phase == "forward":
        # The function's torch calls may be the model itself: they are not counted.
        outside_torch_s = recorded.computes_s + recorded.python_s
        most_computing_s = min(outside_torch_s, _outside_operators_s(costs, phase))
    else:
        # A hook or an optimizer: its torch calls may be a part of its time.
        most_computing_s = min(recorded.all_s, python_limit_s) - recorded.waits_s
    if costs.contended:
        # other programs lengthen computing, but not waiting
        slowdown = costs.slowdown_in(phase)
        computes_s *= slowdown
        most_computing_s *= slowdown
    seconds = recorded.waits_s + computes_s
    most_s = recorded.waits_s + most_computing_s

    # the second estimate, from the time of the phase without operators
    gap_s = _gap_of_function_s(costs, phase, rows)
    if not costs.contended:
        # On a busy machine it is too high, because other programs lengthen gaps.
        seconds = max(seconds, gap_s)
    most_s = max(most_s, gap_s)
    return _FunctionTime(seconds, most_s, recorded.waits_s)


class _RecordedTime(NamedTuple):
    """The recorded seconds of one function in a step, by activity."""

    waits_s: float  # C functions, which may wait
    python_s: float  # the function's own Python code
    computes_s: float  # other activities outside of torch
    all_s: float  # all activities, torch included


def _recorded_time(rows: Sequence[PythonTime]) -> _RecordedTime:
    waits_s = 0.0
    python_s = 0.0
    computes_s = 0.0
    for row in rows:
        if row.is_c_function:
            waits_s += row.seconds
        elif row.what == _PYTHON:
            python_s += row.seconds
        else:
            computes_s += _outside_torch_s(row)
    all_s = sum(row.seconds for row in rows)
    return _RecordedTime(waits_s, python_s, computes_s, all_s)


def _gap_of_function_s(
    costs: StepCosts, phase: str, rows: Sequence[PythonTime]
) -> float:
    """Return the seconds without operators in ``phase`` that one Python function causes; 0 unless it is the main one.

    ``rows`` are the recorded lines of the function.

    This is a second estimate of the function's time, from untraced steps. Recording Python calls has a limit, and a
    cost that is not known exactly. The estimate needs a function with nearly all of the Python time recorded in the
    phase.
    """
    gap_s = costs.gap_s(phase)
    recorded_s = 0.0
    for row in costs.record.python_times:
        if row.phase == phase:
            recorded_s += row.seconds
    if math.isinf(gap_s) or recorded_s <= 0.0:
        return 0.0
    share = sum(_outside_torch_s(row) for row in rows) / recorded_s
    if share < _MAIN_SHARE:
        return 0.0
    return share * gap_s


def _python_limit_s(costs: StepCosts, phase: str) -> float:
    """Return the most seconds of ``phase`` that may count as the program's own Python code."""
    if phase == "forward":
        # Only the gaps count. An operator of a line such as ``x * y`` may belong to the model.
        return costs.gap_s(phase)
    # In other phases a Python function is a hook or an optimizer, and its operators count as its time.
    limit_s = costs.mean_s(phase)
    if phase == "optimizer":  # its matrix products have a finding of their own
        limit_s -= costs.term_s("optimizer_products")
    return max(limit_s, 0.0)


def _outside_operators_s(costs: StepCosts, phase: str) -> float:
    """Return the seconds of ``phase`` beyond the least time that its operators need by the waterfall."""
    operators_s = 0.0
    if costs.record.waterfall is not None:
        for term in costs.record.waterfall.terms:
            if term.name in ("ideal", "bandwidth"):
                operators_s += term.phases.get(phase, 0.0)
    return max(costs.mean_s(phase) - operators_s, 0.0)


def _outside_torch_s(row: PythonTime) -> float:
    """Return the seconds of ``row`` outside of torch and libraries; many very short torch calls count as outside."""
    if row.what == "library":
        return 0.0
    if row.what == "torch":
        return row.seconds if are_many_short_calls(row.calls, row.seconds) else 0.0
    return row.seconds


def find_busy_threads(costs: StepCosts) -> Iterator[Finding]:
    """Find other threads of the process that compute in Python, so that the training thread waits for the lock."""
    threads = costs.record.other_threads
    if threads is None:
        return
    saves_s = sum(costs.lock_wait_s(part) for part in PARTS)
    if costs.on_device:
        # A wait of the host delays a device only while the device is idle.
        saves_s = min(saves_s, costs.term_s("gaps"))
    yield costs.finding(
        "threads",
        saves_s,
        owner=threads.busiest,
        file=threads.file,
        line=threads.line,
        what=threads.function,
    )


def find_sleeping_phases(costs: StepCosts) -> Iterator[Finding]:
    """Find phases in which the thread sleeps, if no Python time was recorded that could name the line."""
    has_several_ranks = len(costs.record.rank_step_s) > 1
    if costs.on_device or has_several_ranks:
        # waiting for the device or for other ranks is normal
        return
    phases_with_a_line = {row.phase for row in costs.record.python_times}
    for phase, use in costs.record.thread_use.items():
        if phase not in WORKING_PHASES or phase in phases_with_a_line or not use.wall_s:
            continue
        asleep_s = costs.mean_s(phase) * use.asleep_s / use.wall_s
        asleep_s = max(asleep_s - costs.lock_wait_s(phase), 0.0)
        # Only "may": the threads of an operator wait for each other, and longer if other programs use the cores.
        yield costs.finding("sleep", asleep_s, may=True, phase=phase)
