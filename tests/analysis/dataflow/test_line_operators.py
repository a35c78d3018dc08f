"""Lines such as ``x @ y`` run operators without a call: their time is that of torch, not of Python code."""

import inspect

import pytest
import torch
from made_calls import made_call
from torch import Tensor, nn

from lm_profiler.analysis.dataflow.line_operators import operators_of_lines, with_line_operators
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.record.operator_calls import CodeLine, LineOperators, StepCalls
from lm_profiler.record.run_record import PythonTime

MS = 1e-3


class Distances(nn.Module):
    def forward(self, rows: Tensor, codes: Tensor) -> Tensor:
        products = torch.matmul(rows, codes.T)
        distances = rows @ codes.T - products  # syntax
        joined = sum(part * 2.0 for part in distances.unbind())  # syntax
        assert isinstance(joined, Tensor)
        joined[0] = 1.0  # syntax
        return nn.functional.relu(joined[joined > 0.0]).exp()  # syntax


def syntax_lines(work: Distances, *inputs: Tensor) -> set[CodeLine]:
    operators = StepOperators(lambda: (work, []))
    operators.phase = "forward"
    operators.begin_step()
    with FlopCounter(operators=operators):
        work(*inputs)
    operators.end_part()
    step = operators.take(is_complete=True)
    assert step is not None
    return {call.syntax_line for call in step.calls if call.syntax_line is not None}


def test_operators_without_a_call_have_their_line() -> None:
    source, first_line = inspect.getsourcelines(Distances)
    planted = {first_line + index for index, text in enumerate(source) if "# syntax" in text}
    lines = syntax_lines(Distances(), torch.rand(4, 8), torch.rand(4, 8))
    assert {line.line for line in lines} == planted
    assert {line.file for line in lines} == {__file__}
    # Python knows the names of a function's classes from 3.11 on
    assert {line.function.removeprefix("Distances.") for line in lines} == {"forward"}


def test_the_overhead_of_a_call_is_not_the_operators_work() -> None:
    line = CodeLine("net.py", 12, "Net.forward")
    calls = [
        made_call(seconds=1 * MS, size=1),
        made_call("aten::mm", (1,), writes=(2,), seconds=4 * MS, size=4096, syntax_line=line),
        made_call("aten::mm", (1,), writes=(3,), seconds=9 * MS, size=4096, syntax_line=line, phase="backward"),
    ]
    operators = operators_of_lines(StepCalls(calls=calls))
    places = [(line.phase, line.line, line.function, line.calls) for line in operators]
    # an autograd Function may run both of its passes on one line
    assert places == [("backward", 12, "Net.forward", 1), ("forward", 12, "Net.forward", 1)]
    assert [line.seconds for line in operators] == pytest.approx([8 * MS, 3 * MS])


def row(milliseconds: float, what: str = "python", line: int = 12, function: str = "Net.forward") -> PythonTime:
    return PythonTime(
        phase="forward", file="net.py", line=line, function=function, what=what, seconds=milliseconds * MS, calls=0
    )


@pytest.mark.parametrize(
    "operators_ms, python_ms, torch_ms",
    [
        (8.0, 2.0, 8.0),
        (15.0, 0.0, 10.0),  # measured in another step: no more than was recorded
    ],
)
def test_operators_of_a_line_are_not_python_code(operators_ms: float, python_ms: float, torch_ms: float) -> None:
    operators = LineOperators(
        phase="forward", file="net.py", line=11, function="Net.forward", calls=3, seconds=operators_ms * MS
    )
    others = [row(5.0, function="Net.loss"), row(1.0, what="numpy")]
    divided = with_line_operators([row(6.0), row(4.0, line=13), *others], [operators])
    python_s = sum(time.seconds for time in divided if (time.function, time.what) == ("Net.forward", "python"))
    (torch_row,) = [time for time in divided if time.what == "torch"]
    assert python_s == pytest.approx(python_ms * MS)
    assert torch_row.seconds == pytest.approx(torch_ms * MS)
    assert (torch_row.line, torch_row.calls) == (11, 3)
    assert [time for time in divided if time in others] == others
