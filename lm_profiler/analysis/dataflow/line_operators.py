"""Divides the time of the program's lines between Python code and operators such as ``x @ y``.

Python's profiler reports calls. Operators that a line runs without a call are seen by the data flow of a step only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from lm_profiler.analysis.dataflow.loops import overhead_of_calling_s
from lm_profiler.record.operator_calls import CodeLine, LineOperators, StepCalls
from lm_profiler.record.run_record import PythonTime

# The program's lines in backward are those of its autograd Functions. In the other phases they are those of hooks and
# optimizers, which need not run their operators.
_PHASES = ("forward", "backward")
_PYTHON, _OPERATORS = "python", "torch"  # what a line does: ``PythonTime.what``


def operators_of_lines(step: StepCalls) -> list[LineOperators]:
    """Return the operators of forward and backward that lines run without calling a function, the longest first.

    The overhead of calling an operator is left out, because it is no work of the operator.
    """
    call_overhead_s = overhead_of_calling_s(step)
    # by phase and line
    seconds: defaultdict[tuple[str, CodeLine], float] = defaultdict(float)
    calls: defaultdict[tuple[str, CodeLine], int] = defaultdict(int)
    for call in step.calls:
        if call.phase in _PHASES and call.syntax_line is not None:
            place = (call.phase, call.syntax_line)
            calls[place] += 1
            seconds[place] += max(call.seconds - call_overhead_s, 0.0)
    operators = [
        LineOperators(
            phase=phase,
            file=line.file,
            line=line.line,
            function=line.function,
            calls=calls[phase, line],
            seconds=line_s,
        )
        for (phase, line), line_s in seconds.items()
        if line_s > 0.0
    ]
    return sorted(operators, key=lambda line: line.seconds, reverse=True)


def with_line_operators(
    rows: Sequence[PythonTime], operators: Iterable[LineOperators]
) -> list[PythonTime]:
    """Return the times of lines in which the time of ``operators`` counts as torch, and not as Python code.

    The two were measured in different steps, so at most the recorded Python time of a function is moved to torch. The
    same share is taken from all lines of the function, because Python's profiler counts the time up to a call for the
    line of the call.
    """
    by_function: defaultdict[tuple[str, str, str], list[LineOperators]] = defaultdict(
        list
    )
    for line in operators:
        by_function[line.phase, line.file, line.function].append(line)
    divided = list(rows)
    for (phase, file, function), lines in by_function.items():
        operators_s = sum(line.seconds for line in lines)
        python_s = 0.0
        for row in rows:
            if _is_python_of(row, phase, file, function):
                python_s += row.seconds
        if python_s <= 0.0:
            continue
        moved_share = min(operators_s / python_s, 1.0)
        for index, row in enumerate(divided):
            if _is_python_of(row, phase, file, function):
                rest_s = (1.0 - moved_share) * row.seconds
                divided[index] = row.model_copy(update={"seconds": rest_s})
        scale = moved_share * python_s / operators_s
        divided += [_row_of_operators(line, scale) for line in lines]
    return sorted(divided, key=lambda row: row.seconds, reverse=True)


def _is_python_of(row: PythonTime, phase: str, file: str, function: str) -> bool:
    """Return whether ``row`` is the time of Python code of a function."""
    is_of_function = (row.phase, row.file, row.function) == (phase, file, function)
    return is_of_function and row.what == _PYTHON


def _row_of_operators(line: LineOperators, scale: float) -> PythonTime:
    return PythonTime(
        phase=line.phase,
        file=line.file,
        line=line.line,
        function=line.function,
        what=_OPERATORS,
        seconds=scale * line.seconds,
        calls=line.calls,
    )
