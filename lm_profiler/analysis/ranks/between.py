"""Who comes late to the steps: what a rank does between them (validation, checkpoints), which is in no phase."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lm_profiler.analysis.ranks.course import Course
from lm_profiler.analysis.ranks.track import OUTSIDE


class Late(NamedTuple):
    """By how much ``rank`` (an index) is longer between steps than the median of the others, seconds a step."""

    rank: int
    seconds: float


def late_from_between(course: Course) -> Late | None:
    """The rank that is longest at work between the steps; None where steps between were left out."""
    if len(course.steps) < 2 or (np.diff(course.steps) != 1).any():
        return None
    lasted_ns = [float(track.marks_ns[-1] - track.marks_ns[0] - track.spent_ns().sum()) for track in course.tracks]
    waits_ns = np.where(course.parts == OUTSIDE, course.waits_ns, 0).sum(axis=0)
    own_s = (np.array(lasted_ns) - waits_ns) * 1e-9 / len(course.steps)
    rank = int(own_s.argmax())
    return Late(rank, float(own_s[rank] - np.median(np.delete(own_s, rank))))
