"""Timelines get their clocks; one whose clock is unknown is told of and left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lm_profiler.analysis.ranks.rank_timeline import ClockOffset, Collective, RankTimeline
from lm_profiler.callbacks.outcome.clocks import with_clocks
from lm_profiler.measure.collectives.alignment import ClockComparison, ClockReading


def test_each_timeline_has_its_own_clock_and_one_without_is_left_out() -> None:
    clocks = ClockComparison(torch.distributed.HashStore(), 0, 3, 1.0, own="a")
    clocks._clocks = ["a", "b", None]
    clocks.readings["b"] = [ClockReading(100, 7, 2), ClockReading(300, 9, 1)]
    instants = np.array([150, 250])
    one = RankTimeline(
        0,
        "host",
        np.array([1]),
        np.array([0, 2]),
        np.array([0, 7], np.uint8),
        instants,
        instants,
        [Collective("0", 1, "gloo:all_reduce")] * 2,
        ClockOffset(),
    )
    known, notes = with_clocks([replace(one, rank=rank) for rank in range(3)], clocks)
    assert [each.clock for each in known] == [ClockOffset(), ClockOffset((100, 300), (7, 9), (2, 1))]
    (note,) = notes
    assert "rank 2" in note
