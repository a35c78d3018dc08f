"""Steps are counted through the stages."""

from __future__ import annotations

from raised import refusal
from stored_texts import assert_stored

from lm_profiler.callbacks import StageOptions
from lm_profiler.callbacks.stages import StageCounter


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
