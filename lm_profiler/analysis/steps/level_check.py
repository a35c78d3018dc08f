"""Checks whether steps after the measured ones have the same level, since a short measurement cannot show
whether the level lasts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lm_profiler.analysis.steps.statistics import robust_std
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.record.quantities import count_text, duration_text
from lm_profiler.record.steps import StepRow

_FEWEST_LATER_STEPS = 3  # one or two later steps may be slow by chance
_FEWEST_MEASURED_STEPS = 10  # fewer measured steps do not show the spread of step times
# A difference is reported if it is at least this share of the level, ...
_LEAST_DIFFERENCE = 0.05
# ... this many standard deviations of the measured steps (with autocorrelated noise, AR(1) of 0.6 to 0.9, 3 would give
# false alarms in 2 % of runs, 4 in under 1 %), ...
_LEAST_DEVIATIONS = 4.0
# ... and this many seconds: timing the actions of a step takes up to that long.
_LEAST_DIFFERENCE_S = 3e-4
# The later steps must take at least this long: another program may delay a process for about a second.
_LEAST_SPAN_S = 1.0


def level_check_note(
    model: StepModel, measured: Sequence[StepRow], later: Sequence[StepRow]
) -> list[str]:
    """Return a note if ``later`` untraced steps differ from what the ``model`` of the ``measured`` steps predicts.

    The list is empty if they do not differ, or if there are too few steps to tell.
    """
    # Which kind of step comes next is random, so steps of several kinds cannot be predicted.
    if (
        len(later) < _FEWEST_LATER_STEPS
        or len(measured) < _FEWEST_MEASURED_STEPS
        or model.kinds
    ):
        return []
    indices = np.array([row.step - measured[0].step for row in later])
    if indices.min() < 0:  # the steps are not later ones
        return []
    later_s = np.array([row.time("step") for row in later])
    expected_s = model.expected_later(indices)
    has_times = bool(np.all(later_s > 0.0) and np.all(expected_s > 0.0))
    if not has_times or float(np.sum(later_s)) < _LEAST_SPAN_S:
        return []

    log_difference = float(np.median(np.log(later_s / expected_s)))
    share = math.expm1(log_difference)
    usual_s = float(np.median(expected_s))
    is_small = (
        abs(share) < _LEAST_DIFFERENCE or abs(share) * usual_s < _LEAST_DIFFERENCE_S
    )
    least_beyond_noise = _LEAST_DEVIATIONS * _std_around_model(model)
    if is_small or abs(log_difference) < least_beyond_noise:
        return []
    direction = "slower" if share > 0.0 else "faster"
    later_usual_s = usual_s * (1.0 + share)
    times = f"{duration_text(later_usual_s)}, not {duration_text(usual_s)}"
    steps = f"the {count_text(len(later), 'step')} after the measured ones are {abs(share):.0%} {direction} ({times})"
    return [
        f"{steps}: the step time may be changing; measure longer, or watch the run (--watch=true)"
    ]


def _std_around_model(model: StepModel) -> float:
    """Return the standard deviation of the logarithms of the measured steps around the model.

    Warm-up steps and odd steps are left out; without any other step it is infinite.
    """
    is_counted = ~model.odd
    is_counted[: model.cut] = False
    if not is_counted.any():
        return math.inf
    return robust_std(np.log(model.seconds[is_counted] / model.expected[is_counted]))
