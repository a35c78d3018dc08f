"""Calls amid backward, some of which are DDP's buckets, against what made them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated_ranks import ALL, FLAG, NOBODY, simulate, usual

from lm_profiler.analysis.ranks.course import course_of
from lm_profiler.analysis.ranks.rank_timeline import BACKWARD, RankTimeline
from lm_profiler.analysis.ranks.replay import work_of
from lm_profiler.analysis.ranks.shared_calls import BESIDE, told_apart
from lm_profiler.record.parts import PARTS

REDUCE = "gloo:all_reduce"
PROGRAM = [
    *[("work", "data", 1.0), ("work", "other", 1.0), *FLAG, ("work", "forward", 1.0)],
    *[("work", "backward", 0.3), ("call", REDUCE, NOBODY), ("work", "backward", 0.2), ("call", REDUCE, ALL)],
    *[("work", "backward", 0.3), ("call", REDUCE, NOBODY), ("work", "backward", 0.2), ("call", REDUCE, ALL)],
    ("work", "optimizer", 1.0),
]
"""The second call amid backward is the module's own; the others are buckets."""

SENT = [None, None, 400, 12, 800, 100]
"""Bytes of the calls of a step."""


def sent(timeline: RankTimeline, sizes: list[int | None]) -> dict[tuple[str, int], int | None]:
    return {(c.group, c.number): sizes[k % len(sizes)] for k, c in enumerate(timeline.collectives)}


@pytest.mark.parametrize("part", ["data", "backward"])
def test_a_call_of_the_modules_own_holds_the_ranks_and_buckets_do_not(part: str) -> None:
    work_s = usual(3, 12, noise=0.05)
    work_s[part][1] += 0.03
    truth = simulate(work_s, PROGRAM)
    told = [told_apart(timeline, sent(timeline, SENT), [400, 800, 100]) for timeline in truth.timelines]
    timelines = [timeline for timeline in told if timeline is not None]
    work = work_of(course_of(timelines, timelines[0].steps, overlap=True))
    np.testing.assert_allclose(work.own_s, truth.own_s, atol=1e-7)
    np.testing.assert_allclose(work.waiting_s, truth.waiting_s, atol=1e-7)


def test_a_backward_without_buckets_has_calls_of_the_modules_own_alone() -> None:
    """Under ``no_sync``, where another backward tells the buckets."""
    timeline = simulate(usual(2, 2), PROGRAM).timelines[0]
    sizes = [None, None, 12, 12, 12, 12, *SENT]
    told = told_apart(timeline, sent(timeline, sizes), [400, 800, 100])
    assert told is not None
    beside = [k for k, call in enumerate(told.collectives) if call.name.endswith(BESIDE)]
    assert beside == [2, 3, 4, 5, 9]


@pytest.mark.parametrize("buckets, known", [(3, False), (4, True)])
def test_without_sizes_that_tell_more_calls_than_buckets_are_not_known(buckets: int, known: bool) -> None:
    """Four calls in each backward, all in another precision than DDP says."""
    timeline = simulate(usual(2, 3), PROGRAM).timelines[0]
    told = told_apart(timeline, sent(timeline, [None, None, 200, 200, 200, 200]), [400] * buckets)
    assert told == (timeline if known else None)


def test_calls_in_other_phases_are_left_alone() -> None:
    timeline = simulate(usual(2, 3), PROGRAM).timelines[0]
    codes = np.where(timeline.codes == BACKWARD, PARTS.index("forward"), timeline.codes).astype(np.uint8)
    forward = replace(timeline, codes=codes)
    assert told_apart(forward, {}, [400]) == forward
