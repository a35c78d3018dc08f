"""Tells in which parts of a step a change of its time lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A change is uniform if less than this share of it deviates from an equal ratio of all parts.
_UNIFORM = 0.4
_LEAST_SHARE = 0.5  # a change is attributed to a part with this share of it
# In a part that is this share of the step, a change cannot be distinguished from one of all parts.
_NEARLY_WHOLE_STEP = 0.75

Seconds = NDArray[np.float64]


def part_with(before_s: Seconds, after_s: Seconds, share: float) -> int | None:
    """Return the index of the part that changed most, if it makes up at least ``share`` of the change of the sum.

    ``before_s`` and ``after_s`` hold the mean seconds of each part.
    """
    differences_s = after_s - before_s
    largest = int(np.abs(differences_s).argmax())
    if abs(differences_s[largest]) < share * abs(differences_s.sum()):
        return None
    return largest


def is_uniform(before_s: Seconds, after_s: Seconds) -> bool:
    """Return whether all parts have changed by about the same ratio, as they do when the machine's speed changes."""
    differences_s = after_s - before_s
    change_s = float(differences_s.sum())
    expected_s = change_s * before_s / float(before_s.sum())
    deviation_s = float(np.abs(differences_s - expected_s).sum())
    return deviation_s < _UNIFORM * abs(change_s)


def part_of_change(before_s: Seconds, after_s: Seconds) -> int | None:
    """Return the index of the part that makes up most of a change.

    None if no part does, or if all have changed by the same ratio.
    """
    part = part_with(before_s, after_s, _LEAST_SHARE)
    if part is None or not is_uniform(before_s, after_s):
        return part
    # If nearly all of the step is one part, its own change looks uniform too.
    share_of_step = float(before_s[part] / before_s.sum())
    return part if share_of_step >= _NEARLY_WHOLE_STEP else None
