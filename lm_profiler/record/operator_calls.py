"""The calls of operators in one step: what each reads and writes, how long it took, and which lines called it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class CodeLine(NamedTuple):
    """A line of the program."""

    file: str
    line: int
    function: str


class Operand(NamedTuple):
    """A factor of a matrix product, with the shares of it that hold nothing but zeros."""

    storage: int
    rows: int
    columns: int
    zeros: float = 0.0  # of its elements
    zero_rows: float = 0.0  # of its rows
    zero_columns: float = 0.0  # of its columns
    # of the fullest row the share that is not zero, or of the fullest column, whichever is less
    fullest_line: float = 1.0


class Product(NamedTuple):
    """A product of two matrices, or of ``batch`` pairs of them."""

    batch: int
    left: Operand
    right: Operand


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """A call of an operator. Storages are numbers, each of which stands for the memory of one or more tensors."""

    name: str  # such as ``aten::mm``
    phase: str
    seconds: float
    reads: tuple[int, ...]  # the storages whose content it reads
    writes: tuple[int, ...]  # the storages that it makes or changes
    # those of them of whose earlier content it leaves nothing
    overwrites: frozenset[int] = frozenset()
    # the program's lines that led to it, the outermost first; in backward only those of hooks and the like
    lines: tuple[CodeLine, ...] = ()
    # the number of the call whose backward pass it is a part of; None in forward, or if that is unknown
    forward: int | None = None
    # calls with the same number compute the same; None if it is unknown what this one computes
    value: int | None = None
    # whether it computes the same in each step, because nothing that it depends on changes
    is_constant: bool = False
    is_host_read: bool = False  # whether Python reads the values
    elements: int = 0  # of its largest result
    size: int = 0  # elements of its largest argument or result
    first_elements: int = 0  # of its first argument
    # whether it makes a far larger tensor of two that hold few elements, such as the table of all pairs of two columns
    broadcasts: bool = False
    makes_double: bool = False  # whether that result is of float64
    product: Product | None = None
    # of the rows of a table's gradient, the share that is zero, because no index looks them up
    zero_rows: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepCalls:
    """The calls of one step in their order, and what is left of their results when it ends."""

    calls: Sequence[OperatorCall]
    # storages of the parameters that an optimizer updates
    trained: frozenset[int] = frozenset()
    # storages that code which is not seen may read, now or after the step
    kept: frozenset[int] = frozenset()
    # whether all that reads a result was seen: False if kernels ran that bypass torch
    is_complete: bool = True
    trained_elements: int = 0  # of all those parameters
    # whether the parameters are of float64
    is_double: bool = False

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """The seconds of all calls of each phase."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for call in self.calls:
            seconds[call.phase] += call.seconds
        return seconds

    @cached_property
    def writers(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the calls that write each storage, in their order."""
        writers: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            for storage in call.writes:
                writers[storage].append(number)
        return writers

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the calls that read each storage, in their order."""
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            for storage in call.reads:
                readers[storage].append(number)
        return readers

    @cached_property
    def backward_of(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the calls of each call's backward pass."""
        backward: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            if call.forward is not None:
                backward[call.forward].append(number)
        return backward

    def with_backward(self, number: int) -> tuple[int, ...]:
        """Return a call and those of its backward pass."""
        return (number, *self.backward_of.get(number, ()))

    def lines_of(self, number: int) -> tuple[CodeLine, ...]:
        """Return the lines that led to a call, or else those that led to the call whose backward pass it is of."""
        call = self.calls[number]
        if call.lines or call.forward is None:
            return call.lines
        return self.calls[call.forward].lines

    def place_of(self, numbers: Iterable[int]) -> CodeLine | None:
        """Return the innermost line that led to half of the seconds of the calls, or else the line with most of them.

        None if no line of the program led to them.
        """
        total_s = 0.0
        seconds_by_line: defaultdict[CodeLine, float] = defaultdict(float)
        depth_of_line: dict[CodeLine, int] = {}
        for number in numbers:
            seconds = self.calls[number].seconds
            total_s += seconds
            for depth, line in enumerate(dict.fromkeys(self.lines_of(number))):
                seconds_by_line[line] += seconds
                depth_of_line[line] = max(depth, depth_of_line.get(line, 0))
        main_lines = [
            line for line, seconds in seconds_by_line.items() if seconds >= total_s / 2
        ]
        if main_lines:
            return max(main_lines, key=depth_of_line.__getitem__)
        return max(seconds_by_line, key=seconds_by_line.__getitem__, default=None)
