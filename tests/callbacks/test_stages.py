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


def test_stages_follow_each_other() -> None:
    schedule = StageCounter({"warmup": 2, "measure": 3, "memory": 1, "trace": 2})
    stages = passed_through(schedule)
    assert stages == ["warmup"] * 2 + ["measure"] * 3 + ["memory"] + ["trace"] * 2


@pytest.mark.parametrize(
    "steps, expected",
    [
        ({"warmup": 0, "measure": 1, "memory": 0, "trace": 0}, ["measure"]),
        ({"warmup": 1, "measure": 1, "memory": 0, "trace": 1}, ["warmup", "measure", "trace"]),
        ({"warmup": 0, "measure": 1, "memory": 1, "trace": 0}, ["measure", "memory"]),
        ({}, []),
    ],
)
def test_a_stage_of_no_steps_is_passed_over(steps: dict[str, int], expected: list[str]) -> None:
    schedule = StageCounter(steps)
    assert passed_through(schedule) == expected
    assert schedule.planned == steps


def test_advance_says_when_a_stage_is_over() -> None:
    schedule = StageCounter({"warmup": 2, "measure": 1})
    assert [schedule.advance() for _ in range(3)] == [False, True, True]


def test_a_stage_can_be_ended_early() -> None:
    schedule = StageCounter({"measure": 100, "trace": 2})
    schedule.advance()
    assert (schedule.stage, schedule.steps_done) == ("measure", 1)
    schedule.end_stage()
    assert (schedule.stage, schedule.steps_done) == ("trace", 0)
    schedule.end_stage()
    assert schedule.stage is None


def test_impossible_stages_are_refused() -> None:
    options = ("warmup_steps", "measure_steps")
    said = {of: refusal(ValueError, lambda of=of: StageOptions(**{of: -1})) for of in options}
    assert_stored("callbacks/refused: negative stages", said)
