"""Walks over the host's events of a trace: which operator and module each belongs to.

Times are integers of nanoseconds since an arbitrary moment.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.trace.packed_trace import (
    BACKWARD_LINK,
    FORWARD_LINK,
    LAUNCH,
    MODULE,
    NONE,
    OPERATOR,
    PackedTrace,
    Rows,
)


class DriverCall(NamedTuple):
    """A call of the driver that gave the device work, or waited for it.

    ``name``, ``operator``, ``module`` and ``inputs`` are numbers of the trace's names and inputs; NONE stands for none.
    """

    start: int
    length: int
    name: int
    correlation: int  # names kind it launched
    operator: int  # the name of the operator that made the call
    module: int
    number: int  # the number of that operator's call: an operator may launch several kernels
    inputs: int  # of that operator


class OperatorCalls(NamedTuple):
    """Operators' calls in the order in which they end, a column a field; names and inputs are numbers as above."""

    start: NDArray[Any]
    length: NDArray[Any]
    name: NDArray[Any]
    caller: NDArray[Any]  # the operator that made the call
    module: NDArray[Any]
    number: NDArray[Any]  # of the call
    inputs: NDArray[Any]
    own_ns: NDArray[Any]  # the length without that of the operators that it calls
    # whether an operator of the same name, another overload, called it: no call of its own
    is_overload: NDArray[Any]


class _Nesting(NamedTuple):
    """Facts about each event, an entry for each of its ``rows``; the last entry stands for no event."""

    around: Rows  # the row of the range around the event
    operator: Rows  # the row of the operator that the event is, or is in
    module: Rows  # the number of the name of its module


def walk(packed: PackedTrace) -> tuple[OperatorCalls, list[DriverCall]]:
    """Return the calls of all operators, and all launches by their start.

    What runs in the backward pass belongs to the module in whose forward pass its node of the graph was made: the
    profiler links the two (``fwdbwd``). What is recomputed there is in its module's own range again.
    """
    # the last row, to which all refer that have no range around them, or no operator
    no_event = np.full(6, NONE)
    rows = np.vstack((packed.host_rows(), no_event))
    nesting = _nesting_of(rows)
    return _operator_calls(rows, nesting), _driver_calls(rows, nesting)


def _nesting_of(rows: Rows) -> _Nesting:
    """Follow the events of each thread in time; the last of ``rows`` stands for none."""
    none = len(rows) - 1
    around, operator, module = (
        [none] * len(rows),
        [none] * len(rows),
        [NONE] * len(rows),
    )
    # the rows of the ranges that are open in each thread, the innermost last
    open_ranges: defaultdict[int, list[int]] = defaultdict(list)
    module_of_link: dict[int, int] = {}  # until the backward node of a link comes
    ends = (rows[:, 0] + rows[:, 1]).tolist()

    for index, (start, _, thread, kind, value, _) in enumerate(rows[:none].tolist()):
        stack = open_ranges[thread]
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        inner = stack[-1] if stack else none
        around[index] = inner
        if kind == FORWARD_LINK:
            module_of_link[value] = module[inner]
        elif kind == BACKWARD_LINK:
            if stack:
                module[inner] = module_of_link.pop(value, module[inner])
        else:
            operator[index] = index if kind == OPERATOR else operator[inner]
            module[index] = value if kind == MODULE else module[inner]
            if kind != LAUNCH:
                stack.append(index)
    return _Nesting(
        around=np.array(around), operator=np.array(operator), module=np.array(module)
    )


def _operator_calls(rows: Rows, nesting: _Nesting) -> OperatorCalls:
    """Return the calls of all operators, in the order in which they end.

    ``value`` and ``inputs`` are the numbers of the name and of the inputs in the row of an operator.
    """
    start, length, _, kind, value, inputs = rows.T
    is_operator = kind == OPERATOR
    name = np.where(is_operator, value, NONE)
    parent = nesting.operator[nesting.around]
    caller = name[parent]
    is_again = is_operator & (parent == nesting.around) & (name == caller)
    for index in np.flatnonzero(is_again).tolist():
        caller[index] = caller[parent[index]]
    # as floats, because damaged lengths can add up to more than 64 bits hold
    length_within = np.bincount(
        parent[is_operator], weights=length[is_operator], minlength=len(length)
    )
    own_ns = np.maximum(length - length_within, 0).astype(np.int64)

    calls = np.flatnonzero(is_operator)
    ends = start + length
    # of those that end at one moment, the inner ones first
    by_end = calls[np.lexsort((-calls, ends[calls]))]
    number = _call_numbers(nesting)
    columns = (
        start,
        length,
        name,
        caller,
        nesting.module,
        number,
        inputs,
        own_ns,
        is_again,
    )
    return OperatorCalls(*(column[by_end] for column in columns))


def _driver_calls(rows: Rows, nesting: _Nesting) -> list[DriverCall]:
    """Return all launches by their start.

    ``value`` and ``rest`` are the name and the inputs of an operator's row, the correlation and the name of a launch's.
    """
    start, length, _, kind, value, rest = rows.T
    # For a launch in no operator, ``nesting.operator`` selects the last row. It is no operator: its entries are NONE.
    operator_names = np.where(kind == OPERATOR, value, NONE)
    operator_inputs = np.where(kind == OPERATOR, rest, NONE)

    launches = np.flatnonzero(kind == LAUNCH)
    operators = nesting.operator[launches]
    # in the order of the fields of DriverCall
    columns = (
        start[launches],
        length[launches],
        rest[launches],  # the name
        value[launches],  # the correlation
        operator_names[operators],
        nesting.module[launches],
        _call_numbers(nesting)[launches],
        operator_inputs[operators],
    )
    by_launch = zip(*(column.tolist() for column in columns), strict=True)
    return [DriverCall(*fields) for fields in by_launch]


def _call_numbers(nesting: _Nesting) -> Rows:
    """Return the number of the operator's call that each event is, or is in: that operator's row; NONE if in none."""
    none = len(nesting.operator) - 1
    return np.where(nesting.operator == none, NONE, nesting.operator)
