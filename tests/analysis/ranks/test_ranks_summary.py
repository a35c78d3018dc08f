"""The record's part on ranks."""

from dataclasses import replace

import pytest
from cuda_trace import cuda_step
from simulated_ranks import simulate, usual_work_s
from stored_texts import assert_stored

from lm_profiler.analysis.ranks.ranks_summary import communication_figures, ranks_of
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.analysis.why.traced import Traced, broken_down


def test_the_busiest_and_idlest_ranks_and_the_last_steps_are_kept() -> None:
    work_s = usual_work_s(ranks=70, steps=3)
    work_s["forward"][3:11] += 0.03
    work_s["forward"][20:28] -= 0.01
    summary = ranks_of(simulate(work_s).timelines, 70, overlap=True)
    assert [times.rank for times in summary.by_rank] == [0, *range(3, 11), *range(20, 28)]
    assert summary.hosts == {"here": list(range(70))}
    truth = simulate(usual_work_s(ranks=2, steps=600))
    summary = ranks_of(truth.timelines, 2, overlap=True)
    assert summary.columns == list(range(345, 601))
    for rank in (0, 1):
        assert summary.by_rank[rank].own_by_column_s == pytest.approx(truth.own_s[rank, 344:].sum(axis=1), abs=1e-6)
    truth = simulate(usual_work_s(ranks=2, steps=6))
    summary = ranks_of(truth.timelines, 2, overlap=True, steps=[3, 4, 5])
    assert (summary.steps, summary.columns) == (3, [3, 4, 5])


def test_silent_ranks_and_those_on_another_clock_are_not_compared() -> None:
    two_of_four = ranks_of(simulate(usual_work_s(ranks=2, steps=6, noise=0.05)).timelines, 4, overlap=True)
    assert_stored("analysis/notes: silent ranks", {"two of four": two_of_four.notes})
    assert two_of_four.world == 4
    truth = simulate(usual_work_s(ranks=2, steps=3))
    assert ranks_of(truth.timelines[:1], 2, overlap=True) is None
    assert ranks_of(truth.timelines, 2, overlap=True, steps=[99]) is None
    first, second, third = simulate(usual_work_s(ranks=3, steps=3)).timelines
    summary = ranks_of([first, second, replace(third, clock="there")], 3, overlap=True)
    assert (summary.heard, len(summary.notes)) == (2, 1)
    assert ranks_of([first, replace(second, clock="there")], 2, overlap=True) is None


def test_exposed_communication_excludes_overlap_and_waiting() -> None:
    """The all-reduce runs from 100 to 130 µs of the step, a matrix product until 110."""
    traced = broken_down(traced_work(PackedTrace(cuda_step())))
    for waiting_s, exposed_s in (
        (None, 20e-6),
        ({}, 20e-6),
        ({"forward": 1.0, "backward": 15e-6}, 5e-6),
        ({"backward": 1e-3}, 0.0),
    ):
        figures = communication_figures(traced, waiting_s)
        assert figures["exposed_s"] == pytest.approx({"backward": exposed_s}, abs=1e-12)
        assert figures["exposed_source"].startswith("rank 0's")
        assert ("including" in figures["exposed_source"]) is (waiting_s is None)
    assert communication_figures(Traced([], [], 2, on_device=False)) == {}
    assert communication_figures(None) == {}
