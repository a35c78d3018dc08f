"""Tells in which parts of a step a change of its time lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A change is uniform if less than this share of it deviates from an equal ratio of all parts.
_UNIFORM = 0.4

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
