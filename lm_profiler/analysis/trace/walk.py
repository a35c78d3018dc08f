"""Finds the operator and the module to which each event of the host in a trace belongs.

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
    LENGTH,
    MODULE,
    NONE,
    OPERATOR,
    START,
    PackedTrace,
    Rows,
)


class DriverCall(NamedTuple):
    """A call of the device's driver that launched work, or waited for it.

    ``name``, ``operator`` and ``module`` are numbers of names, and ``inputs`` is a number of inputs (see
    ``PackedTrace``); NONE if there is none.
    """

    start: int
    length: int
    name: int
    correlation: int  # a number that it shares with the work that it launched
    operator: int  # the name of the operator that made the call
    module: int
    # identifies the call of that operator, which may launch several kernels
    number: int
    inputs: int  # the inputs of that operator


class OperatorCalls(NamedTuple):
    """The calls of operators, ordered by end, as columns. Names and inputs are numbers (see ``DriverCall``)."""

    start: NDArray[Any]
    length: NDArray[Any]
    name: NDArray[Any]
    caller: NDArray[Any]  # the name of the operator that made the call
    module: NDArray[Any]
    number: NDArray[Any]  # identifies the call
    inputs: NDArray[Any]
    own_ns: NDArray[Any]  # the length without that of the operators that it calls
    # whether it was called by an operator of the same name (another overload), and thus does not count as a call
    is_overload: NDArray[Any]


class _Nesting(NamedTuple):
    """The surroundings of each event, as (rows,) arrays; the last row stands for no event."""

    around: Rows  # the row of the range that directly contains the event
    operator: Rows  # the row of the operator that the event is, or is within
    module: Rows  # the number of the name of its module


def walk(packed: PackedTrace) -> tuple[OperatorCalls, list[DriverCall]]:
    """Return the calls of all operators, and all launches ordered by start.

    Events of the backward pass belong to the module in whose forward pass their node of the graph was created: the
    profiler links the two (``fwdbwd``). Recomputed activations are in a range of their module again.
    """
    # a last row for no event, to which events refer that are in no range, or in no operator
    empty_row = np.full(6, NONE)
    rows = np.vstack((packed.host_rows(), empty_row))
    nesting = _nesting_of(rows)
    return _operator_calls(rows, nesting), _driver_calls(rows, nesting)


def _nesting_of(rows: Rows) -> _Nesting:
    """Return the nesting of the events, by following each thread in time.

    ``rows`` are those of ``PackedTrace.host_rows`` (ordered by start, the outer range first), and a last row that
    stands for no event.
    """
    no_event = len(rows) - 1  # the index of the last row
    around = [no_event] * len(rows)
    operator = [no_event] * len(rows)
    module = [NONE] * len(rows)
    # by thread: the rows of the ranges that contain the present moment, the innermost last
    open_ranges: defaultdict[int, list[int]] = defaultdict(list)
    # the module in which each link starts, until its end in backward is reached
    module_of_link: dict[int, int] = {}
    ends = (rows[:, START] + rows[:, LENGTH]).tolist()

    events = rows[:no_event].tolist()
    for index, (start, _, thread, kind, value, _) in enumerate(events):
        stack = open_ranges[thread]
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        innermost = stack[-1] if stack else no_event
        around[index] = innermost
        # ``value`` is the number of the link, or of the name of a module
        if kind == FORWARD_LINK:
            module_of_link[value] = module[innermost]
        elif kind == BACKWARD_LINK:
            # The range around the link belongs to the module of its forward pass.
            if stack:
                module[innermost] = module_of_link.pop(value, module[innermost])
        else:
            operator[index] = index if kind == OPERATOR else operator[innermost]
            module[index] = value if kind == MODULE else module[innermost]
            if kind != LAUNCH:
                stack.append(index)
    return _Nesting(
        around=np.array(around), operator=np.array(operator), module=np.array(module)
    )


def _operator_calls(rows: Rows, nesting: _Nesting) -> OperatorCalls:
    """Return the calls of all operators, ordered by end."""
    # for an operator, ``value`` is the number of its name, and the last column is the number of its inputs
    start, length, _, kind, value, inputs = rows.T
    is_operator = kind == OPERATOR
    name = np.where(is_operator, value, NONE)
    # the row of the operator around each event, and the number of its name
    parent = nesting.operator[nesting.around]
    caller = name[parent]
    # Without a module or a launch in between, the event around a call is the operator that calls it.
    is_called_directly = parent == nesting.around
    # An operator may call another overload of itself: the caller is then the caller of the first one.
    is_overload = is_operator & is_called_directly & (name == caller)
    for index in np.flatnonzero(is_overload).tolist():
        caller[index] = caller[parent[index]]
    # floats, because the sum of damaged lengths may exceed 64 bits
    length_within = np.bincount(
        parent[is_operator], weights=length[is_operator], minlength=len(length)
    )
    own_ns = np.maximum(length - length_within, 0).astype(np.int64)

    calls = np.flatnonzero(is_operator)
    ends = start + length
    # of calls that end at the same moment, the inner ones first
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
        is_overload,
    )
    return OperatorCalls(*(column[by_end] for column in columns))


def _driver_calls(rows: Rows, nesting: _Nesting) -> list[DriverCall]:
    """Return all launches, ordered by start."""
    # ``value`` and ``rest`` are the name and the inputs of an operator, or the correlation and the name of a launch
    start, length, _, kind, value, rest = rows.T
    # A launch outside of operators refers to the last row, which is no operator, so that both entries are NONE.
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
    """Return for each event the number of the operator call that it is, or is within: the row of that call; or NONE."""
    no_event = len(nesting.operator) - 1
    return np.where(nesting.operator == no_event, NONE, nesting.operator)
