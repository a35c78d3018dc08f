"""Steps are counted through the stages."""

from __future__ import annotations

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.callbacks import StageOptions
from lm_profiler.callbacks.stages import StageCounter


def passed_through(schedule: StageCounter) -> list[str | None]:
    """The stage of every step, until there is none."""
    stages = []
    while schedule.stage is not None:
        stages.append(schedule.stage)
        schedule.advance()
    return stages


@pytest.mark.parametrize(
    "steps, expected",
    [
        ({"warmup": 0, "measure": 1, "memory": 0, "trace": 0}, ["measure"]),
        ({"warmup": 1, "measure": 1, "memory": 0, "trace": 1}, ["warmup", "measure", "trace"]),
        ({"warmup": 0, "measure": 1, "memory": 1, "trace": 0}, ["measure", "memory"]),
        ({"warmup": 2, "measure": 3, "trace": 2}, ["warmup"] * 2 + ["measure"] * 3 + ["trace"] * 2),
        ({}, []),
    ],
)
def test_stages_follow_each_other_and_those_of_no_steps_are_passed_over(
    steps: dict[str, int], expected: list[str]
) -> None:
    schedule = StageCounter(steps)
    assert passed_through(schedule) == expected
    assert schedule.planned == steps


def test_a_stage_can_be_ended_early() -> None:
    schedule = StageCounter({"warmup": 2, "measure": 100, "trace": 2})
    assert [schedule.advance() for _ in range(3)] == [False, True, False]  # whether a stage is over
    assert (schedule.stage, schedule.steps_done) == ("measure", 1)
    schedule.end_stage()
    assert (schedule.stage, schedule.steps_done) == ("trace", 0)
    schedule.end_stage()
    assert schedule.stage is None


def test_impossible_stages_are_refused() -> None:
    options = ("warmup_steps", "measure_steps")
    said = {of: refusal(ValueError, lambda of=of: StageOptions(**{of: -1})) for of in options}
    assert_stored("callbacks/refused: negative stages", said)
