"""Which line repeats a computation, by the lines that led to both calls."""

import pytest
from made_calls import made_call

from lm_profiler.analysis.dataflow.repeats import repeated_calls
from lm_profiler.record.operator_calls import CodeLine, StepCalls

STEP, AGAIN = CodeLine("train.py", 1, "step"), CodeLine("train.py", 2, "step")
LOSS, HELPER = CodeLine("loss.py", 10, "loss"), CodeLine("loss.py", 20, "helper")


@pytest.mark.parametrize(
    "first,later,expected",
    [
        ([STEP, LOSS], [AGAIN, LOSS], AGAIN),
        ([STEP, LOSS], [STEP, HELPER], HELPER),
        ([STEP], [STEP, LOSS, HELPER], LOSS),
        ([STEP, LOSS, HELPER], [STEP, LOSS], LOSS),
        ([STEP, LOSS], [STEP, LOSS], LOSS),
        ([STEP], [], None),
    ],
)
def test_the_outermost_line_that_led_only_to_the_repetition_is_returned(
    first: list[CodeLine], later: list[CodeLine], expected: CodeLine | None
) -> None:
    calls = [
        made_call("op", (0,), writes=(result,), lines=tuple(lines), value=7)
        for result, lines in ((1, first), (2, later))
    ]
    assert repeated_calls(StepCalls(calls=calls), dead=()) == {1: expected}
